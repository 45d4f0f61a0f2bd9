"""The options of a partition on a command line, and what they mean: one place for all commands that cut models."""

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
_BYTES_A_MS = 1e6  # of one GB/s


def add_partition_arguments(parser: argparse.ArgumentParser) -> None:
    """Constraints, workers, weights and the schedule."""
    workers = parser.add_argument_group("workers")
    workers.add_argument("--memory", metavar="MB[,MB…]", help="limit of all workers, or of each (none: no limit)")
    workers.add_argument("--speed", metavar="X[,X…]", help="of all workers, or of each, relative to the profiled one")
    workers.add_argument("--latency", type=float, metavar="MS", help="of links between workers")
    workers.add_argument("--bandwidth", type=float, metavar="GB/S", help="of links between workers")
    workers.add_argument("--link", type=Path, metavar="FILE", help="links as `gemini profile --link --save` wrote them")
    rules = parser.add_argument_group("constraints")
    rules.add_argument("--pin", action="append", default=[], metavar="SCOPE=PART", help="this scope on that worker")
    rules.add_argument("--together", action="append", default=[], metavar="A,B", help="these scopes in one stage")
    rules.add_argument("--uncut", action="append", default=[], metavar="SCOPE", help="no cut inside this scope")
    rules.add_argument("--tied", choices=("sync", "together"), help="shared weights: sum gradients, or keep together")
    rules.add_argument("--mixed", action=argparse.BooleanOptionalAction, help="several stages a worker")
    rules.add_argument("--chunks", type=int, metavar="N", help="stages a worker, where the partitioner lets one choose")
    costs = parser.add_argument_group("costs")
    costs.add_argument("--weight", choices=("both", "forward", "backward"), help="the time that is balanced (both)")
    costs.add_argument("--ratio", type=float, metavar="X", help="backward counts this much more than measured (1)")
    costs.add_argument("--recompute", action="store_true", help="activations are computed again in backward")
    costs.add_argument("--slack", type=float, metavar="X", help="balance that may be given up for fewer bytes (0.01)")
    costs.add_argument("--optimizer-copies", type=float, metavar="N", help="of each weight, besides its gradient (2)")
    run = parser.add_argument_group("schedule and search")
    run.add_argument("--schedule", metavar="NAME", help="gpipe, 1f1b, interleaved, zb_h1, composed … (1f1b)")
    run.add_argument("--micro-batches", type=int, metavar="N", help="of a batch (8)")
    run.add_argument("--seed", type=int, metavar="N")
    run.add_argument("--time-limit", type=float, metavar="S", help="seconds, for partitioners that search (10)")


def partition_options(args: argparse.Namespace) -> Options:
    """Return the options that the arguments ask for; all faults at once."""
    from gemini.partition import Options

    faults: list[str] = []
    given: dict[str, Any] = {
        name: value
        for name in (
            "tied", "mixed", "chunks", "weight", "ratio", "slack", "optimizer_copies", "schedule", "micro_batches",
            "seed", "time_limit",
        )
        if (value := getattr(args, name)) is not None
    }  # fmt: skip
    given["recompute"] = args.recompute
    given["workers"] = _workers(args, faults)
    given["pins"] = dict(_pin(text, faults) for text in args.pin)
    given["together"] = tuple(tuple(filter(None, text.split(","))) for text in args.together)
    given["uncut"] = tuple(args.uncut)
    if faults:
        raise UsageError("\n".join(faults))
    if (links := _links(args)) is not None:
        given["links"] = links
    return Options(**given)


def _workers(args: argparse.Namespace, faults: list[str]) -> tuple[Any, ...]:
    from gemini.partition import Worker

    if args.memory is None and args.speed is None:
        return ()
    memory = _each(args, "memory", _megabytes, faults) or [None] * args.nparts
    speed = _each(args, "speed", float, faults) or [1.0] * args.nparts
    return tuple(Worker(one, other) for one, other in zip(speed, memory, strict=False))


def _each(args: argparse.Namespace, name: str, read: Callable[[str], Any], faults: list[str]) -> list[Any]:
    """One value a worker; nothing where the option was not given, or given wrongly."""
    text = getattr(args, name)
    if text is None:
        return []
    try:
        values = [read(part) for part in text.split(",")]
    except ValueError:
        faults.append(f"--{name} {text!r} is no number\n    → one for all workers, or one each: --{name} 1,2,2,1")
        return []
    if len(values) == 1:
        values *= args.nparts
    if len(values) != args.nparts:
        faults.append(f"--{name} has {len(values)} entries for {args.nparts} workers\n    → give one, or one each")
    return values


def _megabytes(text: str) -> float | None:
    return None if text.strip().lower() in NO_LIMIT else float(text)


def _pin(text: str, faults: list[str]) -> tuple[str, int]:
    scope, equals, part = text.rpartition("=")
    if not equals or not scope or not part.strip().isdecimal():
        faults.append(f"--pin {text!r} names no part\n    → write a scope and a worker: --pin bert.embeddings=0")
        return text, 0
    return scope, int(part)


def _links(args: argparse.Namespace) -> Links | None:
    from gemini.schedule.link_costs import Links

    if args.link is not None:
        from gemini.profiling.link_profile import LinkProfile

        return LinkProfile.load(args.link).links()
    if args.latency is None and args.bandwidth is None:
        return None
    return Links(args.latency or 0.0, (args.bandwidth or 0.0) * _BYTES_A_MS)
