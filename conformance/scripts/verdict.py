"""The verdict on one program: does `gemini_python` do what `python` does, and by which path."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from conformance.scripts import comparison as comparing
from conformance.scripts import runner as running
from conformance.scripts import strictness
from conformance.scripts.registry import Program
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.run_journal import ModelJournal

_SEEDS = range(1, 6)  # of other last bits
_STEPS = 10  # of a chaotic program, that are held to the strict limit
_WARMING = "the first call"  # what a plan is made from; every model has it


@dataclass
class Verdict:
    """What was found; `faults` is empty where all is as under `python`."""

    name: str
    faults: list[str] = field(default_factory=list)
    path: str = CallPath.LOCAL
    reason: str = ""
    steps: dict[str, int] = field(default_factory=dict)
    printed: str = ""  # the strictest limit that all printed numbers meet (`strictness`) …
    saved: str = ""  # … and all saved tensors; "" where none are
    strict: list[str] = field(default_factory=list)  # what meets no stricter one
    noise: float = 0.0  # largest deviation of a printed number between runs under python
    deviation: float = 0.0  # … and between python and gemini_python
    seconds: tuple[float, float] = (0.0, 0.0)
    said: str = ""


class Judge:
    """Runs a program and compares. The noise of `python` is measured where a deviation asks for it, or `always`.

    `strict`: the strictest limit is told, by runs in children of this process (`forking`); `quick`: what is compared
    with is run so, too.
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        always: bool = False,
        references_at: Path | None = None,
        *,
        strict: bool = False,
        quick: bool = False,
    ) -> None:
        self.program, self.folder, self.always, self.strict = program, folder, always, strict
        self.references_at = references_at or folder
        self._noisy = running.forked if strict else running.plain
        self._plain = running.forked if quick else running.plain

    @cached_property
    def reference(self) -> running.Outcome:
        """Under `python` with one thread."""
        return self._kept("python", self._plain)

    @cached_property
    def threads(self) -> running.Outcome:
        """Under `python` with two threads."""
        return self._kept("threads", self._noisy, threads=2)

    def bits(self, seed: int) -> running.Outcome:
        """Under `python`, weights and gradients with other last bits."""
        return self._kept(f"bits{seed}", self._noisy, moved=seed)

    @cached_property
    def references(self) -> list[running.Outcome]:
        """All that noise is known by; the last with kernels that add in another order."""
        return [self.threads, self.bits(1), self._kept("kernels", running.plain, kernels="default")]

    def _kept(self, name: str, run: Callable[..., running.Outcome], **how: Any) -> running.Outcome:
        """A run under `python`; one that is there already is not made again."""
        folder = self.references_at / name
        if (found := running.read(folder)) is not None:
            return found
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was ended has left would be found by the next
        return run(self.program, folder, **how)

    def judge(self) -> Verdict:
        """Run all of it."""
        verdict = Verdict(self.program.name)
        if self.reference.code != self.program.code:
            verdict.faults.append(f"under python it ends with {self.reference.code}: {self.reference.stderr[-300:]}")
            return verdict
        ours = running.ours(self.program, self.folder / "gemini")
        verdict.seconds = self.reference.seconds, ours.seconds
        verdict.said = "\n".join(line for line in ours.stderr.splitlines() if line.startswith("gemini"))
        verdict.path, verdict.reason, verdict.steps = path_of(ours.stories, verdict.said)
        self._compare_ends(ours, verdict)
        self._compare_printed(ours, verdict)
        self._compare_saved(ours, verdict)
        if strictness.BEYOND in (verdict.printed, verdict.saved) and not verdict.faults:
            verdict.faults.append(verdict.strict[-1])
        verdict.faults += [f"left behind: {name}" for name in ours.left]
        return verdict

    def _compare_ends(self, ours: running.Outcome, verdict: Verdict) -> None:
        if ours.code != self.reference.code:
            last = ours.stderr.strip().splitlines()[-1:] or [""]
            verdict.faults.append(f"exit code {ours.code}, not {self.reference.code}: {last[0]}")
        if self.program.code == 1:
            theirs, found = _traceback(self.reference.stderr), _traceback(ours.stderr)
            if not theirs or theirs[-1] not in found or [x for x in theirs if x not in found]:
                verdict.faults.append(f"another traceback: {found} where python shows {theirs}")

    def _compare_printed(self, ours: running.Outcome, verdict: Verdict) -> None:
        theirs = self.reference.stdout
        if comparing.template(ours.stdout) != comparing.template(theirs):
            verdict.faults.append(_first_difference(theirs, ours.stdout))
        deviations = comparing.printed(theirs, ours.stdout)
        verdict.deviation = max(deviations, default=0.0)
        if self.strict:
            verdict.printed, what = strictness.printed(
                self._early(theirs),
                self._early(ours.stdout),
                lambda: self.threads.stdout,
                [lambda seed=seed: self.bits(seed).stdout for seed in _SEEDS],
            )
            verdict.strict += [what] if what else []
        if not self.always and verdict.deviation <= self.program.floor:
            return
        noise = [0.0] * len(deviations)
        for reference in self.references:
            other = comparing.grown(comparing.printed(theirs, reference.stdout))
            noise = [max(a, b) for a, b in zip(noise, [*other, *[0.0] * len(noise)])]
        verdict.noise = max(noise, default=0.0)
        for index, (deviation, allowed) in enumerate(zip(deviations, noise)):
            if deviation > max(comparing.FACTOR * allowed, self.program.floor):
                was, is_ = comparing.numbers(theirs)[index].value, comparing.numbers(ours.stdout)[index].value
                verdict.faults.append(f"number {index}: {was} became {is_}; noise {allowed:.1e}, here {deviation:.1e}")
                break

    def _compare_saved(self, ours: running.Outcome, verdict: Verdict) -> None:
        if not self.program.checkpoint:
            return
        path = ours.folder / self.program.checkpoint
        if not path.exists():
            verdict.faults.append(f"no {path.name} was written")
            return
        theirs = comparing.load(self.reference.folder / self.program.checkpoint)
        faults, deviations = comparing.saved(theirs, comparing.load(path))
        verdict.faults += [f"{path.name}: {fault}" for fault in faults[:3]]
        if self.strict:
            verdict.saved, what = strictness.saved(
                deviations,
                lambda: self._noise_of(self.threads),
                [lambda seed=seed: self._noise_of(self.bits(seed)) for seed in _SEEDS],
            )
            verdict.strict += [what] if what else []
        if max(deviations.values(), default=0.0) > self.program.floor:
            self._weigh_saved(deviations, verdict)

    def _early(self, text: str) -> str:
        """What of the output can be held against another run's: of a chaotic program the first steps."""
        if not self.program.chaotic:
            return text
        lines = text.splitlines()
        counted = [at for at, line in enumerate(lines) if comparing.numbers(line)]
        return "\n".join(lines[: counted[_STEPS]] if len(counted) > _STEPS else lines)

    def _noise_of(self, reference: running.Outcome) -> dict[str, float]:
        """The deviation of every saved tensor in another run under `python`."""
        name = self.program.checkpoint
        if not (reference.folder / name).exists():
            return {}
        one, other = comparing.load(self.reference.folder / name), comparing.load(reference.folder / name)
        return comparing.saved(one, other)[1]

    def _weigh_saved(self, deviations: dict[str, float], verdict: Verdict) -> None:
        noise: dict[str, float] = {}
        for reference in self.references:
            noise = {name: max(noise.get(name, 0.0), value) for name, value in self._noise_of(reference).items()}
        for name, deviation in sorted(deviations.items(), key=lambda entry: -entry[1]):
            allowed = noise.get(name, 0.0)
            if deviation > max(comparing.FACTOR * allowed, self.program.floor):
                verdict.faults.append(f"checkpoint: {name} is off by {deviation:.1e}; noise {allowed:.1e}")
                break


def judge(program: Program, always: bool = False, references_at: Path | None = None, **how: bool) -> Verdict:
    """Judge one program in a folder that is gone afterwards; runs under `python` are kept where one is named."""
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        return Judge(program, Path(folder), always, references_at, **how).judge()


def path_of(stories: list[ModelJournal], said: str) -> tuple[str, str, dict[str, int]]:
    """The fastest path that a run's models took, why not a faster one, and the steps by path."""
    steps: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for story in stories:
        for path, count in story.steps.items():
            steps[path] = steps.get(path, 0) + count
        for line, count in story.reasons.items():
            reason = line.partition(": ")[2]
            if not reason.startswith(_WARMING):
                reasons[reason] = reasons.get(reason, 0) + count
    taken = next((path for path in CallPath if steps.get(path)), CallPath.LOCAL)
    reason = max(reasons, key=lambda name: reasons[name], default="")
    if taken == CallPath.LOCAL and not reason:
        reason = said.splitlines()[0].removeprefix("gemini: ") if said else "nothing was trained in workers"
    return taken, reason, steps


def _traceback(stderr: str) -> list[str]:
    """The frames in the program's own file, and the last line."""
    text = stderr.rpartition("Traceback (most recent call last)")[2]
    frames = re.findall(r'File "[^"]*/programs/([^"]+)", (line \d+, in \S+)', text)
    last = [line for line in text.strip().splitlines() if line and not line.startswith((" ", "gemini:", "in worker"))]
    return [f"{file} {place}" for file, place in frames] + last[-1:]


def _first_difference(theirs: str, found: str) -> str:
    one, other = theirs.splitlines(), found.splitlines()
    for number, (a, b) in enumerate(zip([*one, "<end>"], [*other, "<end>"]), 1):
        if comparing.template(a) != comparing.template(b):
            return f"stdout line {number}: {a!r} became {b!r}"
    return f"stdout has {len(other)} lines, not {len(one)}"


__all__ = ["Judge", "Verdict", "judge", "path_of"]
