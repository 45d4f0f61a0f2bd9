"""Judging one model: build it, capture it, compare graph and model; cut it and compare stages and model."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from conformance.zoo import discovery, results
from conformance.zoo.classics import CLASSICS
from conformance.zoo.graph_checks import balance, differences, weights
from gemini.capture import Graph, capture

SEED = 11
Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


class TimeOut(BaseException):
    """A model took longer than its share."""


@dataclass(frozen=True)
class Animal:
    """One model of the zoo: its name, the class that is tried first, and how to make it."""

    name: str
    cls: str
    make: Callable[[discovery.Hint | None], tuple[Made, discovery.Hint | None]]


def zoo() -> Iterator[Animal]:
    """Every model of the zoo: the classics, then one a model type of the library."""
    for name, classic in CLASSICS.items():
        yield Animal(f"classic/{name}", name, lambda _, classic=classic: (classic(), None))  # type: ignore[misc]
    for one in discovery.species():
        yield Animal(one.model_type, one.class_name, lambda hint, one=one: _specimen(one, hint))  # type: ignore[misc]


def _specimen(one: discovery.Species, hint: discovery.Hint | None) -> tuple[Made, discovery.Hint | None]:
    found = discovery.build(one, hint=hint)
    return (found.model, (), found.kwargs), found.hint


def judge(animal: Animal, *, build: int, limit: int, cuts: bool, hint: Any = None) -> results.Row:
    """The row of one model. `build` and `limit` are the seconds for making it and for each judgement."""
    row: results.Row = {
        "name": animal.name, "cls": animal.cls, "status": "not buildable", "nodes": 0, "blocks": 0, "balance": 0.0,
        "batch": "", "seconds": 0.0, "reason": "", **results.versions(), "code": results.digest(results.CAPTURE),
    }  # fmt: skip
    started = time.perf_counter()
    try:
        with at_most(build):
            (model, args, kwargs), row["hint"] = animal.make(hint)
        row["cls"] = animal.cls if animal.name.startswith("classic/") else type(model).__name__
    except TimeOut:
        row["reason"] = f"no recipe worked within {build} s"
        return row
    except discovery.NotBuildable as error:
        row["reason"] = str(error)
        return row
    row["building"] = round(time.perf_counter() - started, 2)
    try:
        with at_most(limit):
            graph = _judge_capture(row, model, args, kwargs)
    except TimeOut:
        row.update(status="failed", reason=f"more than {limit} s")
        return row
    except Exception as error:
        row.update(status="failed", reason=f"{type(error).__name__}: {error!s:.300}")
        return row
    if cuts:
        _judge_cuts(row, graph, (model, args, kwargs), limit)
    return row


def _judge_capture(row: results.Row, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Graph:
    started = time.process_time()
    torch.manual_seed(SEED)  # stages are compared from here too: a model that drops layers at random takes the same way
    graph = capture(model, args, kwargs)
    row["seconds"] = round(time.process_time() - started, 2)
    row["nodes"] = len(graph.compute_nodes)
    row["blocks"] = sum(node.kind == "block" for node in graph.nodes)
    row["balance"] = round(balance(weights(graph, model)), 2)
    row["batch"] = "any" if graph.batch_size is not None else "fixed"
    reasons = [f"{scope or 'model'}: {reason}" for scope, reason in {**graph.blocks, **graph.calls}.items()]
    row["reason"] = "; ".join(dict.fromkeys(reasons))
    found = differences(graph, model, args, kwargs)
    row["status"] = "different" if found else "whole" if graph.is_whole else "equal"
    if found:
        row["reason"] = f"{'; '.join(found[:3])}; {row['reason']}"
    return graph


def _judge_cuts(row: results.Row, graph: Graph, made: Made, limit: int) -> None:
    from conformance.zoo.pipe_checks import judge_cuts

    model, args, kwargs = made
    row["cut_code"] = results.digest(results.CUTTING)
    started = time.process_time()
    try:
        with at_most(limit):
            row["cuts"] = judge_cuts(graph, model, args, kwargs)
    except TimeOut:
        row["cuts"] = {"all": ["failed", 0, f"more than {limit} s"]}
    except Exception as error:
        row["cuts"] = {"all": ["failed", 0, f"{type(error).__name__}: {error!s:.300}"]}
    row["cut_seconds"] = round(time.process_time() - started, 2)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeOut in the body after so many seconds of computing: a busy machine changes no result."""

    def ring(*_: Any) -> None:
        raise TimeOut

    previous = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
