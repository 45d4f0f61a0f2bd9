"""Determinism: kernels that give the same result twice, for as long as runs are compared.

On an accelerator, atomic additions and the choice of algorithms make two runs of one model differ. Torch offers
deterministic kernels for most; what noise remains is measured (see `checks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic

from gemini.quiet_warnings import muted


@contextmanager
def deterministic(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Prefer deterministic kernels if one of the tensors lives on an accelerator."""
    if all(tensor.device.type in ("cpu", "meta") for tensor in tensors):
        yield
        return
    before = torch.get_deterministic_debug_mode()
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory
    flags = cudnn.benchmark, cudnn.deterministic
    with muted(message=".*deterministic.*"):
        try:
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = False
            cudnn.benchmark, cudnn.deterministic = False, True
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill
            cudnn.benchmark, cudnn.deterministic = flags
