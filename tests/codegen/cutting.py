"""Cuts for tests: a graph in stages at chosen or random places, and a run of the generated stages in sequence."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import networkx as nx
import torch

from conformance.zoo.classics import CLASSICS
from gemini.capture import Graph, capture
from gemini.codegen import StageCode
from gemini.ir.call_binding import bind
from gemini.ir.encode import decode, follow
from gemini.ir.interpreter import find_model_tensor
from gemini.ir.pytree import ModelObject, Number, Ref
from gemini.ir.symint import Expr, evaluate
from gemini.partition import Options, Partition
from gemini.partition.entry import order_stages
from gemini.partition.partition_problem import Problem
from gemini.partition.problem_builder import build_problem
from gemini.partition.registry import Assignment
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.profile_result import Profile


@functools.lru_cache(maxsize=64)
def captured(name: str) -> tuple[Graph, tuple[Any, ...], dict[str, Any]]:
    """A classic model as a graph, captured once for all tests."""
    model, args, kwargs = CLASSICS[name]()
    return capture(model, args, kwargs), args, kwargs


def flat_profile(graph: Graph) -> Profile:
    """A profile in which all nodes cost the same."""
    ones = dict.fromkeys(("forward_ms", "backward_ms"), 1.0)
    floats = ("noise", "forward_peak_mb", "backward_peak_mb", "parameter_mb", "buffer_mb", "input_mb", "output_mb")
    zeros = dict.fromkeys((*floats, "saved_mb", "saved_own_mb", "moved_mb"), 0.0)
    nodes = tuple(
        NodeCost(node.id, node.name, node.kind, "", pooled=1, samples=1, rejected=0, flops=0, **ones, **zeros)
        for node in graph.compute_nodes
    )
    return Profile(graph.model_name, "cpu", "measured", nodes, {}, ())


def flat_problem(graph: Graph, nparts: int) -> Problem:
    """The problem of a graph whose nodes all cost the same."""
    return build_problem(graph, flat_profile(graph), nparts, Options())


def cut(graph: Graph, problem: Problem, stage_of: list[int]) -> Partition:
    """The partition with these stages of items."""
    count = max(stage_of) + 1
    stages, workers = order_stages(problem, Assignment(tuple(stage_of), tuple(range(count))))
    made = Partition(graph.model_name, "by hand", count, stages, workers)
    made.validate(graph)
    return made


def even_cut(graph: Graph, nstages: int) -> Partition:
    """Contiguous stages of equal numbers of items."""
    problem = flat_problem(graph, nstages)
    count = len(problem.items)
    nstages = min(nstages, count)
    return cut(graph, problem, [at * nstages // count for at in range(count)])


def random_cut(graph: Graph, rng: random.Random, most: int = 5) -> Partition:
    """Stages that are contiguous in a random topological order of the items."""
    problem = flat_problem(graph, most)
    count = len(problem.items)
    order = list(range(count))
    if rng.random() < 0.5:
        links = nx.DiGraph()
        links.add_nodes_from(order)
        links.add_edges_from((edge.source, edge.target) for edge in problem.edges)
        weight = {at: rng.random() * count * 0.2 + at for at in order}
        order = list(nx.lexicographical_topological_sort(links, key=weight.__getitem__))
    cuts = sorted(rng.sample(range(1, count), min(rng.randint(1, most - 1), count - 1))) if count > 1 else []
    stage_of = [0] * count
    for place, at in enumerate(order):
        stage_of[at] = sum(place >= one for one in cuts)
    return cut(graph, problem, stage_of)


def load(code: StageCode, model: torch.nn.Module) -> torch.nn.Module:
    """The stage of a generated source."""
    module = types.ModuleType(code.class_name)
    exec(compile(code.source, f"{code.class_name}.py", "exec"), vars(module))
    return vars(module)[code.class_name](model)


def copied(value: Any) -> Any:
    """What arrives on the other side of a wire, still in one autograd graph."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class Sequential:
    """The stages of a graph, run one after another in one process."""

    def __init__(self, graph: Graph, codes: tuple[StageCode, ...], wire: Callable[[Any], Any] = lambda value: value):
        self.graph, self.codes, self.wire = graph, codes, wire
        self.model = graph.bound_model()
        self.stages = [load(code, self.model) for code in codes]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = bind(self.model, args, kwargs)
        values: dict[Ref | Expr, Any] = {}

        def read(form: Any) -> Any:
            if isinstance(form, Number):
                return evaluate(form.expr, number)
            if isinstance(form, ModelObject):
                module = self.model.get_submodule(form.module)
                return getattr(module, form.attribute) if form.attribute else module
            node = self.graph.nodes[form.node]
            if node.kind == "input":
                return follow(bound, self.graph.inputs[form.node])
            return find_model_tensor(self.model, node.target) if node.is_source else values[form]

        def number(expr: Expr) -> Any:
            if expr in values:
                return values[expr]
            value = read(expr.operands[0])
            return value.shape[expr.operands[1]] if expr.op == "size" else getattr(value, expr.op)(*expr.operands[1:])

        for code, stage in zip(self.codes, self.stages, strict=True):
            given = {}
            for port in code.interface.inputs:
                if port.source is None:
                    given[port.name] = read(port.value if isinstance(port.value, Ref) else Number(port.value))
                else:
                    given[port.name] = self.wire(values[port.value])
            output = stage(**given)
            outputs = (output,) if len(code.interface.outputs) == 1 else output
            values |= dict(zip((port.value for port in code.interface.outputs), outputs, strict=True))
        return decode(self.graph.result, read)
