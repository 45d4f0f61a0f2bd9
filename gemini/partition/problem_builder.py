"""Problem builder: from a graph, its profile and the options to a partition problem.

Every node becomes an item; nodes that must share a stage become one item, and so does every cycle among items, since no
order of stages could serve it. Scopes of options are resolved here; unknown ones are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gemini.errors import PartitionError
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.ir.pytree import Ref
from gemini.nearest_name import nearest
from gemini.partition.colocation import DisjointSets, find_colocated
from gemini.partition.long_loops import find_turns
from gemini.partition.partition_options import Options
from gemini.partition.partition_problem import ORDER, Edge, Item, Problem, Value
from gemini.profiling.measured_device import MB
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.node_tensors import tensor_inputs, value_size
from gemini.profiling.profile_result import Profile


def build_problem(graph: Graph, profile: Profile, nparts: int, options: Options) -> Problem:
    """Build the problem of cutting a graph into `nparts`."""
    _check(graph, profile, nparts, options)
    costs = {cost.id: cost for cost in (profile.with_recomputation() if options.recompute else profile)}
    links = list(_dependencies(graph, options))
    groups = _group_nodes(graph, profile, nparts, options, links)
    item_of = {node: at for at, nodes in enumerate(groups) for node in nodes}
    pins = _resolve_pins(graph, options, item_of)
    items = tuple(
        _build_item(graph, [costs[node] for node in nodes], options, pins.get(at)) for at, nodes in enumerate(groups)
    )
    edges, values = _build_edges(graph, links, item_of)
    trainable = frozenset(name for name, p in graph.bound_model().named_parameters() if p.requires_grad)
    return Problem(
        items, edges, values, nparts, options, dict(profile.parameters_mb), trainable, tuple(profile.values_mb)
    )


def _check(graph: Graph, profile: Profile, nparts: int, options: Options) -> None:
    if not isinstance(nparts, int) or isinstance(nparts, bool) or nparts < 1:
        raise PartitionError(f"{nparts!r} parts\n    → request an integer, 1 or more")
    _check_profile(graph, profile)
    scopes = {scope for node in graph.compute_nodes for scope in (*node.scope, node.name, node.target)}
    named = [*options.uncut, *options.pins, *(scope for group in options.together for scope in group)]
    faults = [
        f"no scope {scope!r}{_suggestion(scope, scopes)}" for scope in dict.fromkeys(named) if scope not in scopes
    ]
    faults += [f"{s!r} is pinned to part {p} of {nparts}; parts count from 0"
               for s, p in options.pins.items() if p >= nparts]  # fmt: skip
    if options.workers and len(options.workers) != nparts:
        faults.append(
            f"{len(options.workers)} workers are described for {nparts} parts; describe one per part, or none"
        )
    for name in ("latency", "bandwidth"):
        table = getattr(options.links, name)
        if isinstance(table, tuple) and len(table) != nparts:
            faults.append(f"the {name} table of links is for {len(table)} workers, not {nparts}")
    if faults:
        raise PartitionError("constraints cannot be met:\n" + "\n".join(f"  - {fault}" for fault in faults))


def _check_profile(graph: Graph, profile: Profile) -> None:
    wanted = {node.id: node.name for node in graph.compute_nodes}
    known = {cost.id: cost.name for cost in profile}
    if wanted == known:
        return
    missing = [name for at, name in wanted.items() if known.get(at) != name]
    strange = [name for at, name in known.items() if wanted.get(at) != name]
    shown = "".join(
        f"\n  - {count}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        for count, names in (("not profiled", missing), ("profiled, but not in the graph", strange))
        if names
    )
    raise PartitionError(
        f"the profile of {profile.model} does not match this graph of {graph.model_name}: {len(known)} nodes are "
        f"profiled, {len(wanted)} compute nodes are in the graph{shown}\n    → profile(graph)"
    )


def _suggestion(scope: str, scopes: set[str]) -> str:
    near = nearest(scope, sorted(scopes))
    return f"; did you mean {near!r}?" if near else ""


def find_nodes(graph: Graph, scope: str) -> list[int]:
    """Return the nodes of a scope: those of a module, or the node of that name."""
    return [node.id for node in graph.compute_nodes if scope in node.scope or scope in (node.name, node.target)]


# ── dependencies ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _dependencies(graph: Graph, options: Options) -> Iterator[tuple[int, int, Ref | None]]:
    """Yield (producer, reader, value) between compute nodes; the value is None where only the order matters."""
    last_random: int | None = None
    for node in graph.compute_nodes:
        tensors = set(tensor_inputs(node))
        for ref in dict.fromkeys(node.inputs()):
            if not graph.nodes[ref.node].is_source:
                yield ref.node, node.id, ref if ref in tensors else None
        for source in node.after:
            if not graph.nodes[source].is_source:
                yield source, node.id, None
        if options.random_order and node.random:
            if last_random is not None:
                yield last_random, node.id, None
            last_random = node.id


def _build_edges(
    graph: Graph, links: Iterable[tuple[int, int, Ref | None]], item_of: dict[int, int]
) -> tuple[tuple[Edge, ...], tuple[Value, ...]]:
    place: dict[Ref, int] = {}
    values: list[Value] = []
    edges: dict[Edge, None] = {}
    for source, target, ref in links:
        one, other = item_of[source], item_of[target]
        if one == other:
            continue
        if ref is None:
            edges[Edge(one, other, ORDER)] = None
            continue
        if ref not in place:
            place[ref] = len(values)
            values.append(_value_sizes(graph, ref))
        edges[Edge(one, other, place[ref])] = None
    return tuple(edges), tuple(values)


def _value_sizes(graph: Graph, ref: Ref) -> Value:
    size = value_size(graph, ref) / MB
    meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))
    return Value(size, size if meta is not None and meta.requires_grad else 0.0)


# ── colocation ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _group_nodes(
    graph: Graph, profile: Profile, nparts: int, options: Options, links: Iterable[tuple[int, int, Ref | None]]
) -> list[list[int]]:
    """Return the nodes of each item, items in topological order."""
    import networkx as nx

    joined = DisjointSets(len(graph.nodes))
    for group in find_colocated(graph):
        joined.join(group)
    if not options.pins:  # these may separate the nodes of one iteration
        for turn in find_turns(graph, nparts):
            joined.join(turn)
    for scopes in options.together:
        joined.join(node for scope in scopes for node in find_nodes(graph, scope))
    for scope in options.uncut:
        joined.join(find_nodes(graph, scope))
    if options.tied == "together":
        users: dict[str, list[int]] = {}
        for cost in profile:
            for name in cost.parameters:
                users.setdefault(name, []).append(cost.id)
        for nodes in users.values():
            joined.join(nodes)
    quotient = nx.DiGraph()
    quotient.add_nodes_from(joined.find(node.id) for node in graph.compute_nodes)
    quotient.add_edges_from((joined.find(source), joined.find(target)) for source, target, _ in links)
    for cycle in nx.strongly_connected_components(quotient):
        joined.join(cycle)
    members: dict[int, list[int]] = {}
    for node in graph.compute_nodes:
        members.setdefault(joined.find(node.id), []).append(node.id)
    order = nx.DiGraph()
    order.add_nodes_from(members)
    ends = ((joined.find(source), joined.find(target)) for source, target, _ in links)
    order.add_edges_from(pair for pair in ends if pair[0] != pair[1])
    return [members[root] for root in nx.lexicographical_topological_sort(order, key=lambda root: members[root][0])]


def _resolve_pins(graph: Graph, options: Options, item_of: dict[int, int]) -> dict[int, int]:
    pins: dict[int, int] = {}
    owner: dict[int, str] = {}
    faults = []
    for scope, part in options.pins.items():
        for node in find_nodes(graph, scope):
            at = item_of[node]
            if pins.setdefault(at, part) != part:
                faults.append(
                    f"{scope!r} is pinned to part {part}, and {owner[at]!r}, which must share its stage, to "
                    f"part {pins[at]} ({graph.nodes[node].name})"
                )
                break
            owner.setdefault(at, scope)
    if faults:
        raise PartitionError("pins contradict each other:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return pins


# ── costs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _build_item(graph: Graph, costs: list[NodeCost], options: Options, pin: int | None) -> Item:
    forward, backward = sum(cost.forward_ms for cost in costs), sum(cost.backward_ms for cost in costs)
    first: Node = graph.nodes[costs[0].id]
    return Item(
        name=first.name,
        nodes=tuple(cost.id for cost in costs),
        ms=_weight(forward, backward, options),
        forward_ms=forward,
        backward_ms=backward,
        parameters=tuple(dict.fromkeys(name for cost in costs for name in cost.parameters)),
        saved_own_mb=sum(cost.saved_own_mb for cost in costs),
        saved_values=tuple(sorted({value for cost in costs for value in cost.saved_values})),
        peak_mb=max(max(cost.forward_peak_mb, cost.backward_peak_mb) for cost in costs),
        pin=pin,
        scope=first.scope,
    )


def _weight(forward: float, backward: float, options: Options) -> float:
    if options.weight == "forward":
        return forward
    if options.weight == "backward":
        return backward * options.ratio
    return forward + backward * options.ratio
