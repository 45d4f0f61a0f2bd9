"""Gemini: train models too big or too slow for one device without touching their code."""

from gemini.compiler import GeminiCompiler
from gemini.config import GeminiConfig
from gemini.modes import Mode, auto, hybrid, pipeline, sharding, sharding_and_pipeline

__version__ = "0.1.0"

__all__ = [
    "GeminiCompiler",
    "GeminiConfig",
    "Mode",
    "auto",
    "hybrid",
    "pipeline",
    "sharding",
    "sharding_and_pipeline",
]
