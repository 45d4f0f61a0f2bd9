"""Predicted against published training runs: the error of step times and of memory, by source.

    python benchmarks/bench_simulator.py [--runs] [--fitted]
    python benchmarks/bench_simulator.py --rank NeMo

The runs are in published_runs.jsonl, each with its source. Those marked `fitted` were used to choose the efficiencies
of the device classes in gemini/cluster/presets.json; the table is of the others. No cluster is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from gemini.cluster import load_cluster
from gemini.tune import ParallelConfig, StepResult, TransformerCosts, TuningRequest, simulate, tune
from gemini.tune.parallel_config import read_parallel
from gemini.tune.transformer_model import Transformer, read_transformer

FIXED = (
    "precision", "kernels", "attention", "fused_loss", "tensor_overlap", "reduce_bytes", "overlap_data",
)  # fmt: skip
RUNS = Path(__file__).parent / "published_runs.jsonl"


def load_runs() -> list[dict[str, Any]]:
    """Return all published runs."""
    return [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]


def read_run(run: dict[str, Any]) -> tuple[Transformer, ParallelConfig, float]:
    """Return model, configuration and measured seconds per step of a run."""
    model, config = read_transformer(run["model"]), read_parallel(run["parallel"])
    seconds = run.get("seconds") or config.batch * model.sequence / config.devices / run["tokens_per_device"]
    return model, config, seconds


def predict_run(run: dict[str, Any]) -> tuple[StepResult, float]:
    """Return the prediction of a run and its relative error."""
    model, config, seconds = read_run(run)
    found = simulate(TransformerCosts(model), load_cluster(run["cluster"]).resized(config.devices), config)
    return found, found.seconds / seconds - 1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", action="store_true", help="print every run")
    parser.add_argument("--fitted", action="store_true", help="the fitted runs instead of the others")
    parser.add_argument("--rank", metavar="WORD", help="instead: rank runs whose source has WORD in a search")
    args = parser.parse_args()
    if args.rank:
        for run in load_runs():
            if args.rank in run["source"]:
                print_rank(run)
        return
    errors: dict[tuple[str, str, str], list[float]] = {}
    memory = []
    for run in load_runs():
        if run["fitted"] != args.fitted:
            continue
        found, error = predict_run(run)
        errors.setdefault((run["source"], run["cluster"], found.config.precision), []).append(error)
        if "memory_gib" in run:
            memory.append(found.memory.total / 2**30 / run["memory_gib"] - 1)
        if args.runs:
            print(
                f"{error:+7.1%}  {found.model:<12}{run['cluster']:<11}{found.config.devices:>6}  {found.config.label()}"
            )
    every = [one for values in errors.values() for one in values]
    for (source, cluster, precision), values in errors.items():
        print(f"{len(values):>4} runs  {_summary(values)}  {source}, {cluster}, {precision}")
    print(f"{len(every):>4} runs  {_summary(every)}  all")
    if memory:
        print(f"{len(memory):>4} runs  {_summary(memory)}  memory per device")


def print_rank(run: dict[str, Any]) -> None:
    """Print where a published configuration ranks among all that fit, and how much faster the search's choice is."""
    model, config, _ = read_run(run)
    costs, cluster = TransformerCosts(model), load_cluster(run["cluster"]).resized(config.devices)
    fixed = {name: getattr(config, name) for name in FIXED}
    found = tune(TuningRequest(costs, cluster, config.batch, fixed))
    own = simulate(costs, cluster, config)
    gain = 1 - found.best.seconds / own.seconds
    print(
        f"rank {found.rank_of(config):6.1%}, fits {own.fits}, choice {gain:+6.1%} faster  "
        f"{model.name}  {config.label()}"
    )


def _summary(values: list[float]) -> str:
    sizes = [abs(one) for one in values]
    return (
        f"mean error {statistics.fmean(sizes):6.1%}, signed {statistics.fmean(values):+6.1%}, largest {max(sizes):6.1%}"
    )


if __name__ == "__main__":
    main()
