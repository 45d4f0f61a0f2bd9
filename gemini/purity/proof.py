"""Purity proof: which modules of a model are pure, and the values on which that depends.

A module whose class is of a trusted library is pure, unless the script has given it functions or objects of its own (an
activation function), or names attributes of it: these are followed. A module of any other class is followed from its
forward. All modules are followed at once: code of one may call methods of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.purity.allowances import PLAIN
from gemini.purity.reach import Reach
from gemini.purity.value_kinds import MUTABLE
from gemini.purity.value_watch import WatchedValue

_MAX_DEPTH = 8  # of nested containers


class PurityProof(NamedTuple):
    """The first impure module of a model, if any, and the values that the code of all modules reads."""

    reason: str
    entries: list[WatchedValue]


def prove_purity(model: nn.Module) -> PurityProof:
    """Follow the code of a model and its submodules. Nothing of it is run."""
    reach = _start_at(model).run()
    return PurityProof(reach.reason, [] if reach.reason else [*reach.entries.values()])


def find_impure_argument(values: Iterable[Any], model: nn.Module) -> str:
    """Return what is impure among the arguments of a call; '' if trial runs and workers may have copies of all."""
    for value in _objects_in(values, _MAX_DEPTH):
        reach = Reach(takes_all=True)
        reach.add_value("an argument", value, is_own=True)
        if not reach.run().reason and reach.follows_code:  # which the model may call with its own modules
            if reason := _find_changeable(reach.entries.values()):
                return reason
            reach = _start_at(model)
            reach.add_value("an argument", value, is_own=True)
            reach.run()
        if reach.reason:
            return reach.reason
    return ""


def _find_changeable(entries: Iterable[WatchedValue]) -> str:
    """Return what code among arguments could change: unlike that of the model, it is not watched around trial runs."""
    name = next((entry.name for entry in entries if isinstance(entry.now(), MUTABLE)), "")
    return f"an argument reads {name}, which it may change" if name else ""


def _start_at(model: nn.Module) -> Reach:
    reach = Reach({id(one) for parts in (model.modules, model.parameters, model.buffers) for one in parts()})
    for part in model.modules():
        reach.add_module(part, has_hooks=part is not model)  # its own run in the controller
    for tensor in (*model.parameters(), *model.buffers()):
        reach.add_tensor(tensor)
    return reach


def _objects_in(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield what is neither a tensor nor a plain value, in containers as well."""
    for value in values:
        if isinstance(value, (torch.Tensor, *PLAIN)):
            continue
        if depth and type(value) in (list, tuple, dict):
            yield from _objects_in(value.values() if isinstance(value, dict) else value, depth - 1)
        else:
            yield value
