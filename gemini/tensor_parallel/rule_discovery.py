"""Rule discovery: every strategy of the rules, tried on the contents of a run, forward and backward.

A strategy holds for a node if the results of the shards make up the result of the whole, and the gradients of their
inputs those of the whole, as its layouts say:

    slices, parts or the whole of the inputs ─► the op on every shard ─► joined or summed = the op on the whole

It is evidence, not a proof: rules must hold for all contents. Ops with random numbers and the ops that replace an op
(`LOCAL_OPS`) are not tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.errors import ShardingError
from gemini.ir.call_binding import bind
from gemini.ir.encode import decode, follow
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import Ref
from gemini.tensor_parallel.layouts import (
    Layout,
    Partial,
    Shard,
    gradient_part,
    join_shards,
    layout_text,
    take_shard,
    value_part,
)
from gemini.tensor_parallel.node_ports import NodeCall, node_call, values_with_gradients
from gemini.tensor_parallel.shard_plan import SAME
from gemini.tensor_parallel.strategies import NodeStrategies, Strategy, StrategySpace, is_divided, node_strategies

_DIGITS = 1e4  # limits are this multiple of the last bit of the least exact tensor
_WRONG = 1e30  # an op that raises, or makes another shape


@dataclass(frozen=True)
class Refutation:
    """A strategy that is wrong, by `difference` relative to the largest entry; `phase`: forward or backward."""

    node: str
    op: str
    layouts: str
    phase: str
    difference: float

    def __str__(self) -> str:
        what = "fails or has another shape" if self.difference >= _WRONG else f"differs by {self.difference:.1g}"
        return f"{self.op} ({self.node}) with {self.layouts}: {self.phase} {what}"


@dataclass(frozen=True)
class RuleTrial:
    """The strategies that were tried, by the name of their op, and those that are wrong."""

    tried: dict[str, int]
    refuted: tuple[Refutation, ...]


def try_rules(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], size: int = 2) -> RuleTrial:
    """Try every strategy of every kind of node on the contents of a run."""
    grads = values_with_gradients(graph)
    calls = [node_call(graph, node, grads) for node in graph.nodes]
    run = _TrialRun(graph, bind(graph.bound_model(), args, kwargs), calls, StrategySpace(size, (size,), (1, 2, 3)))
    run.run()
    return RuleTrial(run.tried, tuple(run.refuted))


def verify_rules(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], size: int = 2) -> RuleTrial:
    """Try every strategy; raise ShardingError with those that are wrong."""
    trial = try_rules(graph, args, kwargs, size)
    if trial.refuted:
        listed = "\n".join(f"  - {one}" for one in trial.refuted[:12])
        raise ShardingError(
            f"{len(trial.refuted)} layouts that rules admit are wrong:\n{listed}\n"
            "    → correct the rules of these ops, or exclude the scopes from sharding"
        )
    return trial


class _TrialRun(Execution):
    """A run that tries the strategies of every node before it."""

    def __init__(self, graph: Graph, bound: dict[str, Any], calls: list[NodeCall], space: StrategySpace) -> None:
        super().__init__(graph, graph.bound_model(), bound)
        self.calls, self.space = calls, space
        self.tried: dict[str, int] = {}
        self.refuted: list[Refutation] = []
        self._seen: dict[object, NodeStrategies] = {}

    def step(self, node: Node) -> None:
        """Try the strategies of a node, unless those of an equal one have been, and run it."""
        call = self.calls[node.id]
        key = (call.name, repr(call.args), repr(call.kwargs), tuple((port.shape, port.dtype) for port in call.inputs))
        if not (node.is_source or call.refusal or node.random) and key not in self._seen:
            self._seen[key] = node_strategies(call, self.space)
            for strategy in self._seen[key].found:
                if is_divided(strategy) and strategy.local == SAME:
                    self._try(call, strategy)
        super().step(node)

    def _try(self, call: NodeCall, strategy: Strategy) -> None:
        self.tried[call.name] = self.tried.get(call.name, 0) + 1
        trial = _Trial(call, strategy, self.space.size, [self._input(port.key) for port in call.inputs], self._run)
        for phase, difference in trial.differences():
            layouts = (
                f"({', '.join(map(layout_text, strategy.inputs))}) → {', '.join(map(layout_text, strategy.results))}"
            )
            self.refuted.append(Refutation(call.node.name, call.name, layouts, phase, difference))

    def _input(self, key: Ref | str) -> torch.Tensor:
        found = self.model.get_parameter(key) if isinstance(key, str) else self._value(key)
        return found.detach().clone()

    def _run(self, call: NodeCall, strategy: Strategy, at: int | None, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the results of a shard, or of the whole."""
        given = dict(zip((port.key for port in call.inputs), tensors, strict=True))
        node = call.node
        args, kwargs = (decode(form, lambda form: given[form] if form in given else self.read(form))
                        for form in (node.args, node.kwargs))  # fmt: skip
        args = list(args)
        module = copy.copy(self.model.get_submodule(node.target)) if node.kind in MODULES else None
        for size in strategy.sizes if at is not None else ():
            assert at is not None
            divide_number(size.place, partial(size.local, count=self.space.size, shard=at), args, kwargs, module)
        if module is None:
            made = self._call(node, args, kwargs)
        else:
            held = {key.removeprefix(f"{node.target}."): one for key, one in given.items() if isinstance(key, str)}
            made = torch.func.functional_call(module, held, tuple(args), kwargs)
        return [follow(made, port.ref.path) for port in call.results]


def divide_number(
    place: Any, divide: Callable[[int], int], args: list[Any], kwargs: dict[str, Any], module: nn.Module | None
) -> None:
    """Replace the number at a place of a call, or of a module, by that of a shard."""
    (kind, key), *rest = place
    owner: Any = {"i": args, "k": kwargs, "a": module.__dict__ if module is not None else None}[kind]
    for _, inner in rest:
        if isinstance(owner[key], tuple):
            owner[key] = list(owner[key])
        owner, key = owner[key], inner
    owner[key] = divide(owner[key])


@dataclass
class _Trial:
    """One strategy on one set of inputs."""

    call: NodeCall
    strategy: Strategy
    size: int
    inputs: list[torch.Tensor]
    run: Callable[[NodeCall, Strategy, int | None, Sequence[torch.Tensor]], list[Any]]

    def differences(self) -> list[tuple[str, float]]:
        """Return the phases that are wrong, and by how much."""
        whole = [self._leaf(at, one) for at, one in enumerate(self.inputs)]
        parts = [self._split(one, layout) for one, layout in zip(self.inputs, self.strategy.inputs, strict=True)]
        shards = [[self._leaf(at, own[shard]) for at, own in enumerate(parts)] for shard in range(self.size)]
        expected = self.run(self.call, self.strategy, None, [one.clone() for one in whole])
        try:
            made = [self.run(self.call, self.strategy, shard, [one.clone() for one in own])
                    for shard, own in enumerate(shards)]  # fmt: skip
            forward = max((self._difference(one.detach(), [own[at].detach() for own in made], layout)
                           for at, (one, layout) in enumerate(zip(expected, self.strategy.results, strict=True))),
                          default=0.0)  # fmt: skip
            backward = 0.0 if forward else self._backward(whole, shards, expected, made)
        except Exception:
            return [("forward", _WRONG)]
        return [(phase, size) for phase, size in (("forward", forward), ("backward", backward)) if size]

    def _leaf(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().requires_grad_(self.call.inputs[at].grad and tensor.is_floating_point())

    def _split(self, whole: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        value = value_part(layout)
        if isinstance(value, Shard):
            return [take_shard(whole, value, self.size, at) for at in range(self.size)]
        if isinstance(value, Partial):
            rest = [torch.randn_like(whole) for _ in range(self.size - 1)]
            return [whole - sum(rest), *rest]
        return [whole] * self.size

    def _backward(self, whole: Any, shards: Any, expected: Any, made: Any) -> float:
        """Return the largest difference of a gradient."""
        pairs = [at for at, one in enumerate(expected) if one.requires_grad]
        wanted = [at for at, one in enumerate(whole) if one.requires_grad]
        if not pairs or not wanted:
            return 0.0
        outer = [torch.randn_like(expected[at]) for at in pairs]
        exact = torch.autograd.grad([expected[at] for at in pairs], [whole[at] for at in wanted], outer,
                                    allow_unused=True)  # fmt: skip
        found = []
        for shard, own in enumerate(made):
            used = [(own[at], self._cotangent(one, self.strategy.results[at], shard))
                    for at, one in zip(pairs, outer, strict=True) if own[at].requires_grad]  # fmt: skip
            found.append(torch.autograd.grad([one for one, _ in used], [shards[shard][at] for at in wanted],
                                             [one for _, one in used], allow_unused=True))  # fmt: skip
        worst = 0.0
        for number, at in enumerate(wanted):
            one = torch.zeros_like(whole[at]) if exact[number] is None else exact[number]
            own = [torch.zeros_like(shards[shard][at]) if grads[number] is None else grads[number]
                   for shard, grads in enumerate(found)]  # fmt: skip
            worst = max(worst, self._difference(one, own, gradient_part(self.strategy.inputs[at])))
        return worst

    def _cotangent(self, whole: torch.Tensor, layout: Layout, shard: int) -> torch.Tensor:
        grad = gradient_part(layout)
        return take_shard(whole, grad, self.size, shard) if isinstance(grad, Shard) else whole

    def _difference(self, whole: torch.Tensor, parts: list[torch.Tensor], layout: Layout) -> float:
        """Return how much parts of a layout differ from a whole; 0 within the limit."""
        value = value_part(layout)
        if isinstance(value, Shard):
            made = [join_shards(parts, value)]
        else:
            made = [torch.stack(parts).sum(0)] if isinstance(value, Partial) else parts
        if any(one.shape != whole.shape for one in made):
            return _WRONG
        if not whole.is_floating_point() and not whole.is_complex():
            return 0.0 if all(torch.equal(one, whole) for one in made) else 1.0
        finite = whole.isfinite()
        scale = float(whole[finite].abs().max()) if finite.any() else 1.0
        worst = max((float((one - whole)[finite].abs().max()) if finite.any() else 0.0 for one in made), default=0.0)
        exact = [one.dtype for one in (*self.inputs, whole) if one.is_floating_point() or one.is_complex()]
        limit = _DIGITS * max(torch.finfo(dtype).eps for dtype in exact)
        return worst / max(scale, 1e-30) if worst > limit * max(scale, 1e-6) else 0.0
