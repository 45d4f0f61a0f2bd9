"""Statements: the steps of a program that the interpreter follows, and what holds for any of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemini.batch_analysis.batch_kinds import Kind, Opaque, Partial, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, ResultMeta
from gemini.ir.pytree import refs

if TYPE_CHECKING:
    from gemini.batch_analysis.propagate import KindInterpreter


@dataclass
class AnalysisStep:
    """One step of a program: a node of a graph or an op of a tape."""

    index: Hashable
    name: str  # of its rule
    form: Any  # of (args, kwargs), or one form of each
    results: list[tuple[Any, ResultMeta]]
    samples: int
    traced: bool
    where: str = ""
    pure: bool = True  # does nothing but compute its results
    known: bool | None = None  # given, for what has no arguments
    random: bool = False
    flaggable: bool = True  # its one result can be multiplied
    returns_several: bool = False  # it returns several tensors, each of which can be replaced
    writes: tuple[Hashable, ...] = ()
    role: str = ""  # of its node, in a rolled graph
    late: tuple[int, ...] = ()  # writes to what it reads: something made before them has other contents now
    run: Callable[[KindInterpreter, AnalysisStep], Sequence[Kind] | Kind] | None = None  # instead of a rule


def form_refs(form: Any) -> list[Any]:
    """The values that a statement reads, those inside numbers included."""
    return [ref for part in (form if isinstance(form, tuple) else (form,)) for ref in refs(part)]


def expand_kinds(found: Any, count: int) -> list[Kind]:
    """One kind for every result."""
    return list(found) if isinstance(found, (list, tuple)) else [found] * count


class InheritedRefusal(AnalysisRefused):
    """Opaque because an argument is; keeps the first reason."""


def check_against_sizes(kind: Kind, result: ResultMeta, statement: AnalysisStep) -> Kind:
    """A kind held against the sizes that were seen; a contradiction is no proof."""
    if isinstance(kind, Shard):
        size = result.shape[kind.dim] if kind.dim < len(result.shape) else -1
        if size != kind.entries * statement.samples or result.batch not in (kind.dim, "?"):
            return Opaque(f"{statement.where}: sizes contradict what its rule says")
    elif isinstance(kind, (Replicate, Partial, WeightedPartial)) and result.batch not in (None, "?"):
        return Opaque(f"{statement.where}: its size depends on the batch, against its rule")
    return kind


def refuse_scattered_random_numbers(call: OpCall, found: Any) -> None:
    """Random numbers are drawn for the whole batch and handed out by sample, which must lie together."""
    for kind in found if isinstance(found, (list, tuple)) else (found,):
        if call.random and isinstance(kind, Shard) and kind.outer != 1:
            raise AnalysisRefused("random numbers of samples that do not lie together")
