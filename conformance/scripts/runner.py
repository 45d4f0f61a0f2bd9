"""One run of a program in a folder and an environment of its own, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from conformance.scripts import fork_server as forking
from conformance.scripts.registry import Program
from gemini.errors import ArtifactError
from gemini.report.journal_reader import read_newest
from gemini.runtime.run_journal import ModelJournal

GEMINI = ("--mode", "pipeline", "--pipeline-degree", "2", "--accum-degree", "4")
_MARK = "SCRIPT_RUN"
_KEPT = "outcome.json"
_PATIENCE = 5.0  # seconds in which a process that ends may take its children with it


@dataclass
class Outcome:
    """What a run printed, how it ended, what it wrote and left."""

    stdout: str
    stderr: str
    code: int
    folder: Path
    seconds: float
    left: list[str] = field(default_factory=list)
    stories: list[ModelJournal] = field(default_factory=list)


def plain(program: Program, folder: Path, threads: int = 1, kernels: str = "", moved: int = 0) -> Outcome:
    """The program under `python`; `moved`: the seed of other last bits."""
    through = [str(Path(__file__).with_name("last_bits.py")), str(moved)] if moved else []
    return _kept(_run([sys.executable, *through], program, folder, threads, kernels))


def forked(program: Program, folder: Path, threads: int = 1, moved: int = 0) -> Outcome:
    """The same in a child of this process, which must have done nothing but import torch."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    stdout, stderr, code = forking.run(program, folder, threads, moved, _environment(folder, threads, "", ""))
    return _kept(Outcome(stdout, stderr, code, folder, time.monotonic() - begin))


def _kept(outcome: Outcome) -> Outcome:
    kept = {"stdout": outcome.stdout, "stderr": outcome.stderr, "code": outcome.code, "seconds": outcome.seconds}
    (outcome.folder / _KEPT).write_text(json.dumps(kept), encoding="utf-8")
    return outcome


def read(folder: Path) -> Outcome | None:
    """A run under `python` that was made there before."""
    path = folder / _KEPT
    return Outcome(**json.loads(path.read_text(encoding="utf-8")), folder=folder) if path.exists() else None


def ours(program: Program, folder: Path, options: tuple[str, ...] = GEMINI) -> Outcome:
    """The program under `gemini_python`, with two workers and pipeline mode forced."""
    outcome = _run([str(Path(sys.executable).with_name("gemini_python")), *options], program, folder, 1, "")
    try:
        outcome.stories = read_newest(folder / ".gemini")
    except ArtifactError:
        outcome.stories = []
    return outcome


def _environment(folder: Path, threads: int, kernels: str, mark: str) -> dict[str, str]:
    """Nothing of the caller's but where programs and packages are found."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    scrubbed = {
        **kept,
        "HOME": str(folder / "home"),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        _MARK: mark,
    }
    if kernels:  # other kernels round in another order, as other threads do
        scrubbed["ATEN_CPU_CAPABILITY"] = kernels
        scrubbed["ONEDNN_MAX_CPU_ISA"] = "SSE41"
        scrubbed["MKL_CBWR"] = "COMPATIBLE"
    return scrubbed


def _run(command: list[str], program: Program, folder: Path, threads: int, kernels: str) -> Outcome:
    (folder / "home").mkdir(parents=True, exist_ok=True)
    mark, shared = uuid.uuid4().hex, _shared_memory()
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, str(program.path), *program.arguments],
        cwd=folder,
        env=_environment(folder, threads, kernels, mark),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(program.stdin, timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        stderr += "\nended by the harness after 240 s"
    seconds = time.monotonic() - begin
    left = [*_processes_left(mark), *(f"/dev/shm/{name}" for name in _nobodys(_shared_memory() - shared))]
    return Outcome(stdout, stderr, process.returncode, folder, seconds, left)


def _marked(mark: str) -> dict[int, str]:
    """Processes that were started, however indirectly, by the run with this mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:100]
            except OSError:
                continue  # it has ended, or is another user's
    return found


def _processes_left(mark: str) -> list[str]:
    """Ends what is left after a short while, and names it."""
    end = time.monotonic() + _PATIENCE
    while left := _marked(mark):
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return [f"process {pid}: {command}" for pid, command in left.items()]
        time.sleep(0.05)
    return []


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _nobodys(names: set[str]) -> set[str]:
    """Those that no living process has mapped: entries of other programs on this machine are in use."""
    if not names:
        return set()
    used = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                used.append((entry / "maps").read_text())
                used += [os.readlink(opened) for opened in (entry / "fd").iterdir()]
            except OSError:
                continue
    text = "\n".join(used)
    return {name for name in names if f"/dev/shm/{name}" not in text and Path("/dev/shm", name).exists()}
