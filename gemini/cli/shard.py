"""Plan the sharding of a model: which slices of its weights and values every shard holds, and what shards exchange.

gemini shard my_models.py:make_bert --size 2
gemini shard my_models.py:make_bert --size 4 --output plan.json --draw layer.svg
gemini shard my_models.py:make_bert --size 2 --dim -1 --override bert.pooler=replicate --override 'cls.*=shard'
gemini shard my_models.py:make_bert --size 8 --shard-memory 16000 --json

The function returns (model, args) or (model, args, kwargs): a model and one batch, which may be on the device meta.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.batch_errors import report_batch_errors
from gemini.cli.progress import ProgressBar
from gemini.errors import UsageError

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.tensor_parallel.shard_costs import ShardCosts
    from gemini.tensor_parallel.shard_options import ShardOptions
    from gemini.tensor_parallel.shard_plan import ShardPlan

SUMMARY = "plan the sharding of a model: layouts, collectives and memory per scope"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini shard`."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION; returns the model and a batch")
    parser.add_argument("--size", type=int, default=2, metavar="N", help="number of shards (2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="picture of a layer: .svg, .png, .pdf or .dot")
    parser.add_argument("--scope", metavar="NAME", help="scope that is drawn (default: the first layer)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_sharding_arguments(parser)
    speed = parser.add_argument_group("costs")
    speed.add_argument("--bandwidth", type=float, metavar="GB/S", help="what a shard sends (3)")
    speed.add_argument("--latency", type=float, metavar="US", help="of a collective (7)")
    speed.add_argument("--gflops", type=float, metavar="N", help="of the matrix products of a shard (50)")


def add_sharding_arguments(parser: argparse.ArgumentParser) -> Any:
    """Add the options that all commands share which plan shards; return their group."""
    rules = parser.add_argument_group("sharding")
    rules.add_argument("--dim", type=int, metavar="N", help="dimension of all weights: 0 reduction, -1 output")
    rules.add_argument(
        "--override", action="append", default=[], metavar="SCOPE=CHOICE",
        help="replicate, shard, 0 or -1 for a module or parameter; * stands for a part between dots",
    )  # fmt: skip
    rules.add_argument("--share", type=float, default=0.95, metavar="X", help="share of parameters to shard (0.95)")
    rules.add_argument("--shard-memory", type=float, metavar="MB", help="limit of weights, gradients and optimizer")
    return rules


def shard_options(args: argparse.Namespace) -> ShardOptions:
    """Return the options of the arguments."""
    from gemini.tensor_parallel.shard_options import ScopeOverride, ShardOptions

    overrides = tuple(ScopeOverride.read(text) for text in args.override)
    return ShardOptions(share=args.share, dim=args.dim, overrides=overrides, memory_mb=args.shard_memory)


def run(args: argparse.Namespace) -> int:
    """Capture and plan; show and write the result."""
    from gemini.tensor_parallel.plan_picture import check_picture_path, draw_plan
    from gemini.tensor_parallel.plan_summary import PlanSummary

    if args.size < 1:
        raise UsageError(f"--size {args.size} is no number of shards\n    → give 1 or more")
    if args.draw is not None:
        check_picture_path(args.draw)
    options, costs = shard_options(args), _costs(args)
    with ProgressBar() as bar:
        graph, plan = _plan(args, bar, options, costs)
        if args.size > 1 and not plan.sharded_share and not args.override:
            why = f" ({plan.replicated[0].name}: {plan.replicated[0].reason})" if plan.replicated else ""
            raise UsageError(f"--size {args.size}: no weight can be divided by it{why}\n    → give a smaller size")
        if args.output is not None:
            plan.save(args.output)
        if args.draw is not None:
            bar.step("draw")
            draw_plan(graph, plan, args.draw, args.scope)
    summary = PlanSummary(graph, plan)
    print(json.dumps({"plan": plan.to_json(), **summary.to_json()}, indent=1) if args.json else summary.table())
    return 0


def _costs(args: argparse.Namespace) -> ShardCosts:
    from gemini.tensor_parallel.shard_costs import ShardCosts

    given = {"link_gb": args.bandwidth, "latency_us": args.latency, "gflops": args.gflops}
    faults = [f"{name} = {value:g}" for name, value in given.items() if value is not None and not value > 0]
    if faults:
        raise UsageError(f"{', '.join(faults)}\n    → give numbers above 0")
    return ShardCosts(**{name: value for name, value in given.items() if value is not None})


def _plan(
    args: argparse.Namespace, bar: ProgressBar, options: ShardOptions, costs: ShardCosts
) -> tuple[Graph, ShardPlan]:
    from gemini.capture.entry import capture
    from gemini.capture.options import CaptureOptions
    from gemini.cli.profile import make_model
    from gemini.tensor_parallel.shard_planner import plan_shards

    bar.step("build the model")
    model, batch, keywords = make_model(args.target)
    bar.step("capture")
    with report_batch_errors(args.target, model, batch, keywords):
        graph = capture(model, batch, keywords, options=CaptureOptions(opens_leaves=True))
    bar.step(f"plan {args.size} shards")
    return graph, plan_shards(graph, args.size, options, costs)
