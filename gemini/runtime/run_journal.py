"""Run journal: which path the steps of each model took, and what blocked a faster one.

Paths (`CallPath`), the fastest first:

    overlapped            by a plan: micro-batches run in the workers at the same time
    single micro-batch    by a plan, the batch as one micro-batch: only weight gradients overlap
    eager dispatch        the forward runs in the controller, its remote modules in the workers, one batch at a time
    local                 in the process of the script

Written when the process ends, also by `os._exit`, and periodically for processes that are killed. `gemini explain` and
`gemini report` read the newest of

    RUN_FOLDER/explain-PID.json      of each process that used workers
    CACHE/runs/KEY.json              of the last process that used none: it makes no run folder

RUN_FOLDER/plans/PID-N.json has the plan and measured steps of model N (`gemini.runtime.pipelined.plan_record`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from gemini.atomic_files import write_whole
from gemini.cache_files import cache_folder, evict_oldest, hash_facts, software_versions
from gemini.errors import ArtifactError
from gemini.log import log_line
from gemini.runtime.call_outcome import CallPath, FallbackReason
from gemini.runtime.step_history import StepHistory
from gemini.schedule.block import LETTERS

FORMAT = 5
_KEPT = 20  # files of earlier runs
_KEPT_LOCAL = 200  # run folders whose last run without workers is recorded
_EVERY = 2.0  # seconds between two writes, after the first calls
_SHARE = 0.25  # and this share of the time since the first: a write adds less the longer a run is
_FIRST = (1, 2, 4, 8, 16, 32, 64)
_RENEWED = 16  # calls after which plans are described anew, and again at four times as many
_NAMED = 3  # modules in a line
_ACTIONS = {*LETTERS, *LETTERS.values()}  # kinds of events that are no waits
_TIMED = 15  # steps whose durations are retained


@dataclass
class ModelJournal:
    """The steps of one model in one run."""

    model: str
    workers: int
    plan: str = ""  # stages and schedule, where there is one
    choice: list[str] = field(default_factory=list)  # the configuration that auto chose, and the others it compared
    verification: str = ""  # steps that were compared with this process, and their differences
    steps: dict[str, int] = field(default_factory=dict)  # calls by path
    reasons: dict[str, int] = field(default_factory=dict)  # "path: reason" of calls on a slower path, and how many
    modules: dict[str, list[str]] = field(default_factory=dict)  # that run in the process of the script, by reason
    traces: list[str] = field(default_factory=list)
    last_ms: list[float] = field(default_factory=list)  # durations of the last steps by that plan
    local_ms: float = 0.0  # a step in the process of the script, where it was measured
    other_sizes: int = 0  # steps by a plan whose tensors had other sizes than those of the first one
    verified: list[tuple[int, float, float]] = field(default_factory=list)  # call, differences of loss and gradients
    settings: dict[str, Any] = field(default_factory=dict)  # that are not the defaults
    places: dict[str, str] = field(default_factory=dict)  # file and line that made the model, and its optimizer
    sites: dict[str, tuple[str, float]] = field(default_factory=dict)  # file and line → kind, ms in the last such step
    record_file: str = ""  # of the plan and its measured steps, relative to the run folder
    history: StepHistory = field(default_factory=StepHistory)
    on_record: ClassVar[Any] = None  # called after each record
    peaks_mb: ClassVar[tuple[float, ...]] = ()  # peak memory of each worker, where it was measured
    _sizes: ClassVar[Any] = None  # of the tensors of the first step by a plan
    _last_step: ClassVar[Any] = None  # the actions of the last step, and the number of its workers
    _describe_plan: ClassVar[Any] = None  # a weak reference to the method that describes the plan

    def record(self, path: str, reason: str = "") -> None:
        """Count a call by its path; `reason`: why no faster one."""
        self.steps[path] = self.steps.get(path, 0) + 1
        if reason:
            line = f"{CallPath(path).label}: {reason}"
            self.reasons[line] = self.reasons.get(line, 0) + 1
        self.history.record(path, reason)
        if self.on_record is not None:
            self.on_record()

    def record_module(self, module: str, reason: str) -> None:
        """Record why a module of the model runs in the process of the script by eager dispatch."""
        names = self.modules.setdefault(reason.partition("\n")[0], [])
        if module not in names:
            names.append(module)

    def describe_plan_by(self, describe_plan: Callable[[], str]) -> None:
        """Set the method that describes the plan, more precisely the more steps have run."""
        vars(self)["_describe_plan"] = weakref.WeakMethod(describe_plan)

    def refresh_plan(self) -> None:
        """Describe the plan as it is now."""
        describe_plan = self._describe_plan and self._describe_plan()
        self.plan = (describe_plan and describe_plan()) or self.plan

    def record_time(self, step_ms: float) -> None:
        """Record the duration of a step by the plan."""
        self.history.record_time(step_ms)
        self.last_ms.append(step_ms)
        del self.last_ms[:-_TIMED]

    def record_sizes(self, sizes: Sequence[Any]) -> None:
        """Count a step that has other sizes than the first one."""
        vars(self).setdefault("_sizes", sizes)
        self.other_sizes += sizes != self._sizes

    def record_site(self, kind: str, site: str, took_ms: float) -> None:
        """Record the time at a line of the script; one line per kind, the latest."""
        self.sites = {place: entry for place, entry in self.sites.items() if entry[0] != kind and place != site}
        if site:
            self.sites[site] = kind, round(took_ms, 3)

    def observe_step(self, events: Sequence[Any], workers: int, peaks_mb: tuple[float, ...]) -> None:
        """Retain the last step for `idle_share`."""
        vars(self)["_last_step"], vars(self)["peaks_mb"] = (events, workers), peaks_mb

    @property
    def idle_share(self) -> float | None:
        """The share of the last step, from its first action to its last, in which workers were idle."""
        events, workers = self._last_step or ((), 0)
        actions = [one for one in events if one.kind in _ACTIONS]
        if not actions:
            return None
        span = max(one.end for one in actions) - min(one.begin for one in actions)
        return 1 - sum(one.end - one.begin for one in actions) / (span * workers) if span > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**plain, "history": self.history.to_json()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ModelJournal:
        """Build the journal of a model from plain data."""
        found = {entry.name: data[entry.name] for entry in fields(ModelJournal)}
        return ModelJournal(**{**found, "history": StepHistory.from_json(data["history"])})

    @property
    def step_ms(self) -> float:
        """The median duration of the last steps by the plan; 0 where there are none."""
        return statistics.median(self.last_ms) if self.last_ms else 0.0

    @property
    def sizes_differ(self) -> bool:
        """Whether many steps had other sizes: the usual duration does not compare with that of the first call."""
        return 4 * self.other_sizes > sum(self.steps.values())

    @property
    def gain(self) -> float:
        """How many times faster steps are than in the process of the script; 0 where that was not measured."""
        return self.local_ms / self.step_ms if self.step_ms and not self.sizes_differ else 0.0

    @property
    def main_reason(self) -> str:
        """The most frequent reason for a slower path, other than first calls; '' where there is none."""
        ranked = [line.partition(": ")[2] for line, _ in Counter(self.reasons).most_common()]
        first = (FallbackReason.FIRST_OF_SIZE, FallbackReason.FIRST_CALL)
        return next((one for one in ranked if one not in first), ranked[0] if ranked else "")

    def _measured(self) -> str:
        if not self.last_ms:
            return ""
        return f"; {self.step_ms:.0f} ms measured (median of the last {len(self.last_ms)})"

    def __str__(self) -> str:
        taken = ", ".join(f"{self.steps[path]} {path.label}" for path in CallPath if self.steps.get(path)) or "no calls"
        where = f"on {self.workers} workers: {taken}" if self.workers else "in the process of the script"
        lines = [f"{self.model} {where}"]
        if self.places:
            lines.append("  made at " + ", ".join(f"{place} ({kind})" for kind, place in self.places.items()))
        if self.plan:
            lines.append(f"  plan: {self.plan}{self._measured()}")
        if self.choice:
            lines.append(f"  chosen: {self.choice[0]}")
            lines += [f"    not {line}" for line in self.choice[1:]]
        if self.verification:
            lines.append(f"  verified: {self.verification}")
        lines += [f"  {count} × {line}" for line, count in Counter(self.reasons).most_common()]
        for reason, names in self.modules.items():
            named = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
            lines.append(f"  {len(names)} × local module: {reason} ({named})")
        lines += [f"  trace: {path}" for path in self.traces]
        return "\n".join(lines)


class RunJournal:
    """The models of a process. Written at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, os.getpid()
        self.models: list[ModelJournal] = []
        self.program = _describe_program()
        self.quiet = False
        self._calls, self._began, self._due = 0, time.monotonic(), 0.0  # time of the next write
        self._renewed = _RENEWED  # number of calls at which plans are described anew
        atexit.register(self._end)

    def add_model(self, model: str, workers: int) -> ModelJournal:
        """Add a model."""
        made = ModelJournal(model, workers)
        vars(made)["on_record"] = self._on_record
        self.models.append(made)
        return made

    def record_local(self, model: str, reason: str) -> None:
        """Record that a model runs in the process of the script; its calls are not counted."""
        self.models.append(ModelJournal(model, 0, reasons={f"{CallPath.LOCAL.label}: {reason}": 1}))

    def write(self) -> Path:
        """Write the journal as it is now."""
        uses_workers = any(model.workers for model in self.models)
        path = self.folder / f"explain-{self.owner}.json" if uses_workers else _local_file(self.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        models = [model.to_json() for model in self.models]
        program = {**self.program, "versions": software_versions() if "torch" in sys.modules else {}}
        content = {"format": FORMAT, "time": time.time(), "program": program, "models": models}
        write_whole(path, json.dumps(content, indent=1) + "\n", sync=uses_workers)
        if uses_workers:
            evict_oldest(self.folder, _KEPT, "explain-*.json")
            evict_oldest(self.folder / "plans", _KEPT)
        else:
            evict_oldest(path.parent, _KEPT_LOCAL)
        return path

    def _on_record(self) -> None:
        """Write the journal after a call, unless that was done recently."""
        now = time.monotonic()
        self._calls += 1
        if now >= self._due or self._calls in _FIRST:
            # Describing plans takes some milliseconds: the schedule is simulated with measured times
            renews = self._calls >= self._renewed
            self._renewed = 4 * self._calls if renews else self._renewed
            self._end(renews=renews)
            cost = time.monotonic() - now
            # at most half a percent, also on a slow disk
            self._due = now + max(_EVERY, _SHARE * (now - self._began), 200 * cost)

    def _end(self, *, renews: bool = True) -> None:
        if os.getpid() == self.owner and any(model.steps or model.reasons for model in self.models):
            try:
                for model in self.models if renews else ():
                    model.refresh_plan()
                self.write()
            except (ArtifactError, OSError, RuntimeError) as error:  # a full disk, or no home, must not fail the run
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        """Log one line, once."""
        if not self.quiet:
            reason = str(error).partition("\n")[0]
            with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
                log_line(f"gemini: {reason}: gemini explain will not show this run")
        self.quiet = True


def _describe_program() -> dict[str, Any]:
    """Return how the program of this process was started."""
    main = sys.modules.get("__main__")
    try:
        folder = os.getcwd()
    except OSError:  # removed
        folder = ""
    spec = getattr(main, "__spec__", None)
    return {
        "file": getattr(main, "__file__", None) or "",
        "module": getattr(spec, "name", "") or "",
        "arguments": sys.argv[1:],
        "folder": folder,
        "python": sys.version.partition(" ")[0],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "began": time.time(),
    }


_journals: dict[tuple[int, Path], RunJournal] = {}


def _before_exit(leave: Callable[[int], Any]) -> Callable[[int], Any]:
    """Wrap `os._exit`, which runs no exit handlers: the journals are written first."""

    def _exit(status: int) -> Any:
        with contextlib.suppress(Exception):
            for journal in list(_journals.values()):
                journal._end()
        return leave(status)

    _exit.__doc__ = leave.__doc__
    return _exit


def get_journal(folder: Path, quiet: bool = False) -> RunJournal:
    """Return the journal of this process in a run folder; failed writes log one line unless `quiet`."""
    key = os.getpid(), folder
    if not _journals:
        os._exit = _before_exit(os._exit)  # type: ignore[assignment]
    if key not in _journals:
        _journals[key] = RunJournal(folder)
        _journals[key].quiet = quiet
    return _journals[key]


def journaled_models() -> list[ModelJournal]:
    """Return the models of this process that have workers."""
    mine = [journal for (owner, _), journal in _journals.items() if owner == os.getpid()]
    return [model for journal in mine for model in journal.models if model.workers]


def record_idle_run(folder: Path) -> None:
    """Write an empty journal if this process has no other and there are journals of earlier runs in `folder`.

    Otherwise `gemini explain` would report an earlier run as the last one.
    """
    journal = _journals.get((os.getpid(), folder))
    if not (journal and journal.models) and journal_files(folder):
        with contextlib.suppress(ArtifactError, OSError):
            (journal or RunJournal(folder)).write()


def journal_files(folder: Path) -> list[Path]:
    """Return the journals of a run folder, the newest first."""
    local = _local_file(folder)
    found = [(path.stat().st_mtime_ns, path) for path in (*folder.glob("explain-*.json"), local) if path.is_file()]
    return [path for _, path in sorted(found, reverse=True)]


def _local_file(folder: Path) -> Path:
    """Return the file of the last run without workers."""
    runs = cache_folder("runs")
    assert runs is not None
    return runs / f"{hash_facts([str(folder.resolve())])}.json"
