"""The time budget allows timing rounds while one more fits, measured in steps of the model."""

from __future__ import annotations

import pytest

from gemini.profiling.cpu_device import CpuDevice
from gemini.profiling.timing_rounds import LEAST_MS, NOISY_STEPS, STEPS, TimeBudget


class Told(CpuDevice):
    """A device whose clock is set by hand."""

    at = 0.0

    def now_ms(self):
        return self.at


@pytest.mark.parametrize(("noisy", "steps"), [(False, STEPS), (True, NOISY_STEPS)])
def test_a_round_is_allowed_where_one_like_the_last_still_fits(noisy, steps):
    device = Told()
    budget = TimeBudget(device)
    budget.step_ms = 1000.0
    rounds = 0
    while budget.allows_round(noisy):
        budget.begin_round()
        device.at += 2000.0
        rounds += 1
    assert rounds == int(steps * 1000.0 // 2000.0)
    assert device.at <= steps * 1000.0


def test_without_a_step_there_is_no_limit_and_quick_steps_have_a_least_one():
    device = Told()
    budget = TimeBudget(device)
    device.at = 1e9
    assert budget.allows_round(noisy=False)
    budget, budget.step_ms = TimeBudget(device), 0.001
    device.at += LEAST_MS / 4
    assert budget.allows_round(noisy=False)
    device.at += LEAST_MS
    assert not budget.allows_round(noisy=False)
