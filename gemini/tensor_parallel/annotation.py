"""Annotations: the shard rule of an op from the names of its dimensions, as in an einsum.

    "b s h, h o -> b s o"       h is summed: divided, the result is a sum of parts
    "b s h, h^ o -> b s o"      h stays whole
    "* h, h -> * h"             any leading dimensions

One term per tensor argument, in order; arguments that are no tensors are not divided. A dimension with the same name in
several terms is divided in all of them, and in the result.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from gemini.batch_analysis.batch_kinds import Kind, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall
from gemini.batch_analysis.rules.matmul import contract
from gemini.errors import ShardingError

_NAME = re.compile(r"[A-Za-z_]\w*\^?|\*")
_REST = "*"


@dataclass(frozen=True)
class Annotation:
    """An annotation that has been read: terms of arguments and results, and the names that stay whole.

    `linear`: the op is linear in each argument, so that sums pass through it.
    """

    text: str
    terms: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    linear: bool = False

    @staticmethod
    def read(text: str, *, linear: bool = False) -> Annotation:
        """Read an annotation; raise ShardingError with the fault."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ShardingError(f"{text!r} has no result\n    → write terms, ->, and the results: 'b h, h o -> b o'")
        sides = [[_term(text, part) for part in side.split(",")] for side in (left, right)]
        names = {name for side in sides for term in side for name in term}
        whole = frozenset(name.rstrip("^") for name in names if name.endswith("^"))
        terms, results = (tuple(tuple(name.rstrip("^") for name in term) for term in side) for side in sides)
        known = {name for term in terms for name in term}
        for term in (*terms, *results):
            if len(set(term)) != len(term):
                raise ShardingError(f"{text!r} names a dimension twice in {' '.join(term)!r}\n    → use two names")
        for name in {name for term in results for name in term} - known:
            raise ShardingError(f"{text!r}: {name!r} is in no argument\n    → name a dimension of an argument")
        return Annotation(text, terms, results, whole, linear)

    def __call__(self, call: OpCall) -> list[Kind]:
        """Return the layouts of the results."""
        values = call.tensors()
        if len(values) != len(self.terms):
            raise AnalysisRefused(f"{call.name} has {len(values)} tensors, its annotation {len(self.terms)} terms")
        if not self.linear and any(value.is_sum for value in values):
            raise AnalysisRefused(f"{call.name} of a sum")
        rest = _rest_letters([value.rank for value in values], self.terms)
        letters = {name: string.ascii_letters[at] for at, name in enumerate(sorted(self._names()))}
        written = ["".join(rest if name == _REST else letters[name] for name in term) for term in self.terms]
        for value, term in zip(values, written, strict=True):
            if value.rank != len(term):
                raise AnalysisRefused(f"{call.name}: an argument has {value.rank} dimensions, its term {len(term)}")
            if isinstance(value.kind, Shard) and term[value.kind.dim] in {letters[name] for name in self.whole}:
                raise AnalysisRefused(f"{call.name}: a dimension that stays whole")
        made = ["".join(rest if name == _REST else letters[name] for name in term) for term in self.results]
        found = [contract(call, written, term, values) for term in made]
        if len(found) > 1 and any(not isinstance(kind, (Shard, Replicate)) for kind in found) and not self.linear:
            raise AnalysisRefused(f"{call.name}: several results, of which some are sums")
        return found

    def _names(self) -> set[str]:
        return {name for term in self.terms for name in term} - {_REST}


def _term(text: str, part: str) -> tuple[str, ...]:
    names = tuple(part.split())
    faulty = [name for name in names if not _NAME.fullmatch(name)]
    if faulty or _REST in names[1:]:
        shown = faulty[0] if faulty else _REST
        raise ShardingError(
            f"{text!r}: {shown!r} is no name of a dimension\n    → letters and digits, ^ for one that stays whole, "
            "* in front for all leading ones"
        )
    return names


def _rest_letters(ranks: Sequence[int], terms: Sequence[Sequence[str]]) -> str:
    """Return letters for the leading dimensions that `*` stands for."""
    counts = {rank - len(term) + 1 for rank, term in zip(ranks, terms, strict=True) if _REST in term}
    if len(counts) > 1:
        raise AnalysisRefused("arguments whose numbers of leading dimensions differ")
    return string.ascii_letters[-count:] if (count := next(iter(counts), 0)) else ""
