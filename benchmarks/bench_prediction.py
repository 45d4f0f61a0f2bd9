"""Predicted against measured steps on this machine: pipelines, shards, both, and their rank correlation.

    python benchmarks/bench_prediction.py [gpt | mlp | bert] [--steps 6]

Each model is captured and profiled once. Every configuration, with its fastest schedule, then trains in a process of
its own, by the settings that `gemini tune` writes. Run it on a quiet machine: readings of a busy one say nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

from gemini.tune import tune
from gemini.tune.machine_capture import capture_machine_costs
from gemini.tune.machine_search import machine_request
from gemini.tune.trial_runs import TrialTarget

# devices, tensor, pipeline, micro-batches; the rest of the devices are replicas
CONFIGURATIONS = (
    (2, 1, 2, 2), (2, 1, 2, 4), (2, 1, 2, 8), (2, 2, 1, 1), (2, 1, 1, 2), (4, 2, 2, 2), (4, 1, 4, 4),
)  # fmt: skip


class Gpt(nn.Module):
    """A decoder of equal layers."""

    def __init__(self, vocab: int = 4096, hidden: int = 384, layers: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 6, 4 * hidden, 0.0, "gelu", batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        values = self.embed(ids)
        for layer in self.layers:
            values = layer(values)
        return self.head(values)


def gpt() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a transformer and a batch."""
    torch.manual_seed(0)
    return Gpt(), (torch.randint(0, 4096, (8, 128)),)


def mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return wide linear layers and a batch."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(1536, 1536), nn.GELU()) for _ in range(8)]), (
        torch.randn(512, 1536),
    )


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a deeper, narrower transformer and a batch."""
    torch.manual_seed(0)
    return Gpt(2048, 192, 12), (torch.randint(0, 2048, (16, 128)),)


def main() -> None:
    """Print one line per configuration, then the errors and the rank correlation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("gpt", "mlp", "bert"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--predict", action="store_true", help="only predict")
    args = parser.parse_args()
    model, batch = {"gpt": gpt, "mlp": mlp, "bert": bert}[args.model]()
    costs = capture_machine_costs(model, batch)
    target = TrialTarget(f"{Path(__file__)}:{args.model}", (), args.steps, 60.0)
    pairs = []
    for devices, tensor, pipeline, count in CONFIGURATIONS:
        fixed = {"devices": devices, "tensor": tensor, "pipeline": pipeline, "micro_batch": costs.samples // count}
        found = tune(machine_request(costs, devices, costs.samples, fixed=fixed, composed=0)).best  # its schedule
        config = found.config
        if args.predict:
            parts = ", ".join(f"{name} {part * 1e3:.0f}" for name, part in found.parts.items() if part > 1e-4)
            print(f"{found.seconds * 1e3:7.0f} ms  {config.label()}: {parts}", flush=True)
            continue
        seconds, why = target.measure(found)
        if seconds is None:
            print(f"did not run    {config.label()}: {why}", flush=True)
            continue
        pairs.append((found.seconds, seconds))
        print(f"{found.seconds / seconds - 1:+7.1%}  measured {seconds:.3f} s  {config.label()}", flush=True)
    if args.predict:
        return
    errors = [abs(predicted / seconds - 1) for predicted, seconds in pairs]
    print(
        f"{len(pairs)} configurations of {args.model}: mean error {statistics.fmean(errors):.1%}, "
        f"largest {max(errors):.1%}, rank correlation {rank_correlation(pairs):.2f}"
    )


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Return Spearman's coefficient."""
    ranks = [[sorted(column).index(value) for value in column] for column in map(list, zip(*pairs))]
    first, second = ([value - statistics.fmean(one) for value in one] for one in ranks)
    scale = math.sqrt(sum(a * a for a in first) * sum(b * b for b in second))
    return sum(a * b for a, b in zip(first, second)) / scale if scale else 1.0


if __name__ == "__main__":
    main()
