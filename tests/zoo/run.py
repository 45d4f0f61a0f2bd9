"""Sweep the zoo: capture every model, compare it with eager from outside, and write docs/zoo.md.

python -m tests.zoo.run                 all models; continues where it stopped
python -m tests.zoo.run --only llama t5 --fresh
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from gemini.capture import capture
from tests.zoo import discovery
from tests.zoo.checking import BALANCE, Verdict, balance, differences, weights
from tests.zoo.classics import CLASSICS
from tests.zoo.table import write_table

RESULTS = Path(".gemini/zoo.jsonl")


class TimeOut(BaseException):
    """A model took longer than its share."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeOut

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def judge(
    name: str, cls: str, make: Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]], limit: int
) -> Verdict:
    """Build, capture and check one model."""
    started = time.perf_counter()
    verdict = Verdict(name, cls, "not buildable")
    try:
        with at_most(max(1, limit // 3)):
            model, args, kwargs = make()
        with at_most(limit):
            built, verdict.status = time.perf_counter(), "failed"
            graph = capture(model, args, kwargs)
            verdict.seconds = round(time.perf_counter() - built, 2)
            verdict.nodes = len(graph.compute_nodes)
            verdict.blocks = sum(node.kind == "block" for node in graph.nodes)
            verdict.balance = round(balance(weights(graph, model)), 2)
            verdict.batch = "any" if graph.batch_size is not None else "fixed"
            reasons = [f"{scope or 'model'}: {reason}" for scope, reason in {**graph.blocks, **graph.calls}.items()]
            verdict.reason = "; ".join(dict.fromkeys(reasons))
            found = differences(graph, model, args, kwargs)
            verdict.status = "different" if found else "whole" if "" in graph.blocks else "equal"
            if found:
                verdict.reason = f"{found[0]}; {verdict.reason}"
    except TimeOut:
        verdict.reason = f"more than {limit} s (of which {time.perf_counter() - started:.0f} s used)"
    except discovery.NotBuildable as error:
        verdict.status, verdict.reason = "not buildable", str(error)
    except Exception as error:
        verdict.reason = f"{type(error).__name__}: {error!s:.300}"
    return verdict


def zoo() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Every model of the zoo: name, class, how to make it."""
    for name, classic in CLASSICS.items():
        yield f"classic/{name}", name, classic
    for one in discovery.species():
        yield one.model_type, one.class_name, lambda one=one: _specimen(one)  # type: ignore[misc]


def _specimen(one: discovery.Species) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    specimen = discovery.build(one)
    return specimen.model, (), specimen.kwargs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of models; default all")
    parser.add_argument("--fresh", action="store_true", help="judge again what was judged before")
    parser.add_argument("--seconds", type=int, default=90, help="limit for one model")
    parser.add_argument("--every", type=int, default=1, help="only every n-th model")
    parser.add_argument("--reverse", action="store_true", help="from the last model to the first")
    parser.add_argument("--table", action="store_true", help="write docs/zoo.md from the results and stop")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _quiet()
    RESULTS.parent.mkdir(exist_ok=True)
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {row["name"]: row for row in known}
    if not options.table:
        models = list(enumerate(zoo()))
        for index, (name, cls, make) in reversed(models) if options.reverse else models:
            wanted = name in options.only if options.only else index % options.every == 0
            if not wanted or (name in done and not options.fresh):
                continue
            row = judge(name, cls, make, options.seconds).row()
            done[name] = row
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{row['status']:14s} {name:34s} {row['nodes']:5d} nodes {row['blocks']:3d} blocks "
                f"balance {row['balance']:5.2f} {row['seconds']:6.2f} s  {row['reason'][:200]}",
                flush=True,
            )
            gc.collect()
    write_table(Path("docs/zoo.md"), list(done.values()), BALANCE)


def _quiet() -> None:
    try:
        import transformers
    except ImportError:
        return
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
