"""The end of a worker in words: what ended it, what it held, whether memory had run out, and what to change."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from gemini.profiling.measured_device import is_out_of_memory
from gemini.runtime.devices import host_memory

LESS_MEMORY = "smaller batches, a larger --accum-degree or more workers need less memory"
_AMOUNT = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def describe_contents(holds: Mapping[str, str]) -> str:
    """What a worker has of the program's models."""
    return " and ".join(holds.values())


def explain_kill(holds: Mapping[str, str], kills: Sequence[int]) -> tuple[str, str]:
    """What is known of a worker of this machine that SIGKILL has ended, and what to do.

    `kills`: what the kernel had counted when the worker started.
    """
    known = [f"it held {describe_contents(holds)}" if holds else "it held nothing yet"]
    if peak := host_memory.peak_child_memory():
        known.append(f"{host_memory.format_bytes(peak)} of memory at the most")
    now = host_memory.count_oom_kills()
    ran_out = any(after > before for after, before in zip(now, kills))
    facts = [", ".join(known)]
    if ran_out:
        facts.append("the kernel has ended a process for want of memory since it started")
    elif now:
        facts.append("the kernel counts no process that it has ended for want of memory since then")
    facts += _left()
    remedy = LESS_MEMORY if ran_out else f"see who has sent the signal; if it was a limit of memory, {LESS_MEMORY}"
    return "; ".join(facts), remedy


def explain_failure(trace: str, holds: Mapping[str, str]) -> tuple[str, str]:
    """What is known of a worker in which code of ours has failed, by its traceback, and what to do."""
    said = trace.splitlines()[-1]
    if "MemoryError" not in said and "Cannot allocate memory" not in said:
        return said, "without --strict the program goes on in its own process; please report this"
    held = f"it held {describe_contents(holds)}" if holds else "it held nothing yet"
    return "; ".join([f"out of memory: {said}", held, *_left()]), LESS_MEMORY


def _left() -> list[str]:
    left = host_memory.available_memory()
    return [] if left is None else [f"{host_memory.format_bytes(left[0])} {left[1]} can be had now"]


def describe_out_of_memory(error: BaseException) -> str:
    """Where memory ran out, how much was missing, and what to change; '' where the error says something else."""
    if not is_out_of_memory(error):
        return ""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in worker")]
    place = notes[0].partition(", at ")[0].partition(";")[0] if notes else "in a worker"
    found = _AMOUNT.search(str(error))
    left = (
        host_memory.available_memory() if found and found[2].lower() == "bytes" else None
    )  # devices say by themselves what they have
    free = f", {host_memory.format_bytes(left[0])} {left[1]} can" if left is not None else ""
    return f"out of memory {place}: {_requested(*found.groups()) if found else 'more'} could not be had{free}; {LESS_MEMORY}"


def _requested(number: str, unit: str) -> str:
    return host_memory.format_bytes(float(number)) if unit.lower() == "bytes" else f"{number} {unit}"
