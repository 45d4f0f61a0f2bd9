"""Trial runs: the best configurations of a search run for real, and their readings correct the predictions.

predicted   1.00  1.10  1.15        measured   1.20  1.25
factor      1.20  1.14  ►   ranked again: measured where it ran, else predicted × factor
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemini.tune.run_settings import write_run_config
from gemini.tune.step_simulation import StepResult
from gemini.tune.tuning_result import TuningResult

_POLL = 0.25
_WARM = 2  # steps that plan, start and warm up


@dataclass(frozen=True)
class TrialTarget:
    """What runs: a script with arguments, or `module:function`."""

    target: str
    arguments: tuple[str, ...] = ()
    steps: int = 6
    timeout: float = 180.0

    @property
    def is_script(self) -> bool:
        """Whether the target is a script."""
        return ":" not in self.target

    def measure(self, result: StepResult) -> tuple[float | None, str]:
        """Return the seconds of a step under a configuration, or None and why it did not run."""
        with tempfile.TemporaryDirectory(prefix="gemini-tune-") as folder:
            config = write_run_config(result, Path(folder) / "gemini.json")
            out = Path(folder) / "times.json"
            command = self._command(result, config, out, Path(folder))
            error = Path(folder) / "error.txt"
            with error.open("wb") as stream:
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, start_new_session=True)
                try:
                    seconds = self._wait(process, out, Path(folder))
                finally:
                    _end(process)
            if seconds is not None:
                return seconds, ""
            lines = error.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return None, lines[-1] if lines else "it ended before enough steps"

    def _command(self, result: StepResult, config: Path, out: Path, folder: Path) -> list[str]:
        if self.is_script and result.config.devices == 1:  # the baseline: the script under plain python
            worker = [sys.executable, "-m", "gemini.cli.tune_worker", "steps", str(out), str(self.steps + _WARM)]
            return [*worker, self.target, *self.arguments]
        if self.is_script:
            worker = [sys.executable, "-m", "gemini.cli.tune_worker", "script", "--config", str(config)]
            return [*worker, "--run-folder", str(folder), self.target, *self.arguments]
        worker = [sys.executable, "-m", "gemini.cli.tune_worker", "trial", str(out), str(config)]
        return [*worker, str(self.steps + _WARM), self.target]

    def _wait(self, process: subprocess.Popen[bytes], out: Path, folder: Path) -> float | None:
        end = time.monotonic() + self.timeout
        while True:
            ended = process.poll() is not None
            times = _written_times(out) or (_script_times(folder) if self.is_script else ())
            if len(times) >= self.steps + _WARM or (ended and len(times) > _WARM):
                return statistics.median(times[_WARM:])
            if ended or time.monotonic() > end:
                return None
            time.sleep(_POLL)


def run_trials(result: TuningResult, target: TrialTarget, count: int) -> TuningResult:
    """Run the best few, and rank again by what was measured."""
    measured: dict[str, float] = {}
    notes: list[str] = []
    failed: set[str] = set()
    factors: dict[int, list[float]] = {}  # by number of devices
    try:
        for one in choose_trials(result.ranked, count):
            seconds, why = target.measure(one)
            if seconds is None:
                notes.append(f"did not run, and is left out: {one.config.label()}: {why}")
                failed.add(one.config.label())
                continue
            measured[one.config.label()] = seconds
            factors.setdefault(one.config.devices, []).append(seconds / one.seconds)
    except KeyboardInterrupt:
        notes.append("interrupted: the readings so far")
    if not measured:
        return replace(result, notes=(*result.notes, *notes))
    able = [one for one in result.ranked if one.config.label() not in failed]
    every = statistics.fmean(factor for group in factors.values() for factor in group)
    mean = {devices: statistics.fmean(group) for devices, group in factors.items()}
    scale = {one.config.label(): mean.get(one.config.devices, every) for one in able}
    ranked = sorted(able, key=lambda one: measured.get(one.config.label(), one.seconds * scale[one.config.label()]))
    listed = ", ".join(f"{factor:.2f} times on {devices}" for devices, factor in sorted(mean.items()))
    notes.append(f"measured steps take {listed} of the predicted time; the others are ranked with these factors")
    return replace(result, ranked=tuple(ranked), measured=measured, notes=(*result.notes, *notes))


def choose_trials(ranked: Sequence[StepResult], count: int) -> list[StepResult]:
    """Return the best of every number of devices, then the next best: predictions err most between these."""
    first: dict[int, StepResult] = {}
    for one in ranked:
        first.setdefault(one.config.devices, one)
    chosen = list(first.values())
    chosen += [one for one in ranked if one not in chosen]
    return chosen[:count]


def _written_times(path: Path) -> Sequence[float]:
    with contextlib.suppress(OSError, ValueError):
        return [float(one) for one in json.loads(path.read_text(encoding="utf-8"))]
    return ()


def _script_times(folder: Path) -> Sequence[float]:
    """Return the durations of steps in the journal of a run."""
    from gemini.runtime.run_journal import journal_files

    for path in journal_files(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            models = json.loads(path.read_text(encoding="utf-8"))["models"]
            timed = max((model.get("last_ms", ()) for model in models), key=len, default=())
            return [0.0] * _WARM + [one / 1e3 for one in timed]  # the journal times steps by the plan only
    return ()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a trial with its workers, which are in its session."""
    if process.poll() is None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
                return
