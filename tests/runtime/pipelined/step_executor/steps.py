"""A model in stages, a hand-written loss, and the same step on one device as the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini import pipe_model
from gemini.batch_analysis.loss_tape import Op
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import bind
from gemini.ir.pytree import Literal, MappingForm, Ref, leaves
from gemini.ir.pytree import SequenceForm as Listed
from gemini.partition import Options
from gemini.pipe import Piped
from gemini.runtime.memory.shared_parameters import SharedParameters
from gemini.runtime.pipelined.step_executor import Executor
from gemini.runtime.pipelined.step_request import ExecutedStep, StepRequest, WholeTensor, bind_inputs
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.step.worker_program import Loss, StepProgram


class Val(int):
    """The number of a value, as an argument."""


@dataclass
class Script:
    """A loss, written once and done twice: recorded for the executor, and run on one device.

    `script(outputs, operand, call)`: `operand(tensor, dim)` and `call(function, *args, share=…)` make values.
    """

    body: Callable[..., Any]
    ops: list[Op] = field(default_factory=list)
    operands: dict[int, WholeTensor] = field(default_factory=dict)
    shares: dict[int, str] = field(default_factory=dict)

    def record(self, count: int) -> Val:
        """Write it down, for so many outputs; the root."""
        self.ops, self.operands, self.shares, self._next = [], {}, {}, count
        root: Val = self.body([Val(at) for at in range(count)], self._operand, self._call)
        return root

    def _operand(self, tensor: torch.Tensor, dim: int | None = 0) -> Val:
        self.operands[self._next] = WholeTensor(tensor, dim)
        return self._new()

    def _new(self) -> Val:
        self._next += 1
        return Val(self._next - 1)

    def _call(self, function: Any, *args: Any, mean: bool = False, **kwargs: Any) -> Val:
        if mean:
            self.shares[len(self.ops)] = "samples"
        form = _form(((*args,), kwargs))
        made = self._new()
        self.ops.append(Op(function, form, Region.current(), (made,)))
        return made

    def run(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Do it here."""
        root: torch.Tensor = self.body(
            list(outputs), lambda tensor, _=0: tensor, lambda f, *args, mean=False, **kwargs: f(*args, **kwargs)
        )
        return root


def _form(value: Any) -> Any:
    if isinstance(value, Val):
        return Ref(int(value))
    if isinstance(value, tuple):
        return Listed(tuple, tuple(_form(one) for one in value))
    if isinstance(value, dict):
        return MappingForm(dict, tuple((key, _form(one)) for key, one in value.items()))
    return Literal(value)


def outputs_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a model's output."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [one for part in parts for one in outputs_of(part)]


def cut(model: nn.Module, args: tuple[Any, ...], kwargs: Any = None, stages: int = 2, **more: Any) -> Piped:
    """A model in stages, on estimated costs."""
    settings = {"analytic": "cpu", "cache": False, "options": Options(mixed=False), **more}
    return pipe_model(model, args, kwargs, nparts=stages, **settings)


class Bench:
    """A model installed in workers, ready to run steps."""

    def __init__(self, piped: Piped, pool: WorkerPool) -> None:
        self.piped, self.pool, self.model = piped, pool, piped.model
        self.shared_parameters = SharedParameters(pool, torch.device("cpu"))
        self.shared_parameters.share([*self.model.parameters(), *self.model.buffers()])
        self.results = [
            piped.routes.results[leaf].name for leaf in leaves(piped.graph.result) if leaf in piped.routes.results
        ]

    def executor(self, program: StepProgram) -> Executor:
        """One that has its stages."""
        made = Executor(self.pool, self.shared_parameters, program)
        made.install(self.piped.stages, texts(self.piped))
        return made

    def request(
        self,
        args: tuple[Any, ...],
        sizes: Sequence[int],
        script: Script | None = None,
        *,
        kwargs: Any = None,
        dims: dict[int, int | None] | None = None,
        **more: Any,
    ) -> StepRequest:
        """A step; every tensor of the call has its samples in dimension 0 unless `dims` says otherwise."""
        bound = bind(self.model, args, kwargs or {})
        found = {id(one): 0 for one in outputs_of(bound)}
        found.update(dims or {})
        loss = None
        op_shares: dict[int, list[float]] = {}
        if script is not None:
            root = script.record(len(self.results))
            ports = dict(enumerate(self.results))
            loss = Loss(tuple(script.ops), ports, tuple(script.operands), root, more.pop("keep_values", ()))
            op_shares = {at: [size / sum(sizes) for size in sizes] for at in script.shares}
        inputs = bind_inputs(self.piped.routes, self.model, bound, found, sizes)
        return StepRequest(
            inputs, tuple(sizes), Region.current(), loss, script.operands if script else {}, op_shares=op_shares, **more
        )


def texts(piped: Piped) -> dict[str, str]:
    """The generated files by path."""
    import sys

    return {
        str(sys.modules[type(stage).__module__].__file__): code.source
        for stage, code in zip(piped.stages, piped.codes, strict=True)
    }


def eager(model: nn.Module, args: tuple[Any, ...], script: Script, kwargs: Any = None) -> tuple[Any, dict[str, Any]]:
    """The same step on one device: the loss, and gradients by name. Leaves no gradients behind."""
    model.zero_grad(set_to_none=True)
    loss = script.run(outputs_of(model(*args, **(kwargs or {}))))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def compare(
    result: ExecutedStep, model: nn.Module, loss: torch.Tensor, wanted: dict[str, Any], within: float = 1e-9
) -> None:
    """Assert that a step gave the same loss and the same gradients."""
    assert result.root is not None
    torch.testing.assert_close(result.root, loss, rtol=within, atol=within)
    found = {id(parameter): gradient for parameter, gradient in result.gradients}
    assert len(found) == len(result.gradients)
    for name, parameter in model.named_parameters():
        gradient = found.pop(id(parameter), None)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        want = wanted.get(name)
        if want is None:
            assert gradient is None or not gradient.any(), name
            continue
        assert gradient is not None, f"{name} has no gradient"
        torch.testing.assert_close(
            gradient, want.to_dense(), rtol=within, atol=within, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert not found
