"""The budget: how long profiling may go on, in whole steps of the model.

A profile is made once and a training runs for thousands of steps; still, nobody waits for it gladly. The budget says
whether one more round is worth it; the rounds that a profile cannot do without are not asked for.
"""

from __future__ import annotations

from gemini.profiling.measured_device import Device

STEPS = 8.0
NOISY_STEPS = 9.0  # where readings differ much
LEAST_MS = 50.0  # where a step takes next to nothing


class Budget:
    """The time from its making, on the clock of a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.begin = self.round = device.now_ms()
        self.step_ms = 0.0  # as far as known

    def begin_round(self) -> None:
        """A round starts."""
        self.round = self.device.now_ms()

    def allows_round(self, noisy: bool) -> bool:
        """Whether one more like the last fits; always where no step was timed, as no limit is known."""
        now = self.device.now_ms()
        limit = max(LEAST_MS, (NOISY_STEPS if noisy else STEPS) * self.step_ms)
        return not self.step_ms or now - self.begin + (now - self.round) <= limit
