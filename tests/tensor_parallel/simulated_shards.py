"""Simulated shards: a shard plan run in one process, all shards in step, with every move as one autograd function.

A value is a list with the part of each shard. Forward and backward of a move convert the parts as the layouts define,
so losses and gradients of a correct plan are those of one device.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from gemini.ir.call_binding import bind
from gemini.ir.encode import decode, follow
from gemini.ir.op_targets import find_op
from gemini.ir.pytree import Number, Ref
from gemini.ir.symint import evaluate
from gemini.tensor_parallel.layouts import (
    Partial,
    PartialGrad,
    Replicate,
    Shard,
    gradient_part,
    join_shards,
    take_shard,
    unit_count,
    unit_range,
    value_part,
)
from gemini.tensor_parallel.shard_plan import SAME, VOCABULARY_EMBEDDING, conversions


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
        return list(Move.apply(have, want, *parts))
    return convert(parts, value_part(have), value_part(want))


@dataclass
class SimulatedShards:
    """One forward of a plan; `leaves` are the parameters as stored."""

    graph: object
    plan: object
    values: dict = field(default_factory=dict)
    leaves: dict = field(default_factory=dict)

    def run(self, *args, **kwargs):
        """Return the result of the model on every shard, with its tensors whole."""
        model = self.graph.bound_model()
        bound = bind(model, args, kwargs)
        self._store(model)
        for node in self.graph.nodes:
            self._step(model, node, bound)
        whole = {ref: move(self._version(ref, layout), layout, Replicate()) for ref, layout in self.plan.results}
        return [
            decode(self.graph.result, lambda form, at=at: whole[form][at] if form in whole else self._number(form, at))
            for at in range(self.plan.size)
        ]

    def gradients(self):
        """The whole gradient of every parameter, by its first name."""
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

    def _version(self, ref, want):
        """A version of a value, made once."""
        have, versions = self.values[ref]
        if want not in versions:
            wanted = {layout for one in self.plan.nodes for key, layout in one.inputs if key == ref}
            wanted |= {layout for key, layout in self.plan.results if key == ref}
            source = next(a for a, b in conversions(have, wanted | {want}, ref in self.plan.grads) if b == want)
            parts = versions[source] if source in versions else self._version(ref, source)
            versions[want] = move(parts, source, want)
        return versions[want]

    def _parameter(self, name, want):
        tensor = self.plan.tensor(name)
        key = f"parameter {tensor.name}"
        if key not in self.values:
            self.values[key] = tensor.layout, {tensor.layout: self.leaves[tensor.name]}
        have, versions = self.values[key]
        if want not in versions:
            if (
                isinstance(want, Replicate)
                and isinstance(have, Shard)
                and any(
                    (tensor.name in {self.plan.tensor(other).name} and isinstance(layout, PartialGrad))
                    for one in self.plan.nodes
                    for other, layout in one.parameters
                )
            ):
                versions[want] = move(self._parameter(name, PartialGrad()), PartialGrad(), want)
            else:
                versions[want] = move(versions[have], have, want)
        return versions[want]

    def _step(self, model, node, bound):
        one = self.plan.node(node.id)
        if node.is_source:
            ((ref, layout),) = one.outputs
            self.values[ref] = layout, {layout: self._source(model, node, bound, layout)}
            return
        wants = dict(one.inputs)
        state, outs = torch.get_rng_state(), []
        with torch.set_grad_enabled(node.region is None or node.region.grad):
            for at in range(self.plan.size):
                torch.set_rng_state(state)
                outs.append(self._local(model, node, one, wants, at))
        for ref, layout in one.outputs:
            parts = [follow(out, ref.path) for out in outs]
            self.values[ref] = layout, {layout: parts}

    def _source(self, model, node, bound, layout):
        if node.kind == "parameter":
            return self._parameter(node.target, layout)
        if node.kind == "input":
            return [follow(bound, self.graph.inputs[node.id])] * self.plan.size
        owner, _, name = node.target.rpartition(".")
        return [getattr(model.get_submodule(owner), name)] * self.plan.size

    # ── one shard ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _local(self, model, node, one, wants, at):
        def read(form):
            return self._version(form, wants[form])[at] if isinstance(form, Ref) else self._number(form, at)

        args, kwargs = list(decode(node.args, read)), decode(node.kwargs, read)
        module = copy.copy(model.get_submodule(node.target)) if node.kind in ("module", "block") else None
        for size in one.sizes:
            self._divide(size, at, args, kwargs, module)
        held = {name: self._parameter(name, layout)[at] for name, layout in one.parameters}
        if one.local == VOCABULARY_EMBEDDING:
            return self._embedding(one, args, held, at)
        if one.local != SAME:
            return self._cross_entropy(node, one, (args, kwargs), at)
        if one.mask is not None and node.kind == "module" and type(module).__name__ == "Dropout":
            whole = torch.ones(self.graph.meta(Ref(node.id)).shape, dtype=args[0].dtype)
            mask = F.dropout(whole, module.p, module.training)
            return args[0] * take_shard(mask, one.mask, self.plan.size, at)
        if one.mask is not None:
            return self._attention(one.mask, at, *args, **kwargs)
        if module is not None:
            prefix = f"{node.target}." if node.target else ""
            return torch.func.functional_call(
                module, {name.removeprefix(prefix): tensor for name, tensor in held.items()}, tuple(args), kwargs
            )
        return find_op(node.target)(*args, **kwargs)

    def _attention(self, mask, at, query, key, value, *, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        """Attention whose random numbers are the shard's slice of those of all heads."""
        heads = [*query.shape[:-1], key.shape[-2]]
        heads[mask.dim] = mask.entries * self.plan.size
        drop = take_shard(F.dropout(torch.ones(heads, dtype=query.dtype), dropout_p), mask, self.plan.size, at)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        if attn_mask is not None:
            scores = scores + (
                torch.zeros(()).masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else attn_mask
            )
        return (scores.softmax(-1) * drop) @ value

    def _divide(self, size, at, args, kwargs, module):
        (kind, key), *rest = size.place
        owner = {"i": args, "k": kwargs, "a": module.__dict__ if module is not None else None}[kind]
        for _, inner in rest:
            if isinstance(owner[key], (tuple, torch.Size)):
                owner[key] = list(owner[key])
            owner, key = owner[key], inner
        owner[key] = size.local(owner[key], self.plan.size, at)

    def _number(self, form, at):
        if not isinstance(form, Number):
            return None

        def read(expr):
            source, *rest = expr.operands
            if expr.op == "size":
                return self.graph.meta(source).shape[rest[0]]
            return getattr(self._version(source, Replicate())[at], expr.op)()

        return evaluate(form.expr, read)

    def _embedding(self, one, args, held, at):
        weight = next(iter(held.values())) if held else args[1]
        key, layout = next((key, value) for key, value in (*one.parameters, *one.inputs) if isinstance(value, Shard))
        rows = self.graph.meta(key).shape[0] if isinstance(key, Ref) else self.plan.tensor(key).shape[0]
        start, stop = (unit * layout.factor for unit in unit_range(unit_count(layout, rows), self.plan.size, at))
        inside = (args[0] >= start) & (args[0] < stop)
        return F.embedding((args[0] - start).clamp(0, weight.shape[0] - 1), weight) * inside[..., None]

    def _cross_entropy(self, node, one, arguments, at):
        """The loss of joined logits, whose gradient every shard's slice receives."""
        ref, layout = next(pair for pair in one.inputs if isinstance(pair[1], Shard))
        parts, key = self._version(ref, layout), f"logits {node.id}"
        if key not in self.values:
            self.values[key] = move(parts, layout, Replicate())
        args, kwargs = arguments
        joined = {id(part): whole for part, whole in zip(parts, self.values[key], strict=True)}
        target = find_op(node.target) if node.kind == "op" else self.graph.bound_model().get_submodule(node.target)
        named = {name: joined.get(id(value), value) for name, value in kwargs.items()}
        return target(*(joined.get(id(value), value) for value in args), **named)
