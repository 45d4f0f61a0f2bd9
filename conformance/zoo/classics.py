"""Classic models written for the purpose: each holds one thing that is easy to get wrong."""

from __future__ import annotations

from conformance.zoo import classics_flow, classics_layers, classics_sequences, classics_values  # noqa: F401 - they register
from conformance.zoo.registry import CLASSICS

__all__ = ["CLASSICS"]
