"""The order of sums: one process that adds gradients up as workers do.

Where a tensor is used several times inside a unit and once more outside, its gradient is (a + b) + c with workers, and
(c + b) + a in one process, whose autograd knows no units: last bits differ. This is the run of one process in which
units are functions of their own too, as with workers and without any: workers must equal it in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.runtime.argument_mutations import ArgumentObjects, apply_result, find_objects
from gemini.runtime.transport.serialization import ClassTable, pack, unpack
from gemini.runtime.worker.module_server import InputBoundary

_classes = ClassTable()


@contextmanager
def grouped(model: nn.Module, units: list[str], after: int) -> Iterator[None]:
    """Calls of these modules are functions of their own, from a call of the model on."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            for name in units:
                _wrap(model.get_submodule(name))

    handle = model.register_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _wrap(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: _Call(module, forward, args, kwargs).run()


class _Call:
    """One call of a unit."""

    def __init__(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> None:
        self.forward_of, self.arguments = forward, (args, kwargs)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.grad = torch.is_grad_enabled()

    def run(self) -> Any:
        """The result, as the program gets it."""
        self.body, self.given = pack(self.arguments, _classes)
        made = iter(_Grouped.apply(self, *self.given, *self.trained))
        tensors = [next(made) if at is None else self.given[at] for at in self.same]
        if not self.has_objects:
            return unpack(self.parcel, tensors, _classes)
        objects = find_objects(*self.arguments)
        return apply_result(unpack(self.parcel, tensors, _classes, objects), objects)[0]

    def forward(self) -> list[tuple[torch.Tensor, bool]]:
        """The tensors that it makes, with a graph of its own behind those that have one."""
        self.leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.given]
        inputs = [InputBoundary.apply(leaf) if leaf.requires_grad else leaf for leaf in self.leaves]
        args, kwargs = unpack(self.body, inputs, _classes)
        held = ArgumentObjects(args, kwargs, _classes)
        result = self.forward_of(*args, **kwargs)
        changes = held.changes()
        assert not isinstance(changes, str), changes
        self.parcel, tensors = held.pack_result(result, changes)
        self.has_objects = bool(held.objects)
        place = {id(tensor): at for at, tensor in enumerate(inputs)}
        self.same = [place.get(id(tensor)) for tensor in tensors]
        self.made = [tensor for tensor, at in zip(tensors, self.same, strict=True) if at is None]
        return [(tensor.detach(), tensor.requires_grad) for tensor in self.made]

    def backward(self, gradients: Any, needed: list[bool]) -> list[Any]:
        """Gradients of what wants one."""
        pairs = [(t, g) for t, g in zip(self.made, gradients, strict=True) if g is not None and t.requires_grad]
        wanted = [t for t, want in zip([*self.leaves, *self.trained], needed, strict=True) if want]
        if not pairs or not wanted:
            return [None] * len(needed)
        outputs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True))
        return [next(found) if want else None for want in needed]


class _Grouped(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: _Call, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.set_grad_enabled(call.grad):
            made = call.forward()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in made if not flag))
        return tuple(tensor for tensor, _ in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (None, *ctx.call.backward(gradients, list(ctx.needs_input_grad[1:])))
