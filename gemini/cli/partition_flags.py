"""Partition flags: the options that all commands which partition models share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.errors import UsageError

if TYPE_CHECKING:
    from gemini.partition import Options
    from gemini.schedule.link_costs import Links

NO_LIMIT = ("none", "-", "inf")
_BYTES_PER_MS = 1e6  # bytes per ms of 1 GB/s


def add_partition_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of workers, constraints, costs and schedule."""
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--memory", metavar="MB[,MB…]", help="memory limit of all workers, or of each (none: no limit)"
    )
    workers.add_argument(
        "--speed", metavar="X[,X…]", help="speed of all workers, or of each, relative to the profiled one"
    )
    workers.add_argument("--latency", type=float, metavar="MS", help="latency of links between workers")
    workers.add_argument("--bandwidth", type=float, metavar="GB/S", help="bandwidth of links between workers")
    workers.add_argument("--link", type=Path, metavar="FILE", help="links, from `gemini profile --link --save`")
    rules = parser.add_argument_group("constraints")
    rules.add_argument(
        "--pin", action="append", default=[], metavar="SCOPE=PART", help="place this scope on that worker"
    )
    rules.add_argument("--together", action="append", default=[], metavar="A,B", help="these scopes in one stage")
    rules.add_argument("--uncut", action="append", default=[], metavar="SCOPE", help="no cut inside this scope")
    rules.add_argument("--tied", choices=("sync", "together"), help="shared weights: sum gradients, or keep together")
    rules.add_argument("--mixed", action=argparse.BooleanOptionalAction, help="several stages per worker")
    rules.add_argument("--chunks", type=int, metavar="N", help="stages per worker, for partitioners with that option")
    costs = parser.add_argument_group("costs")
    costs.add_argument("--weight", choices=("both", "forward", "backward"), help="balanced time (both)")
    costs.add_argument("--ratio", type=float, metavar="X", help="factor on backward times (1)")
    costs.add_argument("--recompute", action="store_true", help="recompute activations in backward")
    costs.add_argument("--slack", type=float, metavar="X", help="balance to trade for fewer bytes (0.01)")
    costs.add_argument("--optimizer-copies", type=float, metavar="N", help="optimizer states per weight (2)")
    run = parser.add_argument_group("schedule and search")
    run.add_argument("--schedule", metavar="NAME", help="gpipe, 1f1b, interleaved, zb_h1, composed … (1f1b)")
    run.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches per batch (8)")
    run.add_argument("--seed", type=int, metavar="N", help="seed of the search")
    run.add_argument("--time-limit", type=float, metavar="S", help="seconds of search (10)")


def partition_options(args: argparse.Namespace) -> Options:
    """Return the options of the arguments; raise `UsageError` with all faults."""
    from gemini.partition import Options

    faults: list[str] = []
    values: dict[str, Any] = {
        name: value
        for name in (
            "tied", "mixed", "chunks", "weight", "ratio", "slack", "optimizer_copies", "schedule", "micro_batches",
            "seed", "time_limit",
        )
        if (value := getattr(args, name)) is not None
    }  # fmt: skip
    values["recompute"] = args.recompute
    values["workers"] = _workers(args, faults)
    values["pins"] = dict(_pin(text, faults) for text in args.pin)
    values["together"] = tuple(tuple(filter(None, text.split(","))) for text in args.together)
    values["uncut"] = tuple(args.uncut)
    if faults:
        raise UsageError("\n".join(faults))
    if (links := _links(args)) is not None:
        values["links"] = links
    return Options(**values)


def _workers(args: argparse.Namespace, faults: list[str]) -> tuple[Any, ...]:
    from gemini.partition import Worker

    if args.memory is None and args.speed is None:
        return ()
    memory = _each(args, "memory", _megabytes, faults) or [None] * args.nparts
    speed = _each(args, "speed", float, faults) or [1.0] * args.nparts
    return tuple(Worker(one, other) for one, other in zip(speed, memory, strict=False))


def _each(args: argparse.Namespace, name: str, read: Callable[[str], Any], faults: list[str]) -> list[Any]:
    """Return one value per worker; none where the option is missing or faulty."""
    text = getattr(args, name)
    if text is None:
        return []
    try:
        values = [read(part) for part in text.split(",")]
    except ValueError:
        faults.append(
            f"--{name} {text!r} is not a number\n    → write one for all workers, or one per worker: --{name} 1,2,2,1"
        )
        return []
    if len(values) == 1:
        values *= args.nparts
    if len(values) != args.nparts:
        faults.append(
            f"--{name} has {len(values)} entries for {args.nparts} workers\n    → write one, or one per worker"
        )
    return values


def _megabytes(text: str) -> float | None:
    return None if text.strip().lower() in NO_LIMIT else float(text)


def _pin(text: str, faults: list[str]) -> tuple[str, int]:
    scope, equals, part = text.rpartition("=")
    if not equals or not scope or not part.strip().isdecimal():
        faults.append(f"--pin {text!r} names no worker\n    → write a scope and a worker: --pin bert.embeddings=0")
        return text, 0
    return scope, int(part)


def _links(args: argparse.Namespace) -> Links | None:
    from gemini.schedule.link_costs import Links

    if args.link is not None:
        from gemini.profiling.link_profile import LinkProfile

        return LinkProfile.load(args.link).links()
    if args.latency is None and args.bandwidth is None:
        return None
    return Links(args.latency or 0.0, (args.bandwidth or 0.0) * _BYTES_PER_MS)
