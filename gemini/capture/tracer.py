"""Tracer: runs a model once, on real tensors, and records the operations between its leaf modules.

Nothing is symbolic. The tracer identifies every tensor by identity and every size by its expression, so that the
recorded nodes can run on another batch. Regions that it cannot trace it refuses with `TraceRefused`: the innermost
open module (or Python function) then becomes a basic block and tracing restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gemini.capture import concretize
from gemini.capture.leaf_policy import LeafPolicy
from gemini.capture.opaque_calls import OpaqueCall, OpaqueCallRecorder
from gemini.capture.patches import intercept
from gemini.ir.encode import strip, tensors
from gemini.ir.op_targets import op_name
from gemini.ir.out_spec import structure_of
from gemini.ir.symint import Expr
from gemini.snapshot.rng_snapshot import torch_rng_fingerprint


class Tracer(TorchFunctionMode, OpaqueCallRecorder):  # type: ignore[misc]
    """One traced run; afterwards `nodes`, `guards` and `result` hold the graph."""

    def __init__(self, model: nn.Module, leaf_policy: LeafPolicy) -> None:
        TorchFunctionMode.__init__(self)
        OpaqueCallRecorder.__init__(self, model, leaf_policy)
        self.random_scalars: dict[int, torch.Tensor] = {}  # random scalars by node: they may decide a branch
        self.forced_scalars: dict[int, torch.Tensor] = {}  # random scalars to force, by node

    def run(self, bound: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Trace `call()`, which calls the model with the tensors of `bound`."""
        for path, tensor in tensors(bound):
            node = self.source("input", ".".join(str(step[1]) for step in path), tensor)
            self.inputs[node] = path
        with intercept(self, self.leaf_policy.calls), self:
            self.active = True
            try:
                output = call()
                self.busy = True
                self.scope = [""]
                self.result = self.encode(output)
                self.record_attribute_writes(self.model, final=True)
            finally:
                self.active, self.busy = False, False
        return output

    def forward_only(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward; its hooks run around the trace."""
        if "" in self.leaf_policy.blocks:
            return self.run_opaque(
                OpaqueCall("block", "model", "", lambda a, k: forward(*a, **k), self.model), args, kwargs
            )
        return self.open("", lambda: forward(*args, **kwargs))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.busy or not self.active:
            return func(*args, **kwargs)
        if self.leaf is not None:
            return self.run_inside(self.leaf, func, args, kwargs)
        self.busy = True
        try:
            return self._op(func, args, kwargs)
        finally:
            self.busy = False

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = op_name(func)
        short = concretize.short_name(name)
        if short in concretize.SIZES:
            return concretize.read_size(self, short, func, args, kwargs)
        casts = short == "type" and (len(args) > 1 or kwargs)  # without arguments it returns the type
        if (short in concretize.STATIC and not casts) or name.startswith(("torch._C._set_grad", "torch.ops.profiler.")):
            return func(*strip(args), **strip(kwargs))
        if short in concretize.REFUSED or not name:
            self.refuse(f"{short or getattr(func, '__name__', func)!s} leaves the tensor world")
        if short in concretize.READS:
            return concretize.read_value(self, func, args)
        return self._record(func, name, args, kwargs)

    def _record_random_scalar(self, output: Any) -> None:
        """Record a random scalar, after forcing its value if one is set."""
        if type(output) is torch.Tensor and output.numel() == 1:
            forced = self.forced_scalars.get(len(self.nodes))
            if forced is not None and forced.shape == output.shape and forced.dtype == output.dtype:
                output.data.copy_(forced)
            self.random_scalars[len(self.nodes)] = output.detach().clone()

    def _record(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        form_args, form_kwargs = self.encode(args), self.encode(kwargs)
        inputs = [tensor for _, tensor in tensors((args, kwargs))]
        before = self.storages.versions(inputs)
        for at in concretize.undeclared_writes(name, args, kwargs):
            before[at] -= 1
        random = torch_rng_fingerprint()
        output = func(*strip(args), **strip(kwargs))
        if random != torch_rng_fingerprint():
            self._record_random_scalar(output)
        made = list(tensors(output))
        if not made and output is not None:
            return concretize.record_read(self, name, form_args, form_kwargs, output)
        if not made and not inputs:
            return None
        node = self.start("op", f"{self.name_prefix()}{concretize.short_name(name)}", name, form_args, form_kwargs)
        node.out_spec = structure_of(output)
        node.random = random != torch_rng_fingerprint()
        self.record_tensor_writes(node, inputs, before)
        self.record_sizes(name, strip(args), strip(kwargs), output)
        self.append(node, made, from_weights=False)
        if isinstance(output, (tuple, list)) and concretize.short_name(name) in concretize.PARTS:
            at = 1 if concretize.short_name(name) == "unbind" else 2
            dim = (kwargs or {}).get("dim", args[at] if len(args) > at else 0)
            self._guard_parts(inputs[0], dim % inputs[0].dim())
        return output

    def _guard_parts(self, tensor: torch.Tensor, dim: int) -> None:
        """Guard the number of parts along a dimension of a tensor where it depends on contents."""
        ref = self.origin(tensor)
        if ref in self.dynamic and dim in self.dynamic[ref].dims:
            self.guard(Expr("size", (ref, dim)), tensor.shape[dim])
