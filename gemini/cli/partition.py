"""Partition a model into stages; show the cost of each and the predicted speedup.

gemini partition my_models.py:make_bert --nparts 4
gemini partition my_models.py:make_bert --nparts 4 --compare
gemini partition my_models.py:make_bert --nparts 4 --partitioner mpipe --output partition.json --draw cut.svg
gemini partition my_models.py:make_bert --nparts 4 --schedule zb_h1 --micro-batches 16 --memory 16000
gemini partition my_models.py:make_bert --nparts 2 --pin bert.embeddings=0 --uncut bert.encoder.layer.3 --analytic h100

The function returns (model, args) or (model, args, kwargs): a model and one batch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.cli.batch_errors import report_batch_errors
from gemini.cli.partition_flags import add_partition_arguments, partition_options
from gemini.cli.progress import ProgressBar
from gemini.errors import PartitionError, UsageError

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.partition import Analysis, Options, Partition
    from gemini.profiling.profile_result import Profile

SUMMARY = "partition a model into balanced stages, and compare partitioners"
DEFAULT = "exact"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini partition`."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION; returns the model and a batch")
    parser.add_argument("--nparts", type=int, default=4, metavar="N", help="number of workers (4)")
    parser.add_argument("--partitioner", metavar="NAME", help=f"partitioner ({DEFAULT}); --compare lists all")
    parser.add_argument("--compare", action="store_true", help="run all partitioners and compare them in a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the partition as JSON")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="bars and coloured graph: .svg, .png or .pdf")
    parser.add_argument("--fold", type=int, metavar="N", help="scope levels shown in the graph")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    model = parser.add_argument_group("capture and profile")
    model.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 … (default: the device of the model)")
    model.add_argument(
        "--analytic", metavar="NAME", help="estimate for a described device such as h100, without running the model"
    )
    model.add_argument("--profile", type=Path, metavar="FILE", help="use this profile (gemini profile --save)")
    model.add_argument("--no-cache", action="store_true", help="ignore cached measurements")
    model.add_argument("--depth", type=int, metavar="N", help="do not trace into modules nested deeper than N")
    model.add_argument(
        "--basic-block", action="append", default=[], metavar="CLASS", help="do not trace into this class"
    )
    add_partition_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Capture, profile, partition; show and write the result."""
    options = _check_arguments(args)
    with ProgressBar() as bar:
        graph, profile = _capture_and_profile(args, bar)
        result = (_compare if args.compare else _partition)(args, bar, graph, profile, options)
        if args.output and result.partition is not None:
            result.partition.save(args.output)
        if args.draw and result.analysis is not None:
            bar.step("draw")
            result.analysis.draw(args.draw, fold=args.fold)
    print(result.text)
    if result.failure:
        raise PartitionError(result.failure)
    return 0


@dataclass(frozen=True)
class _Result:
    """Text to print and artifacts to write; `failure` says why there are none."""

    text: str
    partition: Partition | None = None
    analysis: Analysis | None = None
    failure: str = ""


def _check_arguments(args: argparse.Namespace) -> Options:
    """Check the arguments before the model is built."""
    from gemini.partition.analysis.analysis_picture import check_suffix
    from gemini.partition.registry import find_partitioner
    from gemini.partition.step_estimate import find_schedule
    from gemini.profiling import find_device
    from gemini.profiling.device_specs import find_spec

    if args.nparts < 1:
        raise PartitionError(f"{args.nparts} parts\n    → request 1 or more")
    options = partition_options(args)
    options.workers_for(args.nparts)
    find_schedule(options.schedule)
    if args.partitioner is not None:
        find_partitioner(args.partitioner)
    if args.draw is not None:
        check_suffix(args.draw)
    if args.device is not None:
        find_device(args.device)
    if args.analytic is not None:
        find_spec(args.analytic)
    if args.profile is not None and (args.analytic is not None or args.device is not None):
        raise UsageError("--profile together with --device or --analytic\n    → a saved profile needs neither")
    return options


def _capture_and_profile(args: argparse.Namespace, bar: ProgressBar) -> tuple[Graph, Profile]:
    from gemini.capture import capture
    from gemini.cli.profile import make_model
    from gemini.profiling import Profile, profile

    bar.step("build the model")
    model, batch, keywords = make_model(args.target)
    bar.step("capture")
    with report_batch_errors(args.target, model, batch, keywords):
        graph = capture(model, batch, keywords, depth=args.depth, basic_blocks=tuple(args.basic_block))
    if args.profile is not None:
        return graph, Profile.load(args.profile)
    bar.step("profile")
    return graph, profile(
        graph, batch, keywords, device=args.device, analytic=args.analytic, cache=not args.no_cache,
        progress=bar.update,
    )  # fmt: skip


def _partition(args: argparse.Namespace, bar: ProgressBar, graph: Graph, profile: Profile, options: Options) -> _Result:
    from gemini.partition import analyse, partition

    name = args.partitioner or DEFAULT
    bar.step(f"partition ({name})")
    made = partition(graph, profile, args.nparts, name, options)
    bar.step("analyse")
    analysis = analyse(graph, profile, made, options)
    plain = {"partition": made.to_json(), "analysis": analysis.to_json()}
    return _Result(json.dumps(plain, indent=1) if args.json else analysis.table(), made, analysis)


def _compare(args: argparse.Namespace, bar: ProgressBar, graph: Graph, profile: Profile, options: Options) -> _Result:
    """Compare all partitioners; files are of the named one, else of the best."""
    from gemini.partition import compare

    found = compare(graph, profile, args.nparts, options=options, progress=bar.update)
    text = json.dumps(found.to_json(), indent=1) if args.json else found.table()
    row = found.best if args.partitioner is None else found[args.partitioner]
    if row is None:
        return _Result(text, failure="no partitioner found a partition that fits")
    return _Result(text, row.partition, row.analysis, row.reason)
