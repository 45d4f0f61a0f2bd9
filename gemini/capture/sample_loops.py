"""Sample loops: where the model's Python loops over samples, a trace of a batch repeats the trace of a micro-batch.

    few      a, b = x.unbind()         y = stack([f(a), f(b)])
    many     a, b, c, d = x.unbind()   y = stack([f(a), f(b), f(c), f(d)])

`match_loop` walks through both traces, that of a micro-batch and that of the whole batch, side by side. Every node of
the latter must be one of these, or the traces do not match:

| a node of the whole batch is        | which means                                                                  |
|-------------------------------------|------------------------------------------------------------------------------|
| that of the micro-batch             | the same function of the same values; sizes are expressions                  |
| a copy of one, for micro-batch k    | the same function of results of copies for k, and of shared values           |
| the same as an earlier one          | a common subexpression (`gemini.capture.cse`)                                |

Literals must be equal, except sample indices: `x[i]`, `out[i] = y`. The role of a node of the micro-batch describes
it for the whole batch; `gemini.batch_analysis` interprets the roles.

| role  | for the whole batch                                                              |
|-------|----------------------------------------------------------------------------------|
|       | one node                                                                         |
| parts | one node that splits its argument into a list with entries for every copy        |
| take  | one copy per micro-batch, which reads its entries of the argument                |
| each  | one copy per micro-batch                                                         |
| put   | one copy per micro-batch, which writes its entries of the argument               |
| join  | one node, of lists that concatenate the entries of the copies                    |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gemini.capture.attribute_writes import ASSIGN
from gemini.capture.concretize import PARTS, expr_data_refs, short_name
from gemini.capture.cse import memory_makers, representatives
from gemini.capture.graph_guards import causing_inputs, content_causes
from gemini.capture.sample_indices import is_shifted, other_parts
from gemini.capture.trace_diff import Trace
from gemini.ir.node import Guard, Node
from gemini.ir.pytree import Ref, SequenceForm, expr_refs

_SUBSCRIPTS = ("__getitem__", "__setitem__")
_COPIED = ("op", "module", "function")
_APART = ("each", "take", "parts")
_SAME = ("kind", "target", "region", "checkpoint", "random")


class LoopMismatch(Exception):
    """The traces do not match; `node` is a node of the micro-batch near the mismatch."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass
class LoopMatch:
    """The role of every node of a micro-batch for the whole batch, and its node in the trace of the whole batch.

    Branches on contents are the recorded ones if all guards hold in every micro-batch, those in `whole_batch_guards`
    hold on the whole batch too, and the inputs in `pins` have the recorded contents in every micro-batch.
    """

    roles: dict[int, str]
    images: dict[int, int]
    whole_batch_guards: tuple[int, ...]
    pins: tuple[int, ...]


def match_loop(few: Trace, many: Trace, times: int) -> LoopMatch:
    """Match the trace of a micro-batch with that of `times` copies; raises LoopMismatch."""
    matcher = LoopMatcher(few.nodes, many.nodes, times)
    matcher.walk()
    if not matcher.matches(few.tracer.result, many.tracer.result, 0):
        raise LoopMismatch(few.nodes[-1], "the output depends on the batch size")
    matcher.check_orders()
    return LoopMatch(matcher.roles(), matcher.images(), *_match_branches(matcher, few, many))


def _match_branches(matcher: LoopMatcher, few: Trace, many: Trace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the guards that must hold on the whole batch too, and the inputs that its other branches depend on."""
    own = {at: guard for at, guard in enumerate(few.tracer.guards.values()) if guard.data}
    roles = matcher.roles()
    inputs = {node.target: node for node in few.nodes if node.kind == "input"}
    wholes: set[int] = set()
    pins: set[int] = set()
    for guard in many.tracer.guards.values():
        found = next((at for at, one in own.items() if guard.data and matcher.is_same_guard(one, guard)), None)
        if not guard.data:
            continue
        if found is not None:
            refs = list(expr_refs(own[found].expr))
            if all(roles[ref.node] in _APART for ref in refs):
                continue  # evaluated per micro-batch
            if not any(roles[index] for index in content_causes(few.nodes, refs)):
                wholes.add(found)
                continue
        causes = causing_inputs(many.nodes, expr_data_refs(guard.expr, many.tracer.dynamic))
        if causes is None:
            raise LoopMismatch(few.nodes[-1], f"a branch depends on the whole batch ({guard.line})")
        pins |= {inputs[many.nodes[index].target].id for index in causes}
    return tuple(sorted(wholes)), tuple(sorted(pins))


@dataclass
class LoopMatcher:
    """The state of the comparison of two traces."""

    few: list[Node]
    many: list[Node]
    times: int
    copies: dict[int, list[int]] = field(default_factory=dict)  # of a node of `few`, in `many`, by micro-batch
    lists: dict[int, int] = field(default_factory=dict)  # nodes that split samples: entries per micro-batch
    joins: set[int] = field(default_factory=set)
    subscripts: set[int] = field(default_factory=set)  # nodes whose literals are sample indices
    _repeated: bool = False  # whether the last comparison had a repeated list

    def __post_init__(self) -> None:
        self.first, self.other = representatives(self.few), representatives(self.many)
        self.visited: dict[Any, list[Node]] = {}  # visited nodes of `few`, by function and scope

    # ── the walk ───────────────────────────────────────────────────────────────────────────────────────────────
    def walk(self) -> None:
        """Match every node of the whole batch."""
        waiting = [node for node in self.few if self.first[node.id] == node.id]
        at = 0
        for node in self.many:
            if self.other[node.id] != node.id:
                continue
            if at < len(waiting) and self._is_next(waiting[at], node):
                at += 1
            elif not self._is_copy(node):
                near = waiting[min(at, len(waiting) - 1)]
                raise LoopMismatch(
                    self._owner(near), f"its steps depend on the batch size, at {node.name} ({node.line})"
                )
        if at < len(waiting):
            raise LoopMismatch(self._owner(waiting[at]), "the number of its steps depends on the batch size")
        for index, found in self.copies.items():
            whole = index in self.joins or index in self.lists
            if len(found) not in (1, self.times) or (whole and len(found) > 1):
                raise LoopMismatch(self.few[index], "it runs for some of the samples only")
            if len(found) > 1 and _output_shapes(self.few[index]) != _output_shapes(self.many[found[0]]):
                raise LoopMismatch(
                    self.few[index], "its result for one sample has a size that depends on the batch size"
                )

    def _owner(self, node: Node) -> Node:
        """Return the node, or the first computing node after a source."""
        return next((later for later in self.few[node.id :] if not later.is_source), node)

    def _is_next(self, one: Node, other: Node) -> bool:
        """Return whether a node of the whole batch is this node of the micro-batch, on all samples."""
        if not self._has_same_function(one, other):
            return False
        self._repeated = False
        forms = (one.args, one.kwargs, one.mutates), (other.args, other.kwargs, other.mutates)
        if not self.matches(*forms, 0, repeated=one.kind == "op" and not one.mutates):
            return False
        if one.out_spec != other.out_spec:
            if one.kind != "op" or short_name(one.target) not in PARTS or not self._concatenates(one, other):
                return False
            self.lists[one.id] = len(one.outputs)
        elif self._repeated:
            self.joins.add(one.id)
        self._add(one, other)
        return True

    def _is_copy(self, other: Node) -> bool:
        """Return whether a node of the whole batch is a copy of an earlier node of the micro-batch."""
        if other.kind not in _COPIED or other.random or other.changes or other.target == ASSIGN:
            return False
        found = self.visited.get(_place(other), [])
        for one in sorted(found, key=lambda node: len(self.copies[node.id])):
            number = len(self.copies[one.id])
            if number < self.times and self._is_copy_of(one, other, number):
                self.copies[one.id].append(other.id)
                return True
        return False

    def _is_copy_of(self, one: Node, other: Node, number: int) -> bool:
        if not self._has_same_function(one, other) or one.out_spec != other.out_spec or one.changes:
            return False
        if _output_shapes(one) != _output_shapes(other) or not self.matches(one.mutates, other.mutates, number):
            return False
        shifted = self._is_shifted(one, other, number)
        if number > 1 and shifted != (one.id in self.subscripts):
            return False
        if shifted:
            self.subscripts.add(one.id)
        return shifted or self.matches((one.args, one.kwargs), (other.args, other.kwargs), number)

    def _has_same_function(self, one: Node, other: Node) -> bool:
        return all(getattr(one, name) == getattr(other, name) for name in _SAME)

    def _add(self, one: Node, other: Node) -> None:
        self.copies[one.id] = [other.id]
        self.visited.setdefault(_place(one), []).append(one)

    def _concatenates(self, one: Node, other: Node) -> bool:
        """Return whether a node returns a list that concatenates the entries of all micro-batches."""
        few, many = list(one.outputs.items()), list(other.outputs.items())
        if any(source != "ret" or len(path) != 1 or path[0][0] != "i" for (source, path), _ in (*few, *many)):
            return False
        sizes = [(meta.shape, meta.dtype) for _, meta in few]
        return [(meta.shape, meta.dtype) for _, meta in many] == sizes * self.times

    def _is_shifted(self, one: Node, other: Node, number: int) -> bool:
        """Return whether two nodes read or write the entries of the first and of another micro-batch."""
        name = short_name(one.target)
        inputs, found = _arguments(one), _arguments(other)
        if name not in _SUBSCRIPTS or len(inputs) != len(found) or not isinstance(inputs[0], Ref):
            return False
        place = self._batch_of(inputs[0])
        if (
            place is None
            or not self.matches(inputs[0], found[0], 0)
            or not self.matches(one.kwargs, other.kwargs, number)
        ):
            return False
        if not is_shifted(inputs[1], found[1], place, number):
            return False
        few, many = ([*other_parts(args[1], *place[:2]), *args[2:]] for args in (inputs, found))
        return self.matches(few, many, number)

    def _batch_of(self, ref: Ref) -> tuple[int, int, int] | None:
        """Return the dimension in which a value is larger on the whole batch, its rank, and its size there."""
        image = self.image(ref, 0)
        if image is None or len(self.copies[self.first[ref.node]]) > 1:
            return None
        few, many = self._shape(self.few, ref), self._shape(self.many, image)
        if few is None or many is None or len(few) != len(many):
            return None
        dims = [dim for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
        if len(dims) != 1 or many[dims[0]] != self.times * few[dims[0]]:
            return None
        return dims[0], len(few), few[dims[0]]

    @staticmethod
    def _shape(nodes: list[Node], ref: Ref) -> tuple[int, ...] | None:
        meta = nodes[ref.node].outputs.get((ref.source, ref.path))
        return None if meta is None else meta.shape

    # ── comparing forms ────────────────────────────────────────────────────────────────────────────────────────
    def image(self, ref: Ref, number: int) -> Ref | None:
        """Return the value of the whole batch for a value of the micro-batch, in its copy `number`."""
        index = self.first[ref.node]
        found = self.copies.get(index)
        if found is None:
            return None
        if index in self.lists and ref.path:
            (_, at), *rest = ref.path
            return Ref(found[0], ref.source, (("i", at + number * self.lists[index]), *rest))
        return Ref(found[number] if number < len(found) else found[0], ref.source, ref.path)

    def matches(self, one: Any, other: Any, number: int, *, repeated: bool = False) -> bool:
        """Return whether a form of the whole batch matches one of the micro-batch, in its copy `number`.

        `repeated`: lists may concatenate the entries of all copies.
        """
        if isinstance(one, Ref):
            return isinstance(other, Ref) and self.image(one, number) == self._representative(other)
        if type(one) is not type(other):
            return False
        if isinstance(one, (tuple, list)):
            return len(one) == len(other) and all(
                self.matches(a, b, number, repeated=repeated) for a, b in zip(one, other, strict=True)
            )
        if isinstance(one, SequenceForm) and len(one.items) != len(other.items):
            if not repeated or one.cls is not other.cls or one.label != other.label:
                return False
            self._repeated = True
            return self._repeats(one.items, other.items)
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            parts = [part.name for part in dataclasses.fields(one)]
            return all(self.matches(getattr(one, a), getattr(other, a), number, repeated=repeated) for a in parts)
        return _is_same(one, other)

    def _repeats(self, few: tuple[Any, ...], many: tuple[Any, ...]) -> bool:
        if len(many) != self.times * len(few):
            return False
        return all(self.matches(few[at % len(few)], part, at // len(few)) for at, part in enumerate(many))

    def is_same_guard(self, one: Guard, other: Guard) -> bool:
        """Return whether a guard of the whole batch is one of the micro-batch, for one of its copies."""
        if repr(one.expected) != repr(other.expected):
            return False
        return any(self.matches(one.expr, other.expr, number) for number in range(self.times))

    def _representative(self, ref: Ref) -> Ref:
        return Ref(self.other[ref.node], ref.source, ref.path)

    # ── results ────────────────────────────────────────────────────────────────────────────────────────────────
    def roles(self) -> dict[int, str]:
        """Return the role of every node of the micro-batch."""
        return {node.id: self._role(self.first[node.id]) for node in self.few}

    def _role(self, index: int) -> str:
        if index in self.lists:
            return "parts"
        if index in self.joins:
            return "join"
        if len(self.copies[index]) == 1:
            return ""
        if index not in self.subscripts:
            return "each"
        return "put" if self.few[index].mutates else "take"

    def images(self) -> dict[int, int]:
        """Return, for every node of the micro-batch, its node in the whole batch, or its first copy."""
        return {node.id: self.copies[self.first[node.id]][0] for node in self.few}

    def check_orders(self) -> None:
        """Check that writes and reads of the same memory, copies included, keep the order of the micro-batch."""
        self._check_copies()
        touching: dict[int, set[int]] = {}
        for node in self.few:
            for ref in node.inputs():
                for root in memory_makers(self.few, ref.node):
                    touching.setdefault(root, set()).add(node.id)
        for node in self.few:
            roots = {root for ref in node.mutates for root in memory_makers(self.few, ref.node)}
            role = self._role(self.first[node.id]) if roots else ""
            if role in ("each", "take"):
                if any(self._role(self.first[root]) != "each" for root in roots):
                    raise LoopMismatch(node, "its operations per sample write to memory that all samples share")
                continue
            for other in sorted({one for root in roots for one in touching.get(root, ())} - {node.id}):
                self._check_order(node, other, is_put=role == "put")

    def _check_copies(self) -> None:
        """Check that the copies for one micro-batch are in its order."""
        for number in range(1, self.times):
            places = [found[number] for _, found in sorted(self.copies.items()) if len(found) > 1]
            if places != sorted(places):
                raise LoopMismatch(self.few[-1], "its operations run in another order for another sample")

    def _check_order(self, writer: Node, index: int, *, is_put: bool) -> None:
        other = self.first[index]
        if is_put and self._role(other) == "put":
            return
        before, after = sorted((writer.id, other))
        if max(self.copies[before]) > min(self.copies[after]):
            raise LoopMismatch(writer, "its operations per sample are interleaved with operations on all samples")


def _place(node: Node) -> tuple[Any, ...]:
    return node.kind, node.target, node.scope, node.line


def _output_shapes(node: Node) -> list[Any]:
    return [(key, meta.shape, meta.dtype) for key, meta in node.outputs.items()]


def _arguments(node: Node) -> tuple[Any, ...]:
    return node.args.items if isinstance(node.args, SequenceForm) else ()


def _is_same(one: Any, other: Any) -> bool:
    try:
        if one == other:
            return True
    except (ValueError, RuntimeError):  # arrays compare by element
        return bool(_flat(one) == _flat(other))
    return repr(one) == repr(other)  # nan


def _flat(value: Any) -> Any:
    return (value.shape, str(value.dtype), value.tobytes())
