"""Worker failure: how a worker ended, what it held, whether memory ran out, and what to change."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.cache_files import evict_oldest
from gemini.profiling.measured_device import is_out_of_memory
from gemini.runtime.devices import host_memory

LESS_MEMORY = "smaller batches, a larger --accum-degree or more workers need less memory"
OUT_OF_MEMORY = "out of memory"
STACKS = "; its stacks:"
_KEPT = 3  # files with stacks
_AMOUNT = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)


def describe_exit(code: int) -> str:
    """Describe how a process ended, by its exit code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def describe_contents(contents: Mapping[str, str]) -> str:
    """Describe what a worker holds of the models."""
    return " and ".join(contents.values())


def describe_held(contents: Mapping[str, str]) -> str:
    """Return a clause about what a worker holds of the models."""
    return f"it held {describe_contents(contents)}" if contents else "it held nothing yet"


def save_stacks(folder: Path, text: str) -> Path:
    """Write stacks to a file of a folder of failures, which has the last ones only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"worker-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    write_whole(path, f"{text.rstrip()}\n")
    evict_oldest(folder, _KEPT, "worker-*.txt")
    return path


def explain_kill(contents: Mapping[str, str], kills: Sequence[int]) -> tuple[str, str]:
    """Return the facts about a local worker that SIGKILL ended, and a remedy.

    `kills`: the kernel's counters when the worker started.
    """
    known = [describe_held(contents)]
    if peak := host_memory.peak_child_memory():
        known.append(f"{host_memory.format_bytes(peak)} of memory at its peak")
    now = host_memory.count_oom_kills()
    ran_out = any(after > before for after, before in zip(now, kills))
    facts = [", ".join(known)]
    if ran_out:
        facts.append("the kernel has killed a process for lack of memory since it started")
    elif now:
        facts.append("the kernel has killed no process for lack of memory since it started")
    facts += _describe_available()
    remedy = LESS_MEMORY if ran_out else f"find out who sent the signal; if it was a memory limit, {LESS_MEMORY}"
    return "; ".join(facts), remedy


def explain_failure(trace: str, contents: Mapping[str, str]) -> tuple[str, str]:
    """Return the facts about a worker in which Gemini's own code failed, from its traceback, and a remedy."""
    last_line = trace.splitlines()[-1]
    if "MemoryError" not in last_line and "Cannot allocate memory" not in last_line:
        facts = f"{last_line}; {describe_held(contents)}"
        return facts, "without --strict the script continues in its own process; please report this"
    return "; ".join([f"{OUT_OF_MEMORY}: {last_line}", describe_held(contents), *_describe_available()]), LESS_MEMORY


def _describe_available() -> list[str]:
    left = host_memory.available_memory()
    return [] if left is None else [f"{host_memory.format_bytes(left[0])} {left[1]} available now"]


def describe_out_of_memory(error: BaseException) -> str:
    """Describe where memory ran out, how much was missing, and a remedy; '' for other errors."""
    if not is_out_of_memory(error):
        return ""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in worker")]
    place = notes[0].partition(", at ")[0].partition(";")[0] if notes else "in a worker"
    found = _AMOUNT.search(str(error))
    left = (
        host_memory.available_memory() if found and found[2].lower() == "bytes" else None
    )  # devices report what they have
    free = f", {host_memory.format_bytes(left[0])} {left[1]} available" if left is not None else ""
    size = _format_request(*found.groups()) if found else "more"
    return f"{OUT_OF_MEMORY} {place}: {size} could not be allocated{free}; {LESS_MEMORY}"


def _format_request(number: str, unit: str) -> str:
    return host_memory.format_bytes(float(number)) if unit.lower() == "bytes" else f"{number} {unit}"
