"""Analysis steps: nodes of a graph and ops of a tape in the form of the kind interpreter, and checks on any step."""

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
    name: str  # selects its rule
    form: Any  # one form of (args, kwargs), or a pair of forms
    results: list[tuple[Any, ResultMeta]]
    samples: int
    traced: bool
    where: str = ""
    pure: bool = True  # has no side effects
    known: bool | None = None  # computable before the step; None: follows from the arguments
    random: bool = False
    flaggable: bool = True  # its single result can be weighted
    returns_several: bool = False  # it returns several tensors, each of which can be replaced
    writes: tuple[Hashable, ...] = ()
    role: str = ""  # of the node in a rolled graph
    late: tuple[int, ...] = ()  # writes to its inputs after these were made
    run: Callable[[KindInterpreter, AnalysisStep], Sequence[Kind] | Kind] | None = None  # replaces the rule


def form_refs(form: Any) -> list[Any]:
    """Return the values that a step reads, those inside numbers included."""
    return [ref for part in (form if isinstance(form, tuple) else (form,)) for ref in refs(part)]


def expand_kinds(found: Any, count: int) -> list[Kind]:
    """Return one kind per result."""
    return list(found) if isinstance(found, (list, tuple)) else [found] * count


class InheritedRefusal(AnalysisRefused):
    """Refused because an argument is opaque; the reason is that of the argument."""


def check_against_sizes(kind: Kind, result: ResultMeta, statement: AnalysisStep) -> Kind:
    """Return the kind, or `Opaque` where it contradicts the observed sizes."""
    if isinstance(kind, Shard):
        size = result.shape[kind.dim] if kind.dim < len(result.shape) else -1
        if size != kind.entries * statement.samples or result.batch not in (kind.dim, "?"):
            return Opaque(f"{statement.where}: its sizes contradict its rule")
    elif isinstance(kind, (Replicate, Partial, WeightedPartial)) and result.batch not in (None, "?"):
        return Opaque(f"{statement.where}: its size depends on the batch, against its rule")
    return kind


def refuse_scattered_random_numbers(call: OpCall, found: Any) -> None:
    """Refuse random numbers of samples that are not contiguous: those of the whole batch are sliced by sample."""
    for kind in found if isinstance(found, (list, tuple)) else (found,):
        if call.random and isinstance(kind, Shard) and kind.outer != 1:
            raise AnalysisRefused("random numbers of samples that are not contiguous")
