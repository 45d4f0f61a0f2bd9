"""Variables: assign the values of a stage to variables and access paths."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from gemini.codegen.op_text import returns_first
from gemini.codegen.stage_interface import Port
from gemini.codegen.stage_statements import Collected, Item, Loop, Target, Variable, statements
from gemini.codegen.stage_steps import StageStep, read_refs
from gemini.codegen.value_names import Namer, identifier
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.ir.pytree import BackReference, MappingForm, ObjectForm, Path, Ref, SequenceForm, leaves
from gemini.ir.symint import Expr

_MOST_UNPACKED = 6
_FEW = 3


class Bindings:
    """`places[value]` is the variable of a value and the path from it; `targets[node]` the variables that it sets."""

    def __init__(
        self, graph: Graph, namer: Namer, inputs: Iterable[Port], outputs: list[Ref | Expr], items: list[Item]
    ) -> None:
        self.graph, self.namer = graph, namer
        self.places: dict[Ref, tuple[Variable, Path]] = {}
        self.numbers: dict[Expr, Variable] = {}  # numbers read by another stage
        self.leaving: dict[Expr, Variable] = {}  # numbers read for other stages
        self.targets: dict[int, Target] = {}
        self.lists: dict[int, Variable] = {}  # lists of collected values, by id of the collection
        self.turns: dict[Ref, tuple[Variable, int]] = {}
        self.lists_from: dict[Ref | Expr, tuple[Ref, ...]] = {}  # all values of a list, by its first
        for port in inputs:
            variable = Variable(port.name, fixed=True, number=isinstance(port.value, Expr))
            if isinstance(port.value, Ref):
                self.places[port.value] = variable, ()
            else:
                self.numbers[port.value] = variable
        self.outputs = outputs
        self._collect(items)
        used = self._find_used(items)
        for item in items:
            if isinstance(item, Loop):
                for carried in item.carried:
                    self.places[carried.inside] = Variable(namer.of(carried.made)), ()
            for statement in item.body if isinstance(item, Loop) else [item]:
                for step in statement.steps:
                    self._bind(step, used, inlined=step is not statement.main)

    def _collect(self, items: list[Item]) -> None:
        for loop in items:
            for collected in loop.collected if isinstance(loop, Loop) else ():
                variable = Variable(_plural(self.namer.of(collected.made)))
                self.lists[id(collected)] = variable
                self.turns |= {ref: (variable, at) for at, ref in enumerate(collected.turns)}
                self.lists_from[collected.turns[0]] = collected.turns

    def _find_used(self, items: list[Item]) -> dict[int, list[Ref]]:
        """Return the values that are read, by node."""
        found: dict[Ref, None] = {}
        for statement in statements(items):
            for step in statement.steps:
                found.update(dict.fromkeys(read_refs(step)))
        for loop in items:
            if isinstance(loop, Loop):
                found.update((ref, None) for carried in loop.carried for ref in (carried.start, carried.made))
                found.update((collected.made, None) for collected in loop.collected)
        found.update((value, None) for value in self.outputs if isinstance(value, Ref))
        used: dict[int, list[Ref]] = {}
        for ref in found:
            if ref not in self.turns:
                used.setdefault(ref.node, []).append(ref)
        return used

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────
    def _bind(self, step: StageStep, used: dict[int, list[Ref]], inlined: bool) -> None:
        if step.port is not None and isinstance(step.port.value, Expr):
            self.leaving[step.port.value] = Variable(step.port.name, number=True)
        node = step.node
        if node is None:
            return
        wanted = sorted(used.get(node.id, ()), key=lambda ref: str(ref.path))
        target = self.targets[node.id] = Target()
        self._hoist(node, target, wanted)
        returned = [ref for ref in wanted if ref.source == "ret"]
        for ref in wanted:
            if ref.source in ("attr", "inner"):
                variable = Variable(self.namer.of(ref))
                target.sides.append((variable, ref))
                self.places[ref] = variable, ()
        if inlined:
            target.path = returned[0].path
        if not returned or inlined:
            return
        same = self._same(node) if returned == [Ref(node.id)] else None
        if same is not None:
            self.places[returned[0]] = same, ()
        elif len(returned) == 1:
            self._single(node, target, returned[0])
        else:
            self._unpack(node, target, returned)

    def _single(self, node: Node, target: Target, ref: Ref) -> None:
        """Bind one value that is read: `x = f()`, `x, _ = f()` or `x = f()[0]`."""
        variable = Variable(self.namer.only(ref))
        self.places[ref] = variable, ()
        shape = parse_shape(node.out_spec)
        if isinstance(shape, list) and len(ref.path) == 1 and len(shape) <= _FEW:
            target.pattern = [variable if at == ref.path[0][1] else None for at in range(len(shape))]
        else:
            target.whole, target.path = variable, ref.path

    def _same(self, node: Node) -> Variable | None:
        """Return the variable whose tensor an op changes and returns, if that is a plain one."""
        args = getattr(node.args, "items", ())
        if node.kind != "op" or not returns_first(node.target) or not args or not isinstance(args[0], Ref):
            return None
        variable, path = self.places.get(args[0], (None, ()))
        return variable if not path else None

    def _unpack(self, node: Node, target: Target, returned: list[Ref]) -> None:
        shape = parse_shape(node.out_spec)
        pattern = None if shape is None else self._pattern(node, shape, (), {ref.path for ref in returned})
        if isinstance(pattern, list):
            target.pattern = pattern
            return
        target.whole = Variable(self.namer.of(Ref(node.id)))
        for ref in returned:
            self.places[ref] = target.whole, ref.path

    def _pattern(self, node: Node, shape: Any, path: Path, wanted: set[Path]) -> Any:
        """Return the variables to unpack a result into; None for unread parts."""
        if path in wanted:
            ref = Ref(node.id, "ret", path)
            self.places[ref] = Variable(self.namer.of(ref)), ()
            return self.places[ref][0]
        if not isinstance(shape, list) or not any(one[: len(path)] == path for one in wanted):
            return None
        return [self._pattern(node, part, (*path, ("i", at)), wanted) for at, part in enumerate(shape)]

    def _hoist(self, node: Node, target: Target, wanted: list[Ref]) -> None:
        """Assign variables to containers that occur twice in the arguments, or are read after the call."""
        again = [
            {leaf.label for leaf in leaves(form) if isinstance(leaf, BackReference)}
            for form in (node.args, node.kwargs)
        ]
        read: dict[tuple[int, int], list[Ref]] = {}
        for ref in wanted:
            if ref.source == "arg":
                container = follow_form((node.args, node.kwargs)[ref.path[0][1]], ref.path[1])
                label = getattr(container, "label", None)
                if label is not None:
                    read.setdefault((ref.path[0][1], label), []).append(ref)
        for which, form in enumerate((node.args, node.kwargs)):
            for container in containers(form):
                refs = read.get((which, container.label), [])
                if container is form or not (container.label in again[which] or refs):
                    continue
                variable = Variable(self._container_name(form, container))
                target.hoisted.append((which, container.label, variable))
                for ref in refs:
                    self.places[ref] = variable, ref.path[2:]

    def _container_name(self, form: Any, container: Any) -> str:
        keys = {id(part): key for key, part in form.items} if isinstance(form, MappingForm) else {}
        return identifier(str(keys.get(id(container), container.cls.__name__.lower())))

    def list_of(self, collected: Collected) -> Variable:
        """Return the variable of a collection."""
        return self.lists[id(collected)]

    def variables_read(self, step: StageStep) -> Iterator[Variable]:
        """Return the variables that a step reads."""
        for ref in read_refs(step):
            yield from self.variables_of(ref)
        for expr in step.reads():
            if expr in self.numbers:
                yield self.numbers[expr]

    def variables_of(self, value: Ref | Expr) -> Iterator[Variable]:
        """Return the variables behind a value."""
        if isinstance(value, Expr):
            yield self.leaving[value]
        elif value in self.turns:
            yield self.turns[value][0]
        elif value in self.places:
            yield self.places[value][0]

    def set_by(self, step: StageStep) -> Iterator[Variable]:
        """Return the variables that a step sets."""
        if step.port is not None and isinstance(step.port.value, Expr):
            yield self.leaving[step.port.value]
        target = self.targets.get(step.node.id) if step.node is not None else None
        if target is None:
            return
        if target.whole is not None:
            yield target.whole
        yield from flat(target.pattern)


def flat(pattern: Any) -> Iterator[Variable]:
    """Yield the variables of a pattern."""
    if isinstance(pattern, Variable):
        yield pattern
    for part in pattern if isinstance(pattern, list) else ():
        yield from flat(part)


def containers(form: Any) -> Iterator[Any]:
    """Yield the containers in a form, inner ones first."""
    if isinstance(form, SequenceForm):
        for part in form.items:
            yield from containers(part)
        yield form
    elif isinstance(form, (MappingForm, ObjectForm)):
        for _, part in (*getattr(form, "items", ()), *form.state):
            yield from containers(part)
        yield form


def follow_form(form: Any, step: tuple[str, Any]) -> Any:
    """Return the part of a form that a path step selects."""
    return form.items[step[1]] if isinstance(form, SequenceForm) else dict(form.items)[step[1]]


@functools.lru_cache(maxsize=256)
def parse_shape(sketch: str) -> Any:
    """The nest of tuples and lists in a sketch, as lists with None for the rest; None if it is something else."""
    if re.fullmatch(r"[\w.(),]*", sketch) is None:
        return None
    text = re.sub(r"\b(?!T\b|None\b)[A-Za-z_]\w*\(", "[", sketch).replace(")", "]").replace("T", "None")
    try:
        shape = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return None
    return shape if isinstance(shape, list) and len(shape) <= _MOST_UNPACKED else None


def _plural(name: str) -> str:
    return f"all_{name}" if name.endswith("s") else f"{name}s"
