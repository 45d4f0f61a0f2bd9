"""Step comparison: whether the results of a planned step and of its local rerun are equal up to rounding.

`eps` is the rounding of the coarsest floating dtype that the step computes in. Micro-batches sum in another order than
the whole batch, so results differ by more than one rounding: sqrt(eps) relative is accepted (3e-4 in float32).

    gradients    by norm, relative to the norm of the gradient; a gradient whose terms cancel (a bias in front of a
                 normalization) consists of rounding alone, so eps^(3/4) of the norm of all gradients is accepted too;
                 where all of them cancel, eps^(3/4) of the loss per norm of the weights
    values       by element, relative to the element or to the median element, whichever is larger
    loss         as a value; where its terms cancel, by what eps^(3/4) of all weights would change it by
    others       integers may differ in one element of a thousand: ties of an `argmax` break by rounding

NaN equals NaN, infinity equals the same infinity. A gradient that exists on one side only is a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

Pair = tuple[str, torch.Tensor | None, torch.Tensor | None]  # name, found in the workers, expected
_TIES = 1e-3  # share of the elements of an integer tensor


@dataclass
class Comparison:
    """The largest relative differences so far, and those that rounding does not explain, as text."""

    eps: float
    loss: float = 0.0
    gradient: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> float:
        """The relative difference that rounding explains."""
        return math.sqrt(self.eps)

    @property
    def _cancelled(self) -> float:
        return math.pow(self.eps, 0.75)

    def compare_gradients(self, pairs: Sequence[Pair], scale: Callable[[], float] = lambda: 0.0) -> None:
        """Compare the gradients of one loss; `scale` is the loss divided by the norm of the tensors."""
        norms = [0.0 if wanted is None else _norm(wanted) for _, _, wanted in pairs]
        least = self._cancelled * math.hypot(*(norm for norm in norms if math.isfinite(norm)))
        for (name, found, wanted), norm in zip(pairs, norms, strict=True):
            if found is None or wanted is None:
                if found is not wanted:
                    self.faults.append(f"{name} is {'missing' if found is None else 'one where python has none'}")
                continue
            if fault := _structure_fault(found, wanted):
                self.faults.append(f"{name} is {fault}")
                continue
            off = _norm(_difference(found, wanted))
            relative = off / norm if math.isfinite(norm) and norm > 0 else 0.0 if off == 0 else math.inf
            if off <= self.accepted * (norm if math.isfinite(norm) else 0.0) + least:
                if norm * self.accepted > least:  # a cancelled gradient has no relative difference
                    self.gradient = max(self.gradient, relative)
            elif not off <= self._cancelled * scale():
                self.faults.append(f"{name} differs by {relative:.1e} of its norm")

    def compare_loss(self, found: torch.Tensor, wanted: torch.Tensor, sensitivity: Callable[[], float]) -> None:
        """Compare the loss; `sensitivity` is the product of the norms of its gradient and of the weights."""
        if fault := _structure_fault(found, wanted):
            self.faults.append(f"the loss is {fault}")
            return
        off, size = _norm(_difference(found, wanted)), _norm(wanted)
        relative = off / size if math.isfinite(size) and size > 0 else 0.0 if off == 0 else math.inf
        if relative <= self.accepted:
            self.loss = max(self.loss, relative)
        elif not off <= self._cancelled * sensitivity():
            self.faults.append(f"the loss differs by {relative:.1e} relative")

    def compare_values(self, pairs: Iterable[Pair]) -> None:
        """Compare tensors element by element: outputs, buffers, values of the loss."""
        for name, found, wanted in pairs:
            assert found is not None
            assert wanted is not None
            fault = _structure_fault(found, wanted) or self._value_fault(found, wanted)
            if fault:
                self.faults.append(f"{name} {fault}" if fault.startswith("differs") else f"{name} is {fault}")

    def _value_fault(self, found: torch.Tensor, wanted: torch.Tensor) -> str:
        if not wanted.numel() or torch.equal(found, wanted):
            return ""
        if not (wanted.is_floating_point() or wanted.is_complex()):
            if wanted.numel() == 1:  # a count
                off, most = abs(int(found) - int(wanted)), 1 + _TIES * abs(int(wanted))
            else:
                off, most = int((found != wanted).sum()), 1 + _TIES * wanted.numel()
            return f"differs in {off} of {wanted.numel()} elements" if off > most else ""
        off_by, sizes = _difference(found, wanted).abs(), _to_double(wanted).abs()
        sizes = sizes.where(sizes.isfinite(), 0)
        usual = sizes[sizes > 0]
        least = float(usual.median()) if usual.numel() else 0.0
        beyond = off_by > self.accepted * sizes.clamp_min(least)
        if not bool((beyond | off_by.isnan()).any()):
            return ""
        relative = off_by / sizes.clamp_min(least or math.inf)
        return f"differs by {float(relative.nan_to_num(nan=math.inf).max()) if least else math.inf:.1e} relative"


def coarsest_eps(dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest rounding of the floating dtypes, and of torch's present settings for matrix products."""
    found: list[float] = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if torch.get_float32_matmul_precision() == "medium":
        found.append(torch.finfo(torch.bfloat16).eps)
    elif torch.cuda.is_available() and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        found.append(torch.finfo(torch.float16).eps)  # TF32 has as many bits
    return max(found, default=torch.finfo(torch.float32).eps)


def total_norm(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the norm of all tensors together."""
    return math.hypot(*[_norm(tensor) for tensor in tensors if tensor is not None])


def _structure_fault(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return how shape or dtype differ; '' where they do not."""
    if found.shape != wanted.shape:
        return f"of shape {list(found.shape)}, not {list(wanted.shape)}"
    return f"{found.dtype}, not {wanted.dtype}" if found.dtype != wanted.dtype else ""


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the difference in double precision; 0 where both are the same, NaN and infinities included."""
    found, wanted = _to_double(found), _to_double(wanted)
    if found.device != wanted.device:
        found = found.to(wanted.device)
    difference = found - wanted
    if bool(difference.isfinite().all()):
        return difference
    return difference.where(~((found == wanted) | (found.isnan() & wanted.isnan())), 0)


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(_to_double(tensor))) if tensor.numel() else 0.0
