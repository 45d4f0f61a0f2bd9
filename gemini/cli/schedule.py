"""Compose a pipeline schedule for a placement, show it, and write it to files.

gemini schedule --placement mshape --ndevs 4 --nmicros 6 --memory 6 --save mshape.4stages.sched.json
gemini schedule --placement vshape --ndevs 8 --memory 8 --split --compare --draw schedule.html
gemini schedule --placement my_model.json --memory 12,12,8,8 --csv for_torch.csv
"""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gemini.schedule.block import Number
    from gemini.schedule.schedplan import SchedPlan

SUMMARY = "compose a pipeline schedule, compare it with known ones, draw and export it"

MOST = 100_000
"""The largest number of devices or micro-batches, to catch typing errors."""

OBJECTIVES = {
    "period": ("period", "makespan", "memory"),
    "memory": ("period", "memory"),
    "latency": ("latency",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini schedule`."""
    model = parser.add_argument_group("placement")
    model.add_argument(
        "--placement",
        required=True,
        metavar="NAME|FILE",
        help="a named placement such as vshape (an unknown name lists them), or a JSON file "
        "(FILE:NAME where the file has several)",
    )
    model.add_argument("--ndevs", type=_positive, metavar="N", help="devices (required with a named placement)")
    model.add_argument("--infer", action="store_true", help="forward only")
    model.add_argument("--split", action="store_true", help="split backward into input and weight gradients")
    model.add_argument("--chunks", type=_positive, metavar="N", help="stages per device, for interleaved and vchunks")
    limits = parser.add_argument_group("constraints")
    limits.add_argument(
        "--nmicros", type=_positive, metavar="N", help="micro-batches (default: enough for a steady state)"
    )
    limits.add_argument("--memory", type=_numbers, metavar="M[,M…]", help="memory of all devices, or of each")
    limits.add_argument("--latency", type=_amount, default=0, metavar="T", help="latency of a transfer between devices")
    limits.add_argument("--nbytes", type=_amount, default=0, metavar="B", help="bytes per transfer")
    limits.add_argument("--bandwidth", type=_amount, default=0, metavar="R", help="bytes per unit of time of a link")
    search = parser.add_argument_group("search")
    search.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="period",
        help="shortest period, then ramps (default); least memory at that period; or shortest latency of a micro-batch",
    )
    search.add_argument(
        "--kernel", type=_positive, default=16, metavar="N", help="micro-batches in a repetend at most (16)"
    )
    search.add_argument("--time-limit", type=_amount, default=10, metavar="S", help="seconds of search (10)")
    search.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the search (0)")
    output = parser.add_argument_group("output")
    output.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON")
    output.add_argument("--draw", type=Path, metavar="FILE", help="draw the schedule: .png, .svg, .pdf or .html")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    output.add_argument("--csv", type=Path, metavar="FILE", help="write CSV for torch.distributed.pipelining")
    output.add_argument("--compare", action="store_true", help="compare with the known schedules that fit")
    output.add_argument("--json", action="store_true", help="print the figures as JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Compose the schedule, write its files, and report."""
    from gemini.cli.schedule_report import as_json, as_text

    placement = read_placement(args)
    _check_outputs(args, placement)
    with _progress("composing a schedule …"):
        plan = compose(placement, args)
        written = _write(plan, args)
    print(as_json(plan, written, args.compare) if args.json else as_text(plan, written, args.compare))
    return 0


# ---------------------------------------------------------------- arguments


def read_placement(args: argparse.Namespace) -> SchedPlan:
    """Return the placement named on the command line, or read it from its file."""
    from gemini.schedule.link_costs import Links
    from gemini.schedule.placement_file import load_placement
    from gemini.schedule.placements import check_name
    from gemini.schedule.placements import placement as named

    path, found, inside = args.placement.partition(".json:")
    if found or args.placement.endswith(".json"):
        shape_only = [f"--{name}" for name in ("infer", "split", "chunks", "nbytes") if getattr(args, name)]
        if shape_only:
            raise UsageError(
                f"{', '.join(shape_only)} with a placement from a file\n"
                "    → these change a named placement; change the blocks in the file"
            )
        placement = load_placement(f"{path}.json" if found else args.placement, inside or None)
        if args.ndevs not in (None, placement.ndevs):
            raise UsageError(f"--ndevs {args.ndevs}, but {args.placement} is for {placement.ndevs}\n    → omit it")
    elif args.ndevs is None:
        check_name(args.placement)
        raise UsageError(f"--ndevs is missing\n    → add the number of devices for {args.placement}: --ndevs 4")
    else:
        shape = {"split": args.split, "chunks": args.chunks, "nbytes": args.nbytes}
        placement = named(args.placement, args.ndevs, not args.infer, **shape)
    if args.bandwidth and not any(block.nbytes for block in placement):
        raise UsageError(
            f"--bandwidth {args.bandwidth}, but no transfer has bytes\n"
            "    → add --nbytes, or `bytes` to the edges in the placement's file"
        )
    if args.latency or args.bandwidth:
        placement.links = Links(args.latency, args.bandwidth)
    return placement


def compose(placement: SchedPlan, args: argparse.Namespace) -> SchedPlan:
    """Return the composed schedule."""
    from gemini.schedule.composer import Composer

    return Composer.compose(
        placement,
        args.memory[0] if args.memory is not None and len(args.memory) == 1 else args.memory,
        nmicros=args.nmicros,
        time_limit=args.time_limit,
        max_kernel=args.kernel,
        objective=OBJECTIVES[args.objective],
        seed=args.seed,
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MOST}")
    return value


def _amount(text: str) -> Number:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _numbers(text: str) -> tuple[Number, ...]:
    return tuple(_number(part) for part in text.split(","))


def _number(text: str) -> Number:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


# ---------------------------------------------------------------- writing files


def _outputs(args: argparse.Namespace) -> dict[str, Path]:
    return {name: path for name in ("save", "draw", "trace", "csv") if (path := getattr(args, name)) is not None}


def _check_outputs(args: argparse.Namespace, placement: SchedPlan) -> None:
    """Raise before the search if an output file could not be written."""
    seen: dict[Path, str] = {}
    for name, path in _outputs(args).items():
        other = seen.setdefault(path.resolve(), name)
        if other != name:
            raise UsageError(f"--{other} and --{name} both write {path}\n    → name two files")
        if not path.resolve().parent.is_dir():
            raise UsageError(f"--{name} {path}: no folder {path.parent}\n    → create it")
        if path.is_dir():
            raise UsageError(f"--{name} {path}: it is a folder\n    → name a file in it")
    if args.draw is not None:
        from gemini.schedule.draw import check_suffix

        check_suffix(args.draw)
    if args.csv is not None:
        from gemini.schedule.export.torch_rules import check_exportable

        check_exportable(placement)


def _write(plan: SchedPlan, args: argparse.Namespace) -> dict[str, Path]:
    """Write the output files; those that may still raise come first."""
    from gemini.schedule.draw import draw
    from gemini.schedule.export import save_csv, save_trace

    paths = _outputs(args)
    if "csv" in paths:
        save_csv(plan, paths["csv"])
    if "draw" in paths:
        title = f"{Path(args.placement).name}, {plan.ndevs} devices, {plan.nmicros} micro-batches"
        draw(plan, paths["draw"], title=title)
    if "trace" in paths:
        save_trace(plan, paths["trace"])
    if "save" in paths:
        plan.save(paths["save"])
    return paths


def _progress(text: str) -> AbstractContextManager[object]:
    """Return a spinner on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)
