"""A library function that memoizes sizes, as einops does."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(64)
def _lengths(samples: int, axes: int) -> tuple[int, ...]:
    return (samples, *[-1] * axes)


def repeated(token: torch.Tensor, samples: int) -> torch.Tensor:
    """A tensor for every sample."""
    return token.expand(_lengths(samples, token.dim() - 1))
