"""Shard query: a batch rule asked about shards.

Samples of the batch analysis are units of a divided dimension here: a rule that proves how an op treats samples proves
how it treats units. `rules/` extends the batch rules to divided weights, and to sums that ops pass on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini.batch_analysis.analysis_steps import expand_kinds
from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, DecisionDemand, OpCall
from gemini.batch_analysis.rules.registry import find_rule
from gemini.ir.pytree import Path
from gemini.tensor_parallel.layouts import Layout
from gemini.tensor_parallel.rules.registry import find_shard_rule
from gemini.tensor_parallel.shard_plan import DIVIDED_RECURRENCE, SAME, DividedSize, InnerCollective

# Ops whose batch rule passes sums on because the op is linear; no other batch rule is asked about sums.
_LINEAR_NAMES = """
add sub rsub mul div neg positive clone detach contiguous cpu cuda requires_grad alias view_as_real view_as_complex
lift_fresh detach_copy get_data identity view reshape _unsafe_view flatten squeeze unsqueeze expand broadcast_to
transpose t get_T get_mT get_H get_mH adjoint permute movedim unbind select diagonal cat stack sum mean getitem matmul
rmatmul bmm mm mv dot vdot outer ger einsum
"""
LINEAR = frozenset(_LINEAR_NAMES.split())
_BUGS = (TypeError, ValueError, IndexError, KeyError, AttributeError, ZeroDivisionError, StopIteration)


@dataclass
class ShardQuery(OpCall):
    """An op with the layout of every tensor argument; a rule adds how a shard runs it."""

    local: str = SAME
    collectives: list[InnerCollective] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)  # of numbers that must be those of the shard
    mask: Shard | None = None  # where it is not the layout of the result

    def divide(self, *place: tuple[str, Any]) -> None:
        """Make a number that of the shard."""
        self.places.append(place)


@dataclass(frozen=True)
class ShardAnswer:
    """The layouts of the results, and how a shard runs the op."""

    kinds: tuple[Layout, ...]
    local: str
    collectives: tuple[InnerCollective, ...]
    sizes: tuple[DividedSize, ...]
    mask: Shard | None


def ask(query: ShardQuery) -> ShardAnswer:
    """Return the answer of the rule of an op; raises AnalysisRefused with the reason."""
    rule = find_shard_rule(query.name)
    if rule is None and query.name not in LINEAR and any(value.is_sum for value in query.tensors()):
        raise AnalysisRefused(f"{query.name} of a sum")
    rule = rule or find_rule(query.name)
    if rule is None:
        raise AnalysisRefused("it has no rule")
    try:
        found = expand_kinds(rule(query), len(query.results))
    except DecisionDemand as demand:
        raise AnalysisRefused(f"{query.name} with parts of different layouts") from demand
    except _BUGS as error:
        raise AnalysisRefused(f"its arguments are not supported ({error!s:.60})") from error
    if query.conditions or query.assumed:
        raise AnalysisRefused(f"{query.name} depends on contents")
    kinds = tuple(_checked(query, kind, at) for at, kind in enumerate(found))
    places = [*query.places, *(_place(query, path) for path in query.sizes)]
    sizes = tuple(DividedSize(place, query.samples) for place in places)
    return ShardAnswer(kinds, query.local, tuple(query.collectives), sizes, _mask(query, kinds))


def _checked(query: ShardQuery, kind: Kind, at: int) -> Layout:
    """Return the kind of a result as a layout, if it is one that fits its shape."""
    result = query.results[at]
    if isinstance(kind, Shard):
        if not 0 <= kind.dim < len(result.shape) or result.shape[kind.dim] != kind.entries * query.samples:
            raise AnalysisRefused(f"{query.name} whose result has no slices")
        return kind
    if isinstance(kind, Partial) and not result.dtype.is_floating_point:
        raise AnalysisRefused(f"{query.name} of a sum that is no number")
    if isinstance(kind, (Replicate, Partial)):
        return kind
    raise AnalysisRefused(f"{query.name} whose result is a mean over the shards")


def _place(query: ShardQuery, path: Sequence[int]) -> Path:
    """Return where a number is among the arguments, as `DividedSize` names it."""
    first = ("i", path[1]) if path[0] == 0 else ("k", list(query.kwargs)[path[1]])
    return (first, *(("i", at) for at in path[2:]))


def _mask(query: ShardQuery, kinds: Sequence[Layout]) -> Shard | None:
    """Return the slice of the random numbers of the whole op that a shard uses; None for all."""
    if query.local == DIVIDED_RECURRENCE:
        return None  # masks between layers are those of whole values
    if not query.random or query.mask is not None:
        return query.mask
    return kinds[0] if kinds and isinstance(kinds[0], Shard) else None
