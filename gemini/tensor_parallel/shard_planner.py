"""Shard planner: from a captured graph to the layouts of all its values on `size` shards.

1. the strategies of every class of nodes, from the rules of their ops (`strategies`)
2. the times of all choices, as tables (`layout_problem`)
3. the fastest choice that shards the required share of the parameters (`elimination`)
4. the plan, checked against the graph (`shard_plan`, `plan_check`)
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from gemini.errors import ShardingError
from gemini.ir.graph import Graph
from gemini.ir.pytree import Number, Ref, expr_refs, leaves
from gemini.ir.symint import Expr
from gemini.tensor_parallel.layout_classes import layout_classes
from gemini.tensor_parallel.layout_problem import Cost, LayoutProblem, Use, Variable, is_sharded
from gemini.tensor_parallel.layouts import (
    ALL_REDUCE,
    PARTIAL_GRAD,
    REPLICATE,
    Layout,
    Partial,
    PartialGrad,
    Replicate,
    Shard,
)
from gemini.tensor_parallel.node_ports import (
    NodeCall,
    node_call,
    overwritten_values,
    value_bytes,
    values_with_gradients,
    written_values,
)
from gemini.tensor_parallel.plan_check import check_plan
from gemini.tensor_parallel.scope_overrides import ScopeChoices
from gemini.tensor_parallel.shard_costs import ShardCosts
from gemini.tensor_parallel.shard_options import ShardOptions
from gemini.tensor_parallel.shard_plan import NodeShards, ReplicatedOp, ShardPlan, TensorShards
from gemini.tensor_parallel.strategies import NodeStrategies, Strategy, StrategySpace, is_divided, node_strategies
from gemini.tensor_parallel.unit_counts import interleaved_groups, uneven_units

_PRICES = (0.2, 0.8, 3.2, 12.8, 51.2)  # of a replicated byte, in transfers of a byte over the link
_NEVER = 1e15  # ms
_SIZES = ("size", "numel", "stride", "storage_offset")  # what is read of a tensor without its contents

_ValueKey = tuple[Use | None, tuple[Use, ...], tuple[bool, bool, bool], Ref | None]


def plan_shards(
    graph: Graph,
    size: int,
    options: ShardOptions | None = None,
    costs: ShardCosts | None = None,
    *,
    single: Collection[int] = (),
    whole: Mapping[Ref, frozenset[int]] | None = None,
) -> ShardPlan:
    """Return the fastest plan for `size` shards that meets the options.

    The nodes `single` run on one worker each; the dimensions `whole` of values are not divided.
    """
    if type(size) is not int or size < 1:
        raise ShardingError(f"sharding_size = {size!r} is no number of shards\n    → give 1 or more")
    planner = _Planner(graph, size, options or ShardOptions(), costs or ShardCosts(), single, whole)
    plan = planner.plan()
    check_plan(plan, graph)
    return plan


@dataclass
class _Tensor:
    """A parameter with all its names and readers."""

    names: tuple[str, ...]
    tensor: nn.Parameter
    uses: list[Use] = field(default_factory=list)
    refs: list[Ref] = field(default_factory=list)
    is_whole: bool = False  # a stage on one worker reads it

    @property
    def bytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())


class _Planner:
    """The planning of one graph."""

    def __init__(  # noqa: PLR0917
        self, graph: Graph, size: int, options: ShardOptions, costs: ShardCosts, single: Collection[int] = (),
        whole: Mapping[Ref, frozenset[int]] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.size, self.options, self.costs, self.single = graph, size, options, costs, single
        self.started = time.perf_counter()
        self.grads = values_with_gradients(graph)
        self.calls = [node_call(graph, node, self.grads, whole) for node in graph.nodes]
        self.choices = ScopeChoices(graph, options)
        for call in self.calls:
            self.choices.add(call)
        self.tensors = _tensors(graph.bound_model())
        self.by_name = {name: one for one in self.tensors for name in one.names}
        units = uneven_units([one.tensor for one in self.tensors], self.calls, size)
        self.space = StrategySpace(size, (size, *units), interleaved_groups(self.calls))
        self.variables: list[Variable] = []
        self.of: dict[int, int] = {}  # node → variable
        self.exact = True

    def plan(self) -> ShardPlan:
        """Return the plan."""
        self._find_strategies()
        problem = self._problem()
        built = time.perf_counter()
        chosen = self._solve(problem)
        solved = time.perf_counter()
        plan = self._plan_of(chosen)
        facts = {
            "strategies_s": round(built - self.started, 4),
            "solver_s": round(solved - built, 4),
            "variables": float(len(problem.domains)),
            "exact": float(self.exact),
        }
        return ShardPlan(**{**vars(plan), "facts": facts})

    # ── strategies ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _find_strategies(self) -> None:
        known: dict[object, NodeStrategies] = {}
        for key, nodes in self._classes():
            call = self.calls[nodes[0]]
            if key not in known:
                known[key] = node_strategies(call, self.space)
            found = known[key]
            admitted = self.choices.admitted(call, found.found)
            if nodes[0] in self.single:
                admitted = found.found[:1]
            refusal = found.refusal or ("" if len(admitted) == len(found.found) else "the options leave it whole")
            variable = Variable(nodes, call, admitted, self.costs.work_ms(call), refusal)
            self.of.update(dict.fromkeys(nodes, len(self.variables)))
            self.variables.append(variable)

    def _classes(self) -> Iterator[tuple[object, list[int]]]:
        """Yield the nodes that share a strategy, with what they have in common; sources have none."""
        for nodes in layout_classes(self.graph, folds=self.options.folds):
            alike: dict[object, list[int]] = defaultdict(list)
            for node in nodes:
                if not self.calls[node].node.is_source:
                    call = self.calls[node]
                    alike[call.signature(), self.choices.choice(call), node in self.single].append(node)
            yield from alike.items()

    # ── problem ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _problem(self) -> LayoutProblem:
        problem = LayoutProblem(self.variables)
        for at, one in enumerate(self.variables):
            times = [self.costs.strategy_ms(one.call, strategy, one.work_ms, self.size) for strategy in one.strategies]
            problem.add_node(at, [ms * len(one.nodes) for ms in times])
        self._add_values(problem)
        self._add_tensors(problem)
        return problem

    def _uses(self) -> dict[Ref, list[Use]]:
        uses: dict[Ref, list[Use]] = defaultdict(list)
        for call in self.calls:
            for port, one in enumerate(call.inputs):
                if isinstance(one.key, str):
                    self.by_name[one.key].uses.append((self.of[call.node.id], port))
                    self.by_name[one.key].is_whole |= call.node.id in self.single
                else:
                    uses[one.key].append((self.of[call.node.id], port))
        return uses

    def _add_values(self, problem: LayoutProblem) -> None:
        pinned = written_values(self.graph) - overwritten_values(self.graph)  # these are converted before
        results, counted = set(self.graph.outputs()), _counted_values(self.graph)
        groups: Counter[_ValueKey] = Counter()
        example: dict[_ValueKey, tuple[Ref, Use | None, tuple[Use, ...]]] = {}
        uses = self._uses()
        for ref in {**uses, **dict.fromkeys(results), **dict.fromkeys(sorted(counted, key=str))}:
            node = self.graph.nodes[ref.node]
            if node.kind == "parameter":
                self.by_name[node.target].uses += uses[ref]
                self.by_name[node.target].is_whole |= any(self.variables[at].nodes[0] in self.single
                                                          for at, _ in uses[ref])  # fmt: skip
                self.by_name[node.target].refs.append(ref)
                continue
            maker = None if node.is_source else (self.of[ref.node], list(node.outputs).index((ref.source, ref.path)))
            readers = tuple(sorted(set(uses.get(ref, ()))))
            key = (maker, readers, (ref in pinned, ref in results, ref in counted), ref if maker is None else None)
            groups[key] += 1
            example[key] = (ref, maker, readers)
        for key, times in groups.items():
            ref, maker, readers = example[key]
            if maker is None and ref not in pinned:
                continue  # a source is whole: slices of it are free
            problem.add_value(maker, readers, self._value_cost(ref, times, *key[2]))

    def _value_cost(self, ref: Ref, times: int, pinned: bool, result: bool, counted: bool) -> Cost:
        size, grad = value_bytes(self.graph, ref), ref in self.grads

        def cost(have: Layout, wanted: frozenset[Layout]) -> float:
            if counted and isinstance(have, (Shard, Partial)):
                return _NEVER  # the model's Python reads its contents
            if pinned and (wanted - {have} or (result and not isinstance(have, (Replicate, Shard)))):
                return _NEVER  # a copy would miss what is written to it
            if result and not isinstance(have, Shard):
                wanted |= {REPLICATE}
            return times * self.costs.conversion_ms(have, wanted, size, self.size, grad)

        return cost

    def _add_tensors(self, problem: LayoutProblem) -> None:
        groups: dict[tuple[Use, ...], list[_Tensor]] = defaultdict(list)
        for one in self.tensors:
            if one.uses:
                groups[tuple(sorted(set(one.uses)))].append(one)
        for users, tensors in groups.items():
            whole, sliced = (self._tensor_cost(tensors[0], len(tensors), slices) for slices in (False, True))
            size = float(tensors[0].bytes * len(tensors))
            copies = self.options.copies if tensors[0].tensor.requires_grad else 1.0
            problem.add_tensor(users, whole, sliced, size, size * copies)

    def _tensor_cost(self, one: _Tensor, times: int, slices: bool) -> Cost:
        def cost(_: Layout, wanted: frozenset[Layout]) -> float:
            stored = [layout for layout in _storable(wanted, one) if is_sharded(layout) == slices]
            return times * min((self._stored_ms(one, layout, wanted) for layout in stored), default=_NEVER)

        return cost

    def _stored_ms(self, one: _Tensor, stored: Layout, wanted: frozenset[Layout]) -> float:
        grad = one.tensor.requires_grad
        ms = self.costs.conversion_ms(stored, wanted, one.bytes, self.size, grad)
        if isinstance(stored, PartialGrad) and grad:
            ms += self.costs.transfer_ms(ALL_REDUCE, one.bytes, self.size)  # once per step, together with all others
        return ms

    # ── solution ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _solve(self, problem: LayoutProblem) -> list[Strategy]:
        """Return the strategies at the lowest price of replicated bytes that meets the options, or the best ones."""
        best: tuple[float, list[Strategy]] = (-1.0, [])
        byte_ms = 1e-6 / self.costs.link_gb * (self.size - 1) / self.size
        for price in _PRICES:
            found = problem.solve(price * byte_ms)
            chosen = self._strategies_at(found.values)
            share = self._share(chosen)
            self.exact &= found.exact
            if share > best[0] + 1e-9:
                best = share, chosen
            if share >= self.options.share or self.size == 1:
                break
        return self._within_limit(problem, best[1])

    def _within_limit(self, problem: LayoutProblem, chosen: list[Strategy]) -> list[Strategy]:
        """Return strategies within the memory limit: these, or those that CP-SAT finds."""
        limit = self.options.memory_mb
        if limit is None or self._state_mb(chosen) <= limit:
            return chosen
        found = problem.solve_limited(limit * 1e6, self.size)
        if found is not None and self._state_mb(self._strategies_at(found.values)) <= limit:
            self.exact = found.proven
            return self._strategies_at(found.values)
        least = self._state_mb(self._strategies_at(problem.solve(_PRICES[-1] * 1e3).values))
        raise ShardingError(
            f"weights, gradients and optimizer of {self.graph.model_name} take {least:.4g} MB on each of {self.size} "
            f"shards at least, the limit is {limit:.4g} MB\n    → raise the limit, or take more shards"
        )

    def _strategies_at(self, values: list[int]) -> list[Strategy]:
        return [one.strategies[at] for one, at in zip(self.variables, values, strict=False)]

    def _state_mb(self, chosen: list[Strategy]) -> float:
        """Return the MB that the largest shard holds of weights, gradients and optimizer."""
        total = 0.0
        for one in self.tensors:
            shards = TensorShards(one.names, self._stored(one, chosen), tuple(one.tensor.shape), one.bytes)
            total += shards.shard_bytes(self.size) * (self.options.copies if one.tensor.requires_grad else 1.0)
        return total * 1e-6

    def _share(self, chosen: list[Strategy]) -> float:
        whole = cut = 0
        for one in self.tensors:
            if one.uses:
                whole += one.bytes
                cut += one.bytes * is_sharded(self._stored(one, chosen))
        return cut / whole if whole else 1.0

    def _stored(self, one: _Tensor, chosen: list[Strategy]) -> Layout:
        wanted = frozenset(chosen[variable].inputs[port] for variable, port in one.uses)
        price = 1.0 / self.costs.link_gb * 1e-6
        return min(
            _storable(wanted, one),
            key=lambda stored: (
                self._stored_ms(one, stored, wanted) + (0.0 if is_sharded(stored) else price * one.bytes),
                repr(stored),
            ),
        )

    # ── plan ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _plan_of(self, chosen: list[Strategy]) -> ShardPlan:
        stored = {name: self._stored(one, chosen) for one in self.tensors for name in one.names}
        produced: dict[Ref, Layout] = {}
        nodes = []
        for call in self.calls:
            made = self._node_shards(call, chosen, stored, produced)
            produced.update(made.outputs)
            nodes.append(made)
        graph = self.graph
        values = [Ref(node.id, source, path) for node in graph.nodes for source, path in node.outputs]
        results = [(ref, produced[ref] if is_sharded(produced[ref]) else REPLICATE) for ref in graph.outputs()]
        return ShardPlan(
            self.size,
            graph.model_name,
            tuple(nodes),
            tuple(TensorShards(one.names, stored[one.names[0]], tuple(one.tensor.shape), one.bytes,
                               one.tensor.requires_grad, bool(one.uses)) for one in self.tensors),
            tuple((Ref(node.id), REPLICATE) for node in graph.nodes if node.kind == "input"),
            tuple(results),
            tuple((ref, value_bytes(graph, ref)) for ref in values),
            self.grads,
            tuple(self._replicated(chosen)),
        )  # fmt: skip

    def _node_shards(
        self, call: NodeCall, chosen: list[Strategy], stored: dict[str, Layout], produced: dict[Ref, Layout]
    ) -> NodeShards:
        node = call.node
        if node.is_source:
            layout = stored[node.target] if node.kind == "parameter" else REPLICATE
            return NodeShards(node.id, outputs=tuple((one.ref, layout) for one in call.results))
        strategy = chosen[self.of[node.id]]
        wants = {port.key: layout for port, layout in zip(call.inputs, strategy.inputs, strict=True)}
        read = list(dict.fromkeys(node.inputs()))
        return NodeShards(
            node.id,
            tuple((ref, wants.get(ref, produced.get(ref, REPLICATE))) for ref in read),
            tuple(zip((one.ref for one in call.results), strategy.results, strict=True)),
            tuple((key, layout) for key, layout in wants.items() if isinstance(key, str)),
            strategy.local,
            strategy.sizes,
            strategy.mask,
            strategy.collectives,
        )

    def _replicated(self, chosen: list[Strategy]) -> list[ReplicatedOp]:
        """Return the ops that every shard runs whole, those that cost most first."""
        found = []
        for one, strategy in zip(self.variables, chosen, strict=True):
            saved = one.work_ms * (1 - 1 / self.size)
            if is_divided(strategy) or saved <= 0:
                continue
            reason = one.refusal or "division would cost more in collectives"
            found += [ReplicatedOp(at, self.graph.nodes[at].name, reason, round(saved, 6)) for at in one.nodes]
        return sorted(found, key=lambda op: (-op.ms, op.node))


# ── parts of a graph ───────────────────────────────────────────────────────────────────────────────────────────────
def _tensors(model: nn.Module) -> list[_Tensor]:
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        found[id(tensor)] = tensor
    return [_Tensor(tuple(names[key]), tensor) for key, tensor in found.items()]


def _storable(wanted: frozenset[Layout], one: _Tensor) -> list[Layout]:
    """Return the layouts in which a parameter can be stored: whole, or as a slice that is read."""
    if one.is_whole:
        return [REPLICATE]
    return [REPLICATE, PARTIAL_GRAD, *sorted((one for one in wanted if isinstance(one, Shard)), key=repr)]


def _counted_values(graph: Graph) -> set[Ref]:
    """Return the values of which the model's Python reads contents: as a number, or to branch."""
    forms = [leaf for node in graph.nodes for form in (node.args, node.kwargs) for leaf in leaves(form)]
    exprs = [leaf.expr for leaf in forms if isinstance(leaf, Number)] + [guard.expr for guard in graph.guards]
    found: set[Ref] = set()
    while exprs:
        expr = exprs.pop()
        if isinstance(expr, Expr) and expr.op not in _SIZES:
            exprs += [part for part in expr.operands if isinstance(part, Expr)]
            found.update(ref for part in expr.operands if not isinstance(part, Expr) for ref in expr_refs(part))
    return found
