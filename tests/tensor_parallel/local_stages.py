"""Local stages: the generated code of a shard plan, run by threads as shards, and whole gradients."""

import copy

import torch
from torch import nn

from gemini.codegen import generate_stages
from gemini.collectives.thread_group import run_shards
from gemini.ir.call_binding import bind
from gemini.partition.assignment import Partition
from gemini.pipe.live_stages import make_stages
from gemini.pipe.value_routes import CallerSide, ValueRoutes
from gemini.tensor_parallel.layouts import PartialGrad, Shard
from gemini.tensor_parallel.local_graph import local_graph, parameter_slice


def generate_local(graph, plan, stages=1):
    """Return the graph of a shard and its generated stages, cut evenly."""
    cut = [node.id for node in graph.compute_nodes]
    each = -(-len(cut) // stages)
    found = local_graph(graph, plan, {node: at // each for at, node in enumerate(cut)})
    partition = Partition(graph.model_name, "even", stages, found.stages, tuple(range(stages)))
    return found.graph, generate_stages(found.graph, partition)


def run_local(graph, plan, call, stages=1):
    """Return (outputs by port, whole gradients by name, counted collectives) of a forward and backward."""
    model = graph.bound_model()
    local, codes = generate_local(graph, plan, stages)
    live = make_stages(codes, model, "<local stages>")
    caller = CallerSide(ValueRoutes(local, tuple(code.interface for code in codes)), model, bind(model, (), call))
    wholes = {name: torch.zeros_like(one) for name, one in model.named_parameters()}

    def run(group):
        leaves, own = {}, [copy.deepcopy(stage) for stage in live]
        for stage, original in zip(own, live, strict=True):
            for mine, theirs in zip(stage.modules(), original.modules(), strict=True):
                for name, parameter in theirs._parameters.items():
                    if parameter is not None:
                        mine._parameters[name] = leaves.setdefault(id(parameter), _leaf(parameter, group))
        torch.manual_seed(0)
        values = {}
        for code, stage in zip(codes, own, strict=True):
            for port in code.interface.inputs:
                if port.source is None:
                    values[port.name] = caller.read_port(port)
            made = stage(*[values[port.name] for port in code.interface.inputs])
            made = made if len(code.interface.outputs) != 1 else (made,)
            values |= {port.name: one for port, one in zip(code.interface.outputs, made, strict=True)}
        results = {port.name: values[port.name] for code in codes for port in code.interface.outputs if port.is_result}
        loss = next(value for value in results.values() if value.dim() == 0)
        loss.backward()
        for name, parameter in model.named_parameters():
            _collect(wholes[name], leaves[id(parameter)].grad, plan.tensor(name).layout, group)
        return {name: value.detach() for name, value in results.items()}, group.counts

    def _leaf(parameter, group):
        own = parameter_slice(parameter.detach(), plan.tensor(names[id(parameter)]).layout, group.size, group.rank)
        return nn.Parameter(own.clone(), parameter.requires_grad)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = run_shards(plan.size, run)
    return found[0][0], wholes, found[0][1]


def _collect(whole, grad, layout, group):
    if grad is None:
        return
    if isinstance(layout, Shard):
        parameter_slice(whole, layout, group.size, group.rank).copy_(grad)
    elif isinstance(layout, PartialGrad):
        total = group.all_reduce(grad)
        if group.rank == 0:
            whole.copy_(total)
    elif group.rank == 0:
        whole.copy_(grad)
