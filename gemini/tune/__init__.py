"""Simulation of training steps on described clusters, and search for the best configuration.

from gemini.tune import ParallelConfig, TransformerCosts, find_transformer, simulate

model = TransformerCosts(find_transformer("llama3-70b"))
step = simulate(model, load_cluster("h100").resized(256), ParallelConfig(devices=256, batch=512, tensor=8))
"""

from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.step_simulation import StepResult, simulate
from gemini.tune.transformer_costs import TransformerCosts
from gemini.tune.transformer_model import Transformer, find_transformer
from gemini.tune.tuner import tune
from gemini.tune.tuning_request import TuningRequest
from gemini.tune.tuning_result import TuningResult

__all__ = [
    "ParallelConfig",
    "StepResult",
    "Transformer",
    "TransformerCosts",
    "TuningRequest",
    "TuningResult",
    "find_transformer",
    "simulate",
    "tune",
]
