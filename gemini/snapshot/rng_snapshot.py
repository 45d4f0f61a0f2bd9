"""Generator states: those of torch, Python and NumPy, saved, restored and compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class HostGenerators:
    """The states of Python's and NumPy's generators."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def restore(self) -> None:
        """Restore the states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class GeneratorStates(HostGenerators):
    """The states of torch's, Python's and NumPy's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        """Restore the states."""
        super().restore()
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore all generator states at the end of the block."""
    generators = GeneratorStates()
    try:
        yield
    finally:
        generators.restore()


def seed_all(seed: int) -> None:
    """Seed torch's, Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def host_rng_fingerprint() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators, comparable."""
    numpy = np.random.get_state(legacy=True)
    return (random.getstate(), numpy[1].tobytes(), numpy[2:])  # type: ignore[index]


def torch_rng_fingerprint() -> tuple[Any, ...]:
    """The states of torch's generators, comparable."""
    devices = torch.cuda.default_generators if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    return (torch.get_rng_state().numpy().tobytes(), *(generator.get_offset() for generator in devices))
