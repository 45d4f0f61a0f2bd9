"""Pipeline schedules as data: composed, proven, drawn and exported. Imports no deep-learning framework."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini.schedule.block import Action, Block
    from gemini.schedule.composer import Composer
    from gemini.schedule.link_costs import Links
    from gemini.schedule.placements import placement
    from gemini.schedule.schedplan import Pattern, Proof, SchedPlan

__all__ = ["Action", "Block", "Composer", "Links", "Pattern", "Proof", "SchedPlan", "placement"]

_MODULES = {
    "Action": "block", "Block": "block", "Composer": "composer", "Links": "link_costs", "placement": "placements",
    "Pattern": "schedplan", "Proof": "schedplan", "SchedPlan": "schedplan",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first access: workers need blocks, and never search for schedules."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
