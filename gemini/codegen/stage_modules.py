"""Stage modules: which modules, parameters and buffers every stage holds, under their original names.

A module that only one stage uses belongs to that stage unchanged. A module of which several stages use parts is
mirrored in each of them by an empty module, with those parts under the same names:

    model.encoder            stage 0: encoder = nn.Module()         stage 1: encoder = nn.Module()
      .layer.0                          .layer.0 = original
      .layer.1                                                                .layer.1 = original

So `state_dict()` and `named_parameters()` of a stage have the original names, and all stages together hold all of them:
an unused module goes to the stage that is nearest in the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from gemini.codegen.stage_reads import Reads
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import ModelObject, leaves

HELD = ("parameter", "buffer", "attribute")


@dataclass
class Holding:
    """The part of one module that a stage holds: all of it, or parts."""

    path: str
    module: nn.Module
    whole: bool = False
    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)
    extra_state: bool = False
    children: dict[str, Holding] = field(default_factory=dict)

    def walk(self) -> Iterator[Holding]:
        """Yield the module and all its descendants, in the model's order."""
        yield self
        for child in self.children.values():
            yield from child.walk()


@dataclass
class Skeleton:
    """Everything that one stage holds."""

    root: Holding
    needs_model: bool = False  # the stage runs Python of the model itself

    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of its parameters, aliases of tied ones included."""
        return self._names("parameters")

    def buffer_names(self) -> tuple[str, ...]:
        """Return the names of its buffers, those that are not saved included."""
        return self._names("buffers")

    def _names(self, kind: str) -> tuple[str, ...]:
        found: list[str] = []
        for holding in self.root.walk():
            if holding.whole:
                listed = getattr(holding.module, f"named_{kind}")(prefix=holding.path, remove_duplicate=False)
                found += [name for name, _ in listed]
            else:
                found += [join(holding.path, name) for name in getattr(holding, kind)]
        return tuple(found)


def join(path: str, name: str) -> str:
    """Return a dotted name."""
    return f"{path}.{name}" if path else name


def split_held(target: str) -> tuple[str, str, str]:
    """Return (module, attribute, subscripts) of the target of a tensor that the model holds."""
    head, bracket, rest = target.partition("[")
    module, _, attribute = head.rpartition(".")
    return module, attribute, bracket + rest


class Needs:
    """The modules that stages need: all of each, or single tensors and attributes."""

    def __init__(self) -> None:
        self.whole: dict[str, set[int]] = {}
        self.parts: dict[tuple[str, str], set[int]] = {}
        self.users: dict[str, set[int]] = {}  # of a module and all above it

    def module(self, path: str, stage: int) -> None:
        """Record that a stage needs all of a module."""
        self.whole.setdefault(path, set()).add(stage)
        self._mark(path, stage)

    def part(self, path: str, name: str, stage: int) -> None:
        """Record that a stage needs an attribute of a module."""
        self.parts.setdefault((path, name), set()).add(stage)
        self._mark(path, stage)

    def _mark(self, path: str, stage: int) -> None:
        parts = path.split(".") if path else []
        for count in range(len(parts) + 1):
            self.users.setdefault(".".join(parts[:count]), set()).add(stage)


def skeletons(graph: Graph, reads: list[Reads]) -> tuple[Skeleton, ...]:
    """Return the skeleton of every stage."""
    model = graph.bound_model()
    needs = _needs(graph, reads)
    made = tuple(Skeleton(Holding("", model)) for _ in reads)
    for stage in needs.whole.get("", ()):
        made[stage].needs_model = True
        for name, _ in _children(model):
            needs.module(name, stage)
        for name in (*model._parameters, *model._buffers):
            needs.part("", name, stage)
    names = {id(module): name for name, module in model.named_modules()}
    _Assigner(needs, names, [skeleton.root for skeleton in made]).assign("", model, 0, covered=False)
    return made


def _needs(graph: Graph, reads: list[Reads]) -> Needs:
    needs = Needs()
    for stage, reading in enumerate(reads):
        for index in reading.nodes:
            _node_needs(graph.nodes[index], stage, needs)
        found = [*reading.tensors, *(number.operands[0] for number in reading.numbers)]
        for ref in found:
            node = graph.nodes[ref.node]
            if node.kind in HELD:
                module, attribute, _ = split_held(node.target)
                needs.part(module, attribute, stage)
    return needs


def _node_needs(node: Node, stage: int, needs: Needs) -> None:
    if node.kind in MODULES:
        needs.module(node.target, stage)
    for form in (node.args, node.kwargs):
        for leaf in leaves(form):
            if isinstance(leaf, ModelObject):
                if leaf.attribute:
                    needs.part(leaf.module, leaf.attribute, stage)
                else:
                    needs.module(leaf.module, stage)
    for name in node.uses:
        module, attribute, _ = split_held(name)
        needs.part(module, attribute, stage)


class _Assigner:
    """Walks the model and assigns every module to stages."""

    def __init__(self, needs: Needs, names: dict[int, str], roots: list[Holding]) -> None:
        self.needs, self.names, self.roots = needs, names, roots

    def assign(self, path: str, module: nn.Module, default: int, covered: bool) -> None:
        """Assign a module and all below it; `covered`: some stage already holds all of it."""
        users = self.needs.users.get(path, set()) or self._of_alias(path, module)
        if not users and covered:
            return
        users = users or {default}
        whole = set() if not path else users if len(users) == 1 else self.needs.whole.get(path, set())
        for stage in whole:
            self._get_holding(stage, path).whole = True
        if users == whole:
            return
        covered, default = covered or bool(whole), min(users)
        self._own(path, module, users - whole, default, covered)
        for name, child in _children(module):
            self.assign(join(path, name), child, default, covered)

    def _of_alias(self, path: str, module: nn.Module) -> set[int]:
        """Return the users of a module that has a second name."""
        first = self.names.get(id(module), path)
        found = self.needs.users.get(first, set()) if first != path else set()
        return {min(found)} if found else set()

    def _own(self, path: str, module: nn.Module, stages: set[int], default: int, covered: bool) -> None:
        """Assign the tensors and attributes of a module that is spread over stages."""
        given = {stage: self._get_holding(stage, path) for stage in sorted(stages)}
        registered = {"parameters": module._parameters, "buffers": module._buffers}
        for kind, tensors in registered.items():
            for name, tensor in tensors.items():
                users = self.needs.parts.get((path, name), set())
                if tensor is None or (not users and covered):
                    continue
                for stage in users & stages or {default}:
                    getattr(given.get(stage) or self._get_holding(stage, path), kind).append(name)
        for (owner, name), users in self.needs.parts.items():
            if owner == path and not any(name in tensors for tensors in registered.values()):
                for stage in users & stages:
                    given[stage].attributes.append(name)
        if not covered and type(module).get_extra_state is not nn.Module.get_extra_state:
            given[default].extra_state = True

    def _get_holding(self, stage: int, path: str) -> Holding:
        at = self.roots[stage]
        module = at.module
        walked = ""
        for name in path.split(".") if path else ():
            walked, module = join(walked, name), getattr(module, "_modules")[name]  # noqa: B009
            at = at.children.setdefault(name, Holding(walked, module))
        return at


def _children(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Return its children, those that occur twice included."""
    return [(name, child) for name, child in module._modules.items() if child is not None]
