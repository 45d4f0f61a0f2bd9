"""Partition a model into stages and write them as Python: capture, profile, partition, generate.

gemini pipe my_models.py:make_bert --nparts 4 --output stages
gemini pipe my_models.py:make_bert --nparts 4 --output stages --check
gemini pipe my_models.py:make_bert --nparts 2 --partitioner mpipe --analytic h100 --output stages
gemini pipe my_models.py:make_bert --nparts 2 --sharding-size 2 --output stages

The function returns (model, args) or (model, args, kwargs): a model and one batch. The folder gets one
stage_<k>.py per stage, a manifest of their connections, and the graph, profile and partition. --check runs the stages,
in sequence and detached, and compares both with the model. --sharding-size also plans how the workers of a stage divide
its operators (see gemini shard), and writes that plan beside the stages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.batch_errors import report_batch_errors
from gemini.cli.partition_flags import add_partition_arguments, partition_options
from gemini.cli.progress import ProgressBar
from gemini.cli.shard import add_sharding_arguments, shard_options
from gemini.errors import UsageError

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.pipe import Piped
    from gemini.tensor_parallel.plan_summary import PlanSummary
    from gemini.tensor_parallel.shard_options import ShardOptions

SUMMARY = "partition a model into stages and write each as a Python file"
DIFFERENT = 1
SHARDS = "shards.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini pipe`."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION; returns the model and a batch")
    parser.add_argument("--nparts", type=int, default=4, metavar="N", help="number of workers (4)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="target folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a folder of edited stages")
    parser.add_argument("--partitioner", default="exact", metavar="NAME", help="partitioner (exact)")
    parser.add_argument("--check", action="store_true", help="run the stages and compare them with the model")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    model = parser.add_argument_group("capture and profile")
    model.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 … (default: the device of the model)")
    model.add_argument(
        "--analytic", metavar="NAME", help="estimate for a described device such as h100, without running the model"
    )
    model.add_argument("--profile", type=Path, metavar="FILE", help="use this profile (gemini profile --save)")
    model.add_argument("--rounds", type=int, default=3, metavar="N", help="measurement rounds (3)")
    model.add_argument("--no-cache", action="store_true", help="ignore cached measurements")
    model.add_argument("--depth", type=int, metavar="N", help="do not trace into modules nested deeper than N")
    model.add_argument(
        "--basic-block", action="append", default=[], metavar="CLASS", help="do not trace into this class"
    )
    add_partition_arguments(parser)
    add_sharding_arguments(parser).add_argument(
        "--sharding-size", type=int, metavar="N", help="workers that divide each stage (1)"
    )


def run(args: argparse.Namespace) -> int:
    """Pipe the model; print the analysis and the check. Exit code 1 if the stages differ."""
    if args.output is None and not args.check:
        raise UsageError("the stages have no use\n    → write them with --output DIR, or run them with --check")
    if args.sharding_size is not None and args.sharding_size < 1:
        raise UsageError(f"--sharding-size {args.sharding_size} is no number of shards\n    → give 1 or more")
    sharding = shard_options(args)
    with ProgressBar() as bar:
        bar.step("build the model")
        piped, batch, keywords = _pipe(args, bar)
        shards = None if args.sharding_size is None else _plan_shards(piped, args, sharding)
        report = None
        if args.check:
            bar.step("check")
            report = piped.check(batch, keywords)
    if args.json:
        data = _as_json(piped, report)
        print(json.dumps(data if shards is None else {**data, "shards": shards.to_json()}, indent=1))
    else:
        print(piped.analysis.table())
        if args.output is not None:
            lines = [text.count("\n") for text in piped.sources.values()]
            print(f"{args.output}: {len(lines)} stages, {sum(lines)} lines of Python")
        if shards is not None:
            print(f"\n{shards.table()}\n\n{_stage_lines(piped, shards)}")
        if report is not None:
            print(_verdict(report))
    return 0 if report is None or report.is_right else DIFFERENT


def _pipe(args: argparse.Namespace, bar: ProgressBar) -> tuple[Piped, tuple[Any, ...], dict[str, Any]]:
    from gemini.cli.profile import make_model
    from gemini.compiler import pipe_model
    from gemini.pipe.pipe_request import check_request
    from gemini.profiling import Profile

    if args.profile is not None and (args.analytic is not None or args.device is not None):
        raise UsageError("--profile together with --device or --analytic\n    → a saved profile needs neither")
    settings: dict[str, Any] = {
        "nparts": args.nparts,
        "partitioner": args.partitioner,
        "options": partition_options(args),
        "output": args.output,
        "overwrite": args.overwrite,
        "device": args.device,
        "analytic": args.analytic,
    }
    check_request(**settings)  # before the model is built
    settings["profile"] = None if args.profile is None else Profile.load(args.profile)
    model, batch, keywords = make_model(args.target)
    with report_batch_errors(args.target, model, batch, keywords):
        if args.sharding_size is not None:
            settings["graph"] = _opened_graph(args, model, batch, keywords)
        made = pipe_model(
            model, batch, keywords, **settings, depth=args.depth, basic_blocks=tuple(args.basic_block),
            rounds=args.rounds, cache=not args.no_cache, progress=bar.update,
        )  # fmt: skip
    return made, batch, keywords


def _opened_graph(args: argparse.Namespace, model: Any, batch: tuple[Any, ...], keywords: dict[str, Any]) -> Graph:
    """Return the graph with leaf modules opened, as the rules of shards need it."""
    from gemini.capture.entry import capture
    from gemini.capture.options import CaptureOptions

    options = CaptureOptions(opens_leaves=True)
    return capture(model, batch, keywords, depth=args.depth, basic_blocks=tuple(args.basic_block), options=options)


def _plan_shards(piped: Piped, args: argparse.Namespace, options: ShardOptions) -> PlanSummary:
    """Plan the shards of all stages, and write the plan beside them."""
    from gemini.tensor_parallel.plan_summary import PlanSummary
    from gemini.tensor_parallel.shard_planner import plan_shards

    plan = plan_shards(piped.graph, args.sharding_size, options)
    if args.output is not None:
        plan.save(args.output / SHARDS)
    return PlanSummary(piped.graph, plan)


def _stage_lines(piped: Piped, shards: PlanSummary) -> str:
    """Return the weights and collectives of every stage on a shard."""
    lines = []
    for at, nodes in enumerate(piped.partition.stages):
        names, exchanged = shards.of_nodes(nodes)
        local = sum(shards.plan.tensor(name).shard_bytes(shards.plan.size) for name in names)
        lines.append(f"stage {at}: {local / 1e6:.4g} MB of weights per shard, {exchanged} collectives")
    return "\n".join(lines)


def _verdict(report: Any) -> str:
    if report.is_exact:
        return "check: the sequential and the detached run equal the model exactly (outputs, gradients, buffers: 0)"
    right = "equal the model up to rounding" if report.is_right else "DIFFER from the model"
    return f"check: the stages {right}\n{report}"


def _as_json(piped: Piped, report: Any) -> dict[str, Any]:
    from dataclasses import asdict

    data = {"partition": piped.partition.to_json(), "analysis": piped.analysis.to_json()}
    return data if report is None else {**data, "check": {**asdict(report), "right": report.is_right}}
