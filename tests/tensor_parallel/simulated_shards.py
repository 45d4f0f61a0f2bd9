"""Simulated shards: a shard plan run in one process, all shards in step, with every move as one autograd function.

A value is a list with the part of each shard. Forward and backward of a move convert the parts as the layouts define,
so losses and gradients of a correct plan are those of one device. Every shard has its own copy of the model, of which
the parameters are replaced by the parts that it stores.
"""

import copy
import random
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.collectives.attention_ops import divided_multi_head_attention
from gemini.ir.call_binding import bind
from gemini.ir.encode import decode
from gemini.ir.interpreter import Execution
from gemini.ir.pytree import Ref
from gemini.random_numbers.random_ops import draw_whole, is_fill, is_random_op, memory_order, return_part, shape_of
from gemini.tensor_parallel.layouts import (
    Partial,
    PartialGrad,
    Replicate,
    Shard,
    conversions,
    gradient_part,
    join_shards,
    take_shard,
    unit_count,
    unit_range,
    value_part,
)
from gemini.tensor_parallel.shard_plan import DIVIDED_HEADS, DIVIDED_RECURRENCE, SAME, VOCABULARY_EMBEDDING


def whole_of(parts, layout):
    """The whole value, on every shard."""
    if isinstance(layout, Shard):
        return [join_shards(parts, layout)] * len(parts)
    return [sum(parts)] * len(parts) if isinstance(layout, Partial) else list(parts)


def convert(parts, have, want):
    """Parts of one layout as parts of another, without gradients."""
    if have == want:
        return list(parts)
    whole, count = whole_of(parts, have), len(parts)
    if isinstance(want, Shard):
        return [take_shard(one, want, count, at).clone() for at, one in enumerate(whole)]
    if isinstance(want, Partial):
        return [one if at == 0 else torch.zeros_like(one) for at, one in enumerate(whole)]
    return [one.clone() for one in whole]


class Move(torch.autograd.Function):
    """All shards convert a value; their gradients take the opposite way."""

    @staticmethod
    def forward(ctx, have, want, *parts):
        ctx.layouts = have, want
        return tuple(one.clone() for one in convert(parts, value_part(have), value_part(want)))

    @staticmethod
    def backward(ctx, *grads):
        have, want = ctx.layouts
        return None, None, *convert(grads, gradient_part(want), gradient_part(have))


def move(parts, have, want):
    """Convert a value and, where it has one, its gradient."""
    if have == want:
        return parts
    if any(one.requires_grad for one in parts):
        with torch.enable_grad():  # its first reader may run without gradients, and others not
            return list(Move.apply(have, want, *parts))
    return convert(parts, value_part(have), value_part(want))


def contiguous_strides(shape):
    """The strides of a tensor without gaps."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


class SlicedMask(TorchDispatchMode):
    """Random numbers of the whole op, in the memory order of the captured value, of which a shard uses its slice."""

    def __init__(self, mask, count, at, whole, strides):
        super().__init__()
        self.mask, self.count, self.at, self.whole, self.strides = mask, count, at, whole, strides

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not is_random_op(func) or not is_fill(func):
            return func(*args, **(kwargs or {}))
        shape = list(shape_of(func, args))
        if self.mask is not None:
            shape[self.mask.dim] = self.whole[self.mask.dim]
        order = memory_order(func, args)
        if self.strides is not None and len(self.strides) == len(shape):
            order = tuple(sorted(range(len(shape)), key=lambda dim: (-self.strides[dim], dim)))
        drawn = draw_whole(func, args, kwargs or {}, tuple(shape), order)
        return return_part(
            func, args, drawn if self.mask is None else take_shard(drawn, self.mask, self.count, self.at)
        )


class _Shard(Execution):
    """One shard: its nodes read the versions of values that the plan wants."""

    def __init__(self, whole, at, bound):
        super().__init__(whole.graph, whole.models[at], bound)
        self.whole, self.at, self.wants = whole, at, {}

    def made(self, ref):
        return super()._value(ref)

    def _value(self, ref):
        return self.whole.version(ref, self.wants[ref])[self.at] if ref in self.wants else super()._value(ref)

    def read_number(self, expr):
        if expr.op in ("size", "numel", "stride"):  # sizes of whole values
            meta = self.graph.meta(expr.operands[0])
            if expr.op == "size":
                return meta.shape[expr.operands[1]] if len(expr.operands) > 1 else meta.shape
            if expr.op == "numel":
                return meta.numel
        return super().read_number(expr)

    def _source(self, node):
        if node.kind == "parameter":
            (pair,) = self.whole.plan.node(node.id).outputs
            return self.whole.parameter(node.target, pair[1])[self.at]
        found = super()._source(node)
        return found.clone() if node.kind == "input" and self.at and not found.requires_grad else found

    def _call(self, node, args, kwargs):
        one, args = self.whole.plan.node(node.id), list(args)
        module = self.model.get_submodule(node.target) if node.kind in ("module", "block") else None
        attributes = dict(module.__dict__) if module is not None else {}
        for size in one.sizes:
            self._divide(size, args, kwargs, module)
        held = {name: self.whole.parameter(name, layout)[self.at] for name, layout in one.parameters}
        for name, tensor in held.items():
            self.install(name, tensor)
        try:
            if one.local == VOCABULARY_EMBEDDING:
                return self._embedding(one, args, kwargs, held)
            if one.local == DIVIDED_HEADS:  # (samples, heads, …) are drawn
                with SlicedMask(one.mask, self.whole.plan.size, self.at, (0, args[4]), None):
                    return divided_multi_head_attention(*args, **kwargs)
            if one.local == DIVIDED_RECURRENCE:
                return self._recurrence(node, one, args, kwargs)
            if one.local != SAME:
                return self._cross_entropy(node, one, args, kwargs)
            if not node.random or node.kind == "block":
                return super()._call(node, args, kwargs)
            named = "dropout" in f"{node.target} {node.cls}".lower()  # its mask is like its argument
            first = self.graph.meta(one.inputs[0][0]) if one.inputs and named else None
            strides = first and (first.strides or contiguous_strides(first.shape))
            whole = self.graph.meta(one.outputs[0][0]).shape
            with SlicedMask(one.mask, self.whole.plan.size, self.at, whole, strides):
                return super()._call(node, args, kwargs)
        finally:
            for (_, name), *_rest in (size.place for size in one.sizes if size.place[0][0] == "a"):
                setattr(module, name, attributes[name])

    def install(self, name, tensor):
        owner, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(owner)
        module._parameters[attribute] = tensor
        if hasattr(module, "_flat_weights"):
            module._flat_weights = [module._parameters[one] for one in module._flat_weights_names]

    def _divide(self, size, args, kwargs, module):
        (kind, key), *rest = size.place
        owner = {"i": args, "k": kwargs, "a": module.__dict__ if module is not None else None}[kind]
        for _, inner in rest:
            if isinstance(owner[key], tuple):
                owner[key] = list(owner[key])
            owner, key = owner[key], inner
        owner[key] = size.local(owner[key], self.whole.plan.size, self.at)

    def _embedding(self, one, args, kwargs, held):
        index = args[0] if args else kwargs["input"]
        weight = next(iter(held.values())) if held else args[1] if len(args) > 1 else kwargs["weight"]
        key, layout = next((key, value) for key, value in (*one.parameters, *one.inputs) if isinstance(value, Shard))
        rows = self.graph.meta(key).shape[0] if isinstance(key, Ref) else self.whole.plan.tensor(key).shape[0]
        size = self.whole.plan.size
        start, stop = (unit * layout.factor for unit in unit_range(unit_count(layout, rows), size, self.at))
        inside = (index >= start) & (index < stop)
        node = self.graph.nodes[one.node]
        padding = self.model.get_submodule(node.target).padding_idx if held else kwargs.get("padding_idx")
        padding = args[2] if not held and len(args) > 2 else padding
        if padding is not None:
            inside_grad = inside & (index != padding % rows)
        rows_of = F.embedding((index - start).clamp(0, weight.shape[0] - 1), weight)
        found = rows_of * inside[..., None]
        if padding is None:
            return found
        return torch.where(inside_grad[..., None], found, found.detach())

    def _recurrence(self, node, one, args, kwargs):
        """The layer with joined weights and states; every shard has its slices of the results."""
        for name, layout in one.parameters:
            self.install(name, self._joined(f"{name} of {node.id}", self.whole.parameter(name, layout), layout))
        args, kwargs = [*args, *kwargs.values()], {}
        states = {ref: layout for ref, layout in one.inputs if isinstance(layout, Shard)}
        for ref, layout in states.items():
            h, c = args[1]
            assert c is self.whole.version(ref, layout)[self.at]
            args[1] = (h, self._joined(f"{ref} of {node.id}", self.whole.version(ref, layout), layout))
        made = super()._call(node, args, kwargs)
        layouts = {ref.path: layout for ref, layout in one.outputs}

        def take(value, path):
            if isinstance(value, tuple):
                return tuple(take(part, (*path, ("i", at))) for at, part in enumerate(value))
            return take_shard(value, layouts[path], self.whole.plan.size, self.at)

        return take(made, ())

    def _joined(self, key, parts, layout):
        """The whole of slices; the gradients of all shards are summed."""
        if key not in self.whole.values:
            self.whole.values[key] = move(parts, layout, PartialGrad()) if isinstance(layout, Shard) else parts
        return self.whole.values[key][self.at]

    def _cross_entropy(self, node, one, args, kwargs):
        """The loss of joined logits, whose gradient every shard's slice receives."""
        ref, layout = next(pair for pair in one.inputs if isinstance(pair[1], Shard))
        parts, key = self.whole.version(ref, layout), f"logits {node.id}"
        if key not in self.whole.values:
            self.whole.values[key] = move(parts, layout, Replicate())
        whole = self.whole.values[key][self.at]
        part = parts[self.at]
        joined = [whole if value is part else value for value in args]
        return super()._call(node, joined, {name: whole if value is part else value for name, value in kwargs.items()})


@dataclass
class SimulatedShards:
    """One forward of a plan; `leaves` are the parameters as stored."""

    graph: object
    plan: object
    values: dict = field(default_factory=dict)
    leaves: dict = field(default_factory=dict)
    models: list = field(default_factory=list)

    def run(self, *args, **kwargs):
        """Return the result of the model on every shard, with its tensors whole."""
        model = self.graph.bound_model()
        self.models = [copy.deepcopy(model) for _ in range(self.plan.size)]
        self.shards = [_Shard(self, at, bind(model, args, kwargs)) for at in range(self.plan.size)]
        self._store(model)
        for node in self.graph.nodes:
            one, state = self.plan.node(node.id), (torch.get_rng_state(), random.getstate(), np.random.get_state())
            for shard in self.shards:
                torch.set_rng_state(state[0])
                random.setstate(state[1])
                np.random.set_state(state[2])
                shard.wants = {} if node.is_source else dict(one.inputs)
                with self._region(node):
                    shard.step(node)
        for shard in self.shards:
            shard.wants = {ref: Replicate() for ref, _ in self.plan.results}
        for ref, layout in self.plan.results:
            self._results[ref] = move(self.version(ref, layout), layout, Replicate())
        return [decode(self.graph.result, lambda form, at=at: self._result(form, at)) for at in range(self.plan.size)]

    _results: dict = field(default_factory=dict)

    def _result(self, form, at):
        return self._results[form][at] if form in self._results else self.shards[at].read(form)

    @staticmethod
    def _region(node):
        return torch.set_grad_enabled(node.is_source or node.region is None or node.region.grad)

    def gradients(self):
        """The whole gradient of every parameter on every shard, by its first name."""
        found = {}
        for tensor in self.plan.tensors:
            grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.leaves[tensor.name]]
            found[tensor.name] = whole_of(grads, gradient_part(tensor.layout))
        return found

    def _store(self, model):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for tensor in self.plan.tensors:
            whole = parameters[tensor.name].detach()
            parts = convert([whole] * self.plan.size, Replicate(), value_part(tensor.layout))
            self.leaves[tensor.name] = [one.clone().requires_grad_(tensor.trainable) for one in parts]
            for name in tensor.names:
                for shard, leaf in zip(self.shards, self.leaves[tensor.name], strict=True):
                    shard.install(name, leaf)

    def version(self, ref, want):
        """A version of a value, made once."""
        if ref not in self.values:
            have = self.plan.produced(ref)
            self.values[ref] = have, {have: [shard.made(ref) for shard in self.shards]}
        have, versions = self.values[ref]
        if want not in versions:
            wanted = {layout for one in self.plan.nodes for key, layout in one.inputs if key == ref}
            wanted |= {layout for key, layout in self.plan.results if key == ref}
            source = next(a for a, b in conversions(have, wanted | {want}, ref in self.plan.grads) if b == want)
            versions[want] = move(self.version(ref, source), source, want)
        return versions[want]

    def parameter(self, name, want):
        """A version of a parameter, made once."""
        tensor = self.plan.tensor(name)
        key = f"parameter {tensor.name}"
        if key not in self.values:
            self.values[key] = tensor.layout, {tensor.layout: self.leaves[tensor.name]}
        have, versions = self.values[key]
        if want not in versions:
            wanted = {layout for one in self.plan.nodes for other, layout in one.parameters
                      if self.plan.tensor(other).name == tensor.name}  # fmt: skip
            source = next(a for a, b in conversions(have, wanted | {want}, tensor.trainable) if b == want)
            versions[want] = move(self.parameter(name, source), source, want)
        return versions[want]
