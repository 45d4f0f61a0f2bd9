"""Global torch settings that a program changes while training apply to deferred calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemini.capture import torch_flags
from gemini.ir.call_binding import ModelCall
from gemini.runtime.deferred.call_context import CallContext
from gemini.runtime.pipelined.call_signature import exact_key, quick_key


def turn(*, on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    torch.set_default_dtype(torch.float64 if on else torch.float32)
    torch.set_anomaly_enabled(on)
    torch.set_flush_denormal(on)


def test_a_step_that_is_put_off_has_those_of_its_call_and_of_its_backward():
    work: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), modules=[], is_call_output=lambda _: False)
    plain = CallContext(work)
    turn(on=True)
    try:
        turned, now = CallContext(work), torch_flags.current_flags()
        with plain.restore(0):
            assert torch.get_default_dtype() is torch.float32
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.is_anomaly_enabled()
        assert torch_flags.current_flags() == now
    finally:
        turn(on=False)
    with turned.restore(0):
        assert torch.get_default_dtype() is torch.float64
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("kind_of", [exact_key, quick_key])
def test_calls_with_other_switches_are_of_another_kind(kind_of: Callable[[ModelCall], object]):
    call = ModelCall((torch.ones(2),), {})
    before = kind_of(call)
    turn(on=True)
    try:
        assert kind_of(call) != before
    finally:
        turn(on=False)
    assert kind_of(call) == before


@pytest.mark.parametrize("kind_of", [exact_key, quick_key])
def test_so_are_calls_in_which_other_warnings_are_errors(kind_of: Callable[[ModelCall], object]):
    call = ModelCall((torch.ones(2),), {})
    before = kind_of(call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (strict := kind_of(call)) != before
        warnings.filterwarnings("ignore", "of the model")
        assert kind_of(call) not in (before, strict)
    assert kind_of(call) == before
