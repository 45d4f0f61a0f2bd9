"""Step comparison: rounding is accepted in every dtype, larger differences are named."""

from __future__ import annotations

import math

import pytest
import torch

from gemini.runtime.pipelined.step_comparison import Comparison, Pair, coarsest_eps

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN, INF = math.nan, math.inf


def gradients(*pairs: Pair, eps: float = 2.0**-23) -> list[str]:
    comparison = Comparison(eps)
    comparison.compare_gradients(pairs)
    return comparison.faults


def values(found: torch.Tensor, wanted: torch.Tensor, eps: float = 2.0**-23) -> list[str]:
    comparison = Comparison(eps)
    comparison.compare_values([("it", found, wanted)])
    return comparison.faults


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_another_order_are_equal_and_lost_samples_are_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 32).to(dtype), torch.randn(64, 32).to(dtype)
    whole, eps = x.T @ y, coarsest_eps([dtype])
    parts = sum((a.T @ b for a, b in zip(x.split(8), y.split(8), strict=True)), torch.zeros(32, 32, dtype=dtype))
    lost = x[8:].T @ y[8:]
    assert not gradients(("w", parts, whole), eps=eps)
    assert gradients(("w", lost, whole), eps=eps)[0].startswith("w differs by ")
    assert not values(parts, whole, eps)
    assert values(lost, whole, eps)


def test_a_gradient_that_cancels_is_judged_by_the_norm_of_all() -> None:
    large, noise = torch.ones(100), torch.full((4,), 1e-7)
    assert not gradients(("w", large, large), ("b", noise, -noise))
    assert gradients(("b", noise, -noise)) == ["b differs by 2.0e+00 of its norm"]
    assert gradients(("w", large, large), ("b", 1e3 * noise, -1e3 * noise))


def test_gradients_that_all_cancel_are_judged_by_the_loss() -> None:
    noise = torch.full((4,), 1e-9)
    for scale, is_fault in ((1.0, False), (1e-6, True), (NAN, True)):
        comparison = Comparison(2.0**-23)
        comparison.compare_gradients([("w", noise, -noise)], lambda s=scale: s)
        assert bool(comparison.faults) == is_fault


def test_a_gradient_on_one_side_only_is_a_difference() -> None:
    one = torch.ones(2)
    assert not gradients(("w", None, None), ("b", one, one))
    assert gradients(("w", None, one)) == ["w is missing"]
    assert gradients(("w", torch.zeros(2), None)) == ["w is one where python has none"]


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_the_same_special_values_are_equal(special: float) -> None:
    one, other = torch.tensor([special, 1.0]), torch.tensor([2.0, 1.0])
    assert not values(one, one.clone())
    assert not gradients(("w", one, one.clone()))
    assert values(one, other)
    assert values(other, one)
    assert gradients(("w", one, other))
    assert gradients(("w", other, one))
    assert values(torch.tensor([special, 1.0]), torch.tensor([special, 1.1]))


def test_masked_values_hide_no_difference() -> None:
    masked = torch.tensor([-1e30, -1e30, 0.5, 0.25])
    assert values(masked + torch.tensor([0.0, 0.0, 0.01, 0.0]), masked)


def test_a_loss_whose_terms_cancel_is_judged_by_its_sensitivity() -> None:
    for found, sensitivity, is_fault in ((1e-7, 10.0, False), (1e-7, 1e-6, True), (0.5, 10.0, True)):
        comparison = Comparison(2.0**-23)
        comparison.compare_loss(torch.tensor(found), torch.tensor(1e-9), lambda s=sensitivity: s)
        assert bool(comparison.faults) == is_fault
    comparison = Comparison(2.0**-23)
    comparison.compare_loss(torch.tensor(NAN), torch.tensor(NAN), lambda: NAN)
    assert not comparison.faults
    comparison.compare_loss(torch.tensor(NAN), torch.tensor(1.0), lambda: NAN)
    assert comparison.faults


def test_integers_may_break_a_tie() -> None:
    classes = torch.arange(5000)
    broken = classes.clone()
    broken[:5] += 1
    assert not values(broken, classes)
    assert values(classes + 1, classes) == ["it differs in 5000 of 5000 elements"]
    assert not values(torch.tensor(11), torch.tensor(10))
    assert values(torch.tensor(13), torch.tensor(10))


def test_shapes_and_dtypes_count() -> None:
    one = torch.ones(2)
    assert values(one, torch.ones(3)) == ["it is of shape [2], not [3]"]
    assert values(one, one.double()) == ["it is torch.float32, not torch.float64"]
    assert not gradients(("w", one.to_sparse(), one.to_sparse()))
