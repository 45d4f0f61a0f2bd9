"""Stage check: the sequential run and the detached step compared with the model, on one batch.

All three start from the same state of generators, buffers and attributes, which is restored at the end. The report has
the largest difference of outputs, gradients and buffers; equal runs differ by exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gemini.capture.verify.step_observation import tensor_difference
from gemini.ir.call_binding import ModelCall
from gemini.ir.encode import tensors
from gemini.ir.out_spec import structure_of
from gemini.pipe.tied_parameters import TiedGradients
from gemini.quiet_warnings import mute_warnings
from gemini.snapshot.model_state import ModelSnapshot

if TYPE_CHECKING:
    from gemini.pipe.piped_model import Piped


_COPIED_BYTES = 256 << 20  # of larger models only the tensors that a run writes are copied, before it writes them


@dataclass(frozen=True)
class Difference:
    """The largest differences between a run and the model, and where they are."""

    way: str  # "sequential" or "detached"; a key of the JSON of `gemini pipe`
    outputs: float
    gradients: float
    buffers: float
    where: tuple[str, ...] = ()  # the first differences
    is_rounding: bool = True  # all differences are within rounding

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(self.outputs, self.gradients, self.buffers)

    def __str__(self) -> str:
        parts = f"outputs {self.outputs:.3g}, gradients {self.gradients:.3g}, buffers {self.buffers:.3g}"
        return f"{self.way}: {parts}" + "".join(f"\n  - {line}" for line in self.where)


@dataclass(frozen=True)
class CheckReport:
    """Both runs, and the reasons of fallbacks to the model.

    Some partitions differ by rounding, for the reasons in `rounding`: a side branch in its own stage may run earlier or
    later, so that gradients of a value with several readers are summed in another order; and if autocast casts a
    weight once for two uses, stages with one use each cast it twice.
    """

    sequential: Difference
    detached: Difference
    rounding: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the stages ran and equal the model exactly, or up to rounding where that is unavoidable."""
        close = bool(self.rounding) and self.sequential.is_rounding and self.detached.is_rounding
        return self.is_exact or (close and not self.fallbacks)

    @property
    def is_exact(self) -> bool:
        """Whether the stages ran, and nothing differs."""
        return not self.fallbacks and self.sequential.largest == self.detached.largest == 0

    def __str__(self) -> str:
        lines = [str(self.sequential), str(self.detached)]
        if not self.is_exact:
            lines += self.rounding
        return "\n".join([*lines, *(f"fell back: {reason}" for reason in self.fallbacks)])


@dataclass
class _StepResult:
    """The observed results of one step."""

    structure: str
    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def check_piped(piped: Piped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckReport:
    """Run a step with the model, in sequence and detached, and compare."""
    model, call = piped.model, ModelCall(tuple(args), kwargs)
    grads = [(p, p.grad) for p in model.parameters()]
    large = sum(p.numel() * p.element_size() for p in model.parameters()) > _COPIED_BYTES
    state, reasons = ModelSnapshot(model, watch=large), piped.fallback_reasons

    def step(run: Callable[[Any, Any], Any]) -> _StepResult:
        for parameter, _ in grads:
            parameter.grad = None
        a, k = call.arguments()
        try:
            with state.watch_writes():
                return _observe(piped, run(a, k), (a, k))
        finally:
            state.restore()

    def eager(a: Any, k: Any) -> Any:
        return _run_objective_backward(model(*a, **k))

    def sequential(a: Any, k: Any) -> Any:
        return _run_objective_backward(piped(*a, **k))

    def compare(run: str, found: _StepResult) -> Difference:
        return _compare(run, expected, found, torch.bfloat16 if _uses_autocast(piped) else None)

    def detached(a: Any, k: Any) -> Any:
        if not torch.is_grad_enabled():
            return piped(*a, **k)
        return piped.run_detached(a, k, loss=objective).output

    try:
        with mute_warnings():
            expected = step(eager)
            found = (compare("sequential", step(sequential)), compare("detached", step(detached)))
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
    after = piped.fallback_reasons
    uncut = tuple(text for text, count in after.items() if count > reasons.get(text, 0))
    return CheckReport(*found, rounding=tuple(_rounding_reasons(piped)), fallbacks=uncut)


def _rounding_reasons(piped: Piped) -> Iterator[str]:
    """Yield the reasons for which these stages may differ from the model by rounding."""
    order = [node for nodes in piped.partition.stages for node in nodes]
    if order != sorted(order):
        yield "the stages sum gradients in another order than the model does"
    if _uses_autocast(piped) and TiedGradients(piped.stages).parameters:
        yield "autocast casts a weight that several stages use once in each of them"


def _uses_autocast(piped: Piped) -> bool:
    return any(node.region is not None and node.region.autocast for node in piped.graph.nodes)


def objective(output: Any) -> torch.Tensor | None:
    """Return a scalar that depends on every differentiable tensor of an output, with fixed weights."""
    total: torch.Tensor | None = None
    generator = torch.Generator().manual_seed(1)
    for _, tensor in tensors(output):
        if not tensor.requires_grad:
            continue
        value = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        weights = torch.rand(value.shape, generator=generator).to(value.device, value.dtype) + 0.5
        part = ((value * weights).sum() / max(1, value.numel()) ** 0.5).float()
        total = part if total is None else total + part
    return total


def _run_objective_backward(output: Any) -> Any:
    loss = objective(output)
    if loss is not None:
        loss.backward()
    return output


def _observe(piped: Piped, output: Any, arguments: Any) -> _StepResult:
    gradients = {name: p.grad for name, p in piped.named_parameters()}
    gradients |= {f"input {_name(path)}": t.grad for path, t in tensors(arguments) if t.is_leaf and t.requires_grad}
    buffers = {name: buffer.detach().clone() for name, buffer in piped.named_buffers()}
    buffers |= {f"input {_name(path)}": t.detach().clone() for path, t in tensors(arguments)}
    return _StepResult(
        structure_of(output), {_name(path): t.detach() for path, t in tensors(output)}, gradients, buffers
    )


def _name(path: Any) -> str:
    return ".".join(str(step[1]) for step in path) or "output"


def _compare(run: str, expected: _StepResult, found: _StepResult, precision: torch.dtype | None) -> Difference:
    where: list[str] = []
    if expected.structure != found.structure:
        where.append(f"the output is {found.structure:.200}, not {expected.structure:.200}")
    sizes: dict[str, float] = {}
    rounding = not where
    for kind in ("outputs", "gradients", "buffers"):
        largest = float("inf") if where and kind == "outputs" else 0.0
        one, other = getattr(expected, kind), getattr(found, kind)
        noise = _noise(one.values(), precision)
        for name in dict.fromkeys((*one, *other)):
            size = _distance(one.get(name), other.get(name))
            if size:
                rounding = rounding and (size <= noise or _is_close(one.get(name), other.get(name), precision))
                where.append(f"{kind[:-1]} {name} differs by {size:.3g}")
            largest = max(largest, size)
        sizes[kind] = largest
    return Difference(run, **sizes, where=tuple(where[:6]), is_rounding=rounding)


def _noise(values: Iterable[torch.Tensor | None], precision: torch.dtype | None) -> float:
    """Return the rounding error of a tensor that should be 0 (the bias of keys) beside tensors of these sizes."""
    real = [v for v in map(_dense, values) if v is not None and v.numel() and (v.is_floating_point() or v.is_complex())]
    largest = max((float(v.abs().nan_to_num(0.0, 0.0, 0.0).max()) for v in real), default=0.0)
    return (1e-6 if precision is None else 1e-3) * largest


def _dense(value: torch.Tensor | None) -> torch.Tensor | None:
    return value.to_dense() if value is not None and value.is_sparse else value


def _is_close(one: torch.Tensor | None, other: torch.Tensor | None, precision: torch.dtype | None) -> bool:
    """Return whether two tensors are equal up to rounding, in a lower precision if specified."""
    if precision is not None and one is not None and other is not None and one.is_floating_point():
        one, other = one.to(precision), other.to(precision)
    return not tensor_difference(one, other)


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference between two tensors; infinite where they cannot be compared."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.is_sparse and other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.device.type == "meta" or torch.equal(one, other):
        return 0.0
    same = (one == other) | (one.isnan() & other.isnan())
    wide = torch.complex128 if one.is_complex() else torch.float64
    rest = (one[~same].to(wide) - other[~same].to(wide)).abs()
    return 0.0 if not rest.numel() else float(rest.nan_to_num(nan=float("inf")).max())
