"""Purity proof: which modules of a model are pure, and the values on which that depends.

A module whose class is of a trusted library is pure, unless the script has given it functions or objects of its own (an
activation function): these are followed. A module of any other class is followed from its forward. Children are
modules of their own: one impure module leaves the proof of the others as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.purity.allowances import PLAIN
from gemini.purity.reach import Reach, is_followed, is_held_by_script
from gemini.purity.value_watch import WatchedValue

_INTERNAL = frozenset(vars(nn.Module()))
_MAX_DEPTH = 8  # of nested containers


class PurityProof(NamedTuple):
    """The first impure module of a model, if any, and the values that the code of all modules reads."""

    reason: str
    entries: list[WatchedValue]


def prove_purity(model: nn.Module) -> PurityProof:
    """Follow the code of a model and its submodules. Nothing of it is run."""
    own = {id(one) for parts in (model.modules, model.parameters, model.buffers) for one in parts()}
    entries: dict[int, WatchedValue] = {}
    for reach in _reaches(model, own):
        reach.run()
        if reach.reason:
            return PurityProof(reach.reason, [])
        entries |= reach.entries
    return PurityProof("", [*entries.values()])


def find_impure_argument(values: Iterable[Any]) -> str:
    """Return what is impure among the arguments of a call; '' if trial runs and workers may have copies of all."""
    for value in _objects_in(values, _MAX_DEPTH):
        reach = Reach(takes_all=True)
        reach.add_value("an argument", value, is_own=True)
        if reach.run().reason:
            return reach.reason
    return ""


def _objects_in(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield what is neither a tensor nor a plain value, in containers as well."""
    for value in values:
        if isinstance(value, (torch.Tensor, *PLAIN)):
            continue
        if depth and type(value) in (list, tuple, dict):
            yield from _objects_in(value.values() if isinstance(value, dict) else value, depth - 1)
        else:
            yield value


def _reaches(model: nn.Module, own: set[int]) -> Iterator[Reach]:
    """Yield what to follow: once per class, with all its modules."""
    by_class: dict[type, list[nn.Module]] = {}
    for part in model.modules():
        by_class.setdefault(type(part), []).append(part)
    for kind, parts in by_class.items():
        reach = Reach(own)
        if is_followed(kind.__module__):
            for part in parts:
                reach.add_module(part)
            yield reach
            continue
        held = [(key, value) for part in parts for key, value in vars(part).items() if key not in _INTERNAL]
        found = [(key, value) for key, value in held if is_held_by_script(value)]
        for key, value in found:
            reach.add_value(f"{kind.__name__}.{key}", value, is_own=True)
        if found:
            yield reach
