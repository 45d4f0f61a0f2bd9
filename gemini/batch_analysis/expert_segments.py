"""Segments of a trace that belong to one expert of a loop, compared with traces in which some experts have no rows.

An iteration may read earlier values, choose rows by the mask that listed its expert, and add rows in their places. An
expert that is not listed has no rows, so its iteration would add nothing.
"""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.op_call import AnalysisRefused
from gemini.batch_analysis.rules.registry import short_name
from gemini.ir.def_use import rewrite_refs
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.ir.pytree import Literal, Ref, SequenceForm, refs

_KEPT = ("permute", "transpose", "contiguous", "to", "long", "int", "movedim")  # keep entries non-negative


def _items(node: Node) -> tuple[Any, ...]:
    return node.args.items if isinstance(node.args, SequenceForm) else ()


def _argument_form(node: Node, at: int, name: str) -> Any:
    """Return the form of an argument, or None."""
    named = dict(getattr(node.kwargs, "items", ()))
    found = named.get(name) or named.get(Literal(name))
    items = _items(node)
    return found if found is not None else items[at] if len(items) > at else None


# ── requirements on lists ───────────────────────────────────────────────────────────────────────────────
def check_lists(inner: Graph, traced: Any) -> None:
    """Refuse lists that may omit an expert with rows, and iterations that do more than add rows."""
    masks = {node: _find_listing_mask(inner, inner.nodes[node]) for node in traced.lists}
    if any(turn.stop < 0 for turn in traced.turns):
        raise AnalysisRefused("inside it, a loop that is left early")
    for turn in traced.turns:
        for node in inner.nodes[turn.start : turn.stop]:
            if node.random or node.changes:
                raise AnalysisRefused("inside it, a loop body that draws random numbers or changes state")
            if node.id in traced.picks and not _is_chosen_by(inner, node, masks[turn.node], turn.element, traced):
                raise AnalysisRefused("inside it, a loop body that chooses rows by a mask other than its element's")
            if node.mutates and not _adds_rows(node, traced, turn.start):
                raise AnalysisRefused("inside it, a loop body that writes anything but rows")
            if node.id in traced.lists:
                raise AnalysisRefused("inside it, a loop in a loop")
    taken = {turn.node for turn in traced.turns}
    readers = [node for node in inner.nodes for ref in node.inputs() if ref.node in traced.lists]
    if taken != traced.lists.keys() or any(node.id not in traced.parts for node in readers):
        raise AnalysisRefused("inside it, a list of mask entries that is not iterated over")
    if any(ref.node in traced.elements or ref.node in traced.lists for ref in refs(inner.result)):
        raise AnalysisRefused("inside it, a list of mask entries is returned")


def _find_listing_mask(inner: Graph, node: Node) -> Ref:
    """Return the mask m of `(m.sum(all dimensions but the first) > 0).nonzero()`, without negative entries."""
    above = inner.nodes[_items(node)[0].node]
    total = _items(above)[0] if short_name(above.target) == "gt" and _items(above)[1:] == (Literal(0),) else None
    made = inner.nodes[total.node] if isinstance(total, Ref) else above
    if (short_name(made.target), total is None) not in (("sum", False), ("any", True)):
        raise AnalysisRefused("inside it, a list that is not made of the non-empty rows of a mask")
    mask = _items(made)[0]
    rank = len(inner.meta(mask).shape)
    given = _argument_form(made, 1, "dim")
    dims = [given] if isinstance(given, Literal) else list(getattr(given, "items", ()))
    numbers = sorted(dim.value % rank for dim in dims if isinstance(dim, Literal) and isinstance(dim.value, int))
    if numbers != list(range(1, rank)) or len(inner.meta(Ref(made.id)).shape) != 1:
        raise AnalysisRefused("inside it, a list of the non-empty rows of a mask, over other dimensions")
    if not _is_positive(inner, mask):
        raise AnalysisRefused("inside it, a list by a sum of numbers that may cancel out")
    return mask  # type: ignore[no-any-return]


def _is_positive(inner: Graph, ref: Any) -> bool:
    """Return whether no entry is negative: a mask, or the result of one_hot."""
    node = inner.nodes[ref.node]
    if inner.meta(ref).dtype == "bool" or short_name(node.target) == "one_hot":
        return True
    return node.kind == "op" and short_name(node.target) in _KEPT and _is_positive(inner, _items(node)[0])


def _is_chosen_by(inner: Graph, node: Node, mask: Ref, element: int, traced: Any) -> bool:
    """Return whether rows are chosen by `mask[element]`."""
    made = inner.nodes[_items(node)[0].node]
    while short_name(made.target) == "squeeze":
        made = inner.nodes[_items(made)[0].node]
    if short_name(made.target) != "getitem" or _items(made)[0] != mask:
        return False
    index = _items(made)[1]
    if isinstance(index, SequenceForm) and len(index.items) == 1:
        (index,) = index.items
    if isinstance(index, Literal):
        return bool(index.value == element)
    return isinstance(index, Ref) and _element_number(inner, index, traced) == element


def _element_number(inner: Graph, ref: Ref, traced: Any) -> int | None:
    """Return the list element that a value is, or has as its only entry."""
    node = inner.nodes[ref.node]
    if node.id in traced.parts:
        (_, at) = ref.path[0]
        return traced.lists[traced.parts[node.id]][at]  # type: ignore[no-any-return]
    plain = short_name(node.target) in ("getitem", "squeeze", "to", "long", "int")
    return _element_number(inner, _items(node)[0], traced) if plain and ref.node in traced.elements else None


def _adds_rows(node: Node, traced: Any, start: int) -> bool:
    """Return whether a node adds the rows chosen in its iteration at their places; their kinds verify the places."""
    index = _argument_form(node, 2, "index")
    if short_name(node.target) != "index_add" or not isinstance(index, Ref):
        return False
    found = _choice(traced, index)
    return found is not None and found >= start and node.mutates == (_items(node)[0],)


def _choice(traced: Any, index: Any) -> int | None:
    """Return the choice that places belong to."""
    while isinstance(index, Ref) and index.node not in traced.picks:
        node = traced.nodes[index.node]
        index = _items(node)[0] if short_name(node.target) in _KEPT else None
    return index.node if isinstance(index, Ref) else None


# ── traces with fewer experts ────────────────────────────────────────────────────────────────────────────────
class _Match:
    """Compares a trace of all experts with one in which some have no rows."""

    def __init__(self, full: Any, less: Any) -> None:
        self.full, self.less = full, less
        self.known: dict[Ref, Ref] = {}
        left_out = {node: set(listed) - set(less.lists.get(other, ())) for (node, listed), other in _pairs(full, less)}
        self.dropped = {
            at for turn in full.turns if turn.element in left_out[turn.node] for at in range(turn.start, turn.stop)
        }
        self.sources = {(node.kind, node.target): node.id for node in less.nodes if node.is_source}

    def ref(self, ref: Ref) -> Ref:
        """Return the reference in the second trace that corresponds to one of the first."""
        node = self.full.nodes[ref.node]
        if node.is_source:
            return Ref(self.sources.get((node.kind, node.target), -1), ref.source, ref.path)
        if ref in self.known:
            return self.known[ref]
        base = self.known.get(Ref(ref.node))
        if base is None:
            return Ref(-1)
        if ref.node in self.full.parts:
            return self._element(ref, base.node)
        return Ref(base.node, ref.source, ref.path)

    def _element(self, ref: Ref, node: int) -> Ref:
        """Return the same element at its place in a shorter list."""
        (kind, at), *rest = ref.path
        element = self.full.lists[self.full.parts[ref.node]][at]
        listed = self.less.lists[self.less.parts[node]]
        return Ref(node, ref.source, ((kind, listed.index(element)), *rest)) if element in listed else Ref(-1)

    def same(self, node: Node, other: Node) -> bool:
        """Return whether two nodes are equivalent."""
        if (node.kind, node.target, node.region) != (other.kind, other.target, other.region):
            return False
        if node.out_spec != other.out_spec and node.id not in self.full.parts:
            return False
        written = tuple(self.ref(ref) for ref in node.mutates)
        forms = [rewrite_refs(form, self.ref) for form in (node.args, node.kwargs)]
        return written == other.mutates and repr(forms) == repr([other.args, other.kwargs])

    def skip(self, node: Node, empty: set[int]) -> None:
        """Omit a node that the second trace lacks; one that adds no rows changes nothing."""
        none = node.id in self.dropped or _choice(self.full, _argument_form(node, 2, "index")) in empty
        if short_name(node.target) == "index_add" and none:
            self.known[Ref(node.id)] = self.ref(_items(node)[0])
        elif node.mutates or node.random or node.changes:
            raise AnalysisRefused(f"inside it, {node.name} depends on how many experts have rows")


def _pairs(full: Any, less: Any) -> list[tuple[tuple[int, list[int]], int]]:
    if len(full.lists) != len(less.lists):
        raise AnalysisRefused("inside it, lists that depend on how many rows there are")
    return list(zip(full.lists.items(), less.lists, strict=True))


def check_is_without(full: Any, less: Any) -> None:
    """Refuse unless a trace equals another without the experts that have no rows in it."""
    match = _Match(full, less)
    others = [node for node in less.nodes if not node.is_source]
    empty = _empty_choices(full, less)
    at = 0
    for node in full.nodes:
        if node.is_source:
            continue
        if node.id not in match.dropped and at < len(others) and match.same(node, others[at]):
            match.known[Ref(node.id)] = Ref(others[at].id)
            at += 1
            continue
        match.skip(node, empty)
    if at < len(others) or repr(rewrite_refs(full.result, match.ref)) != repr(less.result):
        raise AnalysisRefused("inside it, the computation depends on how many experts have rows")


def _empty_choices(full: Any, less: Any) -> set[int]:
    """Return the choices of the first trace that are empty in the second."""
    if len(full.picks) != len(less.picks):  # the second lacks choices of omitted experts
        return set()
    return {node for node, count in zip(full.picks, less.picks.values(), strict=True) if not count}
