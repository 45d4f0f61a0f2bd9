"""Ray supervisor: the actor that supervises one worker on its host, created by `gemini.runtime.hosts.ray_driver`."""

from __future__ import annotations

import os
from typing import Any

from gemini.runtime.hosts.host_supervisor import HostSupervisor


class RaySupervisor:
    """A host supervisor in an actor of Ray."""

    def __init__(self, address: str) -> None:
        self._supervisor = HostSupervisor(address, lambda: os._exit(0))

    def answer(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer one request of the controller."""
        return self._supervisor.answer(method, **given)
