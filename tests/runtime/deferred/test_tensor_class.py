"""The class of a deferred tensor compares and prints as `torch.Tensor`."""

from __future__ import annotations

import torch

from gemini.runtime.deferred.deferred_tensor import DeferredTensor


def test_it_is_equal_to_tensor_and_to_nothing_else() -> None:
    for is_tensor in (
        torch.Tensor == DeferredTensor,
        DeferredTensor == torch.Tensor,
        DeferredTensor in (torch.Tensor, int),
    ):
        assert is_tensor
    assert not DeferredTensor != torch.Tensor  # noqa: SIM202 - the other operator
    assert DeferredTensor not in (torch.nn.Parameter, tuple, list)
    assert torch.nn.Parameter != torch.Tensor


def test_it_is_printed_as_tensor() -> None:
    assert str(DeferredTensor) == str(torch.Tensor)
    assert DeferredTensor.__name__ == "Tensor"
