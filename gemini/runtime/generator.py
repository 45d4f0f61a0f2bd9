"""The state of torch's generator as bytes: it travels with every call, so that random numbers are the program's own."""

from __future__ import annotations

import torch


def get_state() -> bytes:
    """The state of the generator of this process."""
    state: bytes = torch.get_rng_state().numpy().tobytes()
    return state


def set_state(state: bytes) -> None:
    """Put the generator of this process in a state."""
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
