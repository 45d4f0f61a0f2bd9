"""Shortage: a worker has no memory left for what the program's own process may have room for."""

from __future__ import annotations

import re

from gemini.profiling.measured_device import is_out_of_memory
from gemini.runtime.devices.host_memory import available_memory, format_bytes
from gemini.runtime.pool.worker_failure import LESS_MEMORY

_AMOUNT = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)


def describe_out_of_memory(error: BaseException) -> str:
    """Where memory ran out, how much was missing, and what to change; '' where the error says something else."""
    if not is_out_of_memory(error):
        return ""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in worker")]
    place = notes[0].partition(", at ")[0].partition(";")[0] if notes else "in a worker"
    found = _AMOUNT.search(str(error))
    left = (
        available_memory() if found and found[2].lower() == "bytes" else None
    )  # devices say by themselves what they have
    free = f", {format_bytes(left[0])} {left[1]} can" if left is not None else ""
    return f"out of memory {place}: {_text(*found.groups()) if found else 'more'} could not be had{free}; {LESS_MEMORY}"


def _text(number: str, unit: str) -> str:
    return format_bytes(float(number)) if unit.lower() == "bytes" else f"{number} {unit}"
