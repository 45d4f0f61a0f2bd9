"""Run generated programs plainly, or over two workers, and compare what they record.

    python -m tests.programs.program_runner plain|managed FOLDER      every program of FOLDER/programs.pickle
    python -m tests.programs.program_runner alone NAME                one program by its name, and what differs

Plain runs are children of a process that has not imported Gemini. Managed runs share a process and its workers.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import io
import logging
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tests.programs.impure.compose import Program

SECONDS = 20  # a program takes less than one
_MANAGED_SECONDS = 1200
Record = list[tuple[Any, ...]]


class Outcome(NamedTuple):
    """What a program recorded, and the paths and reasons of its managed model."""

    record: Record
    steps: dict[str, int]
    reasons: dict[str, int]
    impurity: str


# ── one program ────────────────────────────────────────────────────────────────────────────────────────────────────
def run_program(program: Program, folder: Path, manage: Callable[[nn.Module], None]) -> Record:
    """Run a program in a folder of its own, and return its record, output and exception."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / f"{program.name}.py").write_text(program.source)
    (folder / f"{program.name}_helper.py").write_text(program.helper)
    record: Record = []
    output = io.StringIO()
    with _restored_process(), contextlib.redirect_stdout(output), warnings.catch_warnings():
        _enter(folder)
        signal.signal(signal.SIGALRM, _raise_timeout)
        signal.alarm(SECONDS)
        try:
            module = _import(program, folder)
            module.main(manage, record)
        except Exception as error:
            record.append(("error", type(error).__name__, str(error).replace(str(folder), "")[:100]))
        finally:
            signal.alarm(0)
    record.append(("printed", output.getvalue()))
    return record


def _enter(folder: Path) -> None:
    inside = folder / "run"
    inside.mkdir()
    os.chdir(inside)
    (inside / "factor.txt").write_text("1.5")
    sys.path.insert(0, str(folder))


def _import(program: Program, folder: Path) -> types.ModuleType:
    """Import a program, every second one as `__main__`."""
    path = folder / f"{program.name}.py"
    name = program.name if int(program.name.rpartition("_")[2]) % 2 else "__main__"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[program.name] = module
    spec.loader.exec_module(module)
    return module


def _raise_timeout(number: int, frame: Any) -> None:
    raise TimeoutError(f"the program takes longer than {SECONDS} s")


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    """Undo what a program changes in its process: names of modules, settings, the folder, the environment."""
    places = (time, "time"), (time, "perf_counter"), (uuid, "uuid4")
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    folder, environment, path, main = os.getcwd(), dict(os.environ), [*sys.path], sys.modules["__main__"]
    limit, precision = sys.getrecursionlimit(), torch.get_default_dtype()
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:], sys.modules["__main__"] = path, main
        sys.modules.pop("seven", None)
        for owner in (nn.functional, math, torch.Tensor, nn.Linear, builtins):
            for name in [name for name in vars(owner) if name.startswith("made_")]:
                delattr(owner, name)
        sys.setrecursionlimit(limit)
        torch.set_default_dtype(precision)
        gc.enable()
        logging.getLogger("made").handlers.clear()


# ── many programs ──────────────────────────────────────────────────────────────────────────────────────────────────
def run_plain(programs: list[Program], folder: Path) -> dict[str, Record]:
    """Return the records of programs, each run in a child of this process."""
    assert "gemini" not in sys.modules
    assert threading.active_count() == 1
    importable = __import__("torch._dynamo")  # optimizers load it
    assert importable is not None
    found = {}
    for program in programs:
        result = folder / f"{program.name}.plain"
        child = os.fork()
        if child == 0:
            try:
                record = run_program(program, folder / "plain" / program.name, lambda model: None)
                result.write_bytes(pickle.dumps(record))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found[program.name] = pickle.loads(result.read_bytes()) if result.exists() else [("no result",)]
    return found


def run_managed(programs: list[Program], folder: Path) -> dict[str, Outcome]:
    """Return the outcomes of programs over the workers of this process."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    keeper = nn.Linear(1, 1)  # the workers live as long as a model uses them
    _manage(keeper, folder / "keeper", "auto")
    found = {}
    for program in programs:
        print(program.name, file=sys.stderr, flush=True)  # the last one is named if this process ends early
        found[program.name] = _run_managed(program, folder)
        gc.collect()
    return found


def _run_managed(program: Program, folder: Path) -> Outcome:
    from gemini.purity.proof import prove_purity
    from gemini.runtime.run_journal import get_journal

    runs = folder / "runs" / program.name
    proven = []

    def manage(model: nn.Module) -> None:
        _manage(model, runs, program.schedule)
        proven.append(prove_purity(model).reason)

    record = run_program(program, folder / "managed" / program.name, manage)
    stories = get_journal(runs.resolve()).models
    steps, reasons = (stories[-1].steps, stories[-1].reasons) if stories else ({}, {})
    return Outcome(record, {str(key): value for key, value in steps.items()}, reasons, "".join(proven))


def _manage(model: nn.Module, folder: Path, schedule: str) -> None:
    from gemini import GeminiCompiler, GeminiConfig

    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(folder), schedule=schedule
    )
    GeminiCompiler().compiler(model, config=config)


def run_both(programs: list[Program], folder: Path) -> tuple[dict[str, Record], dict[str, Outcome]]:
    """Run programs both ways, in two processes at the same time, and return their records and outcomes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "programs.pickle").write_bytes(pickle.dumps(programs))
    command = [sys.executable, "-m", "tests.programs.program_runner"]
    running = {
        kind: subprocess.Popen(
            [*command, kind, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for kind in ("plain", "managed")
    }
    found: list[Any] = []
    for kind, process in running.items():
        try:
            _, errors = process.communicate(timeout=_MANAGED_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        path = folder / f"{kind}.pickle"
        if not path.exists():
            raise RuntimeError(f"{kind} runs ended with {process.returncode}:\n{errors[-3000:]}")
        found.append(pickle.loads(path.read_bytes()))
    return found[0], found[1]


# ── comparison ─────────────────────────────────────────────────────────────────────────────────────────────────────
def find_difference(one: Any, other: Any, where: str = "record") -> str:
    """Return where two records differ; '' if nowhere. Floats may differ by rounding."""
    if type(one) is not type(other):
        return f"{where}: {one!r:.200} became {other!r:.200}"
    if isinstance(one, torch.Tensor):
        return "" if _is_close(one, other) else f"{where}: {one.flatten()[:5]} became {other.flatten()[:5]}"
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {one!r:.300} became {other!r:.300}"
        parts = (find_difference(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(zip(one, other)))
        return next(filter(None, parts), "")
    if isinstance(one, (float, np.floating)):
        return (
            ""
            if abs(one - other) <= 1e-9 * max(abs(one), 1e-3) or math.isnan(one)
            else f"{where}: {one!r} became {other!r}"
        )
    return "" if one == other else f"{where}: {one!r:.300} became {other!r:.300}"


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def has_failed(record: Record) -> bool:
    """Return whether a program raised, or recorded nothing."""
    return any(entry[0] in ("error", "no result") for entry in record) or not any(e[0] == "loss" for e in record)


def describe_difference(program: Program, plain: Record, outcome: Outcome) -> str:
    """Return where a program under Gemini differs from `python`, with its source; '' if nowhere."""
    difference = find_difference(plain, outcome.record)
    paths = f"{outcome.steps} {outcome.reasons} {outcome.impurity or 'proven pure'}"
    return f"{program.name}: {program.title}\n{difference}\n{paths}\n{program.source}" if difference else ""


def run_alone(name: str) -> None:
    """Run one generated program both ways and print what differs."""
    from tests.programs.impure.compose import generate

    seed, family, number = map(int, name.split("_")[1:])
    program = [*generate(seed, family, number + 1)][number]
    folder = Path(tempfile.mkdtemp())
    plain, managed = run_both([program], folder)
    print(describe_difference(program, plain[name], managed[name]) or f"{program.title}: no difference")


def main(kind: str, folder: Path) -> None:
    """Run all programs of a folder in one of the two ways."""
    torch.set_num_threads(1)
    random.seed(0)
    programs = pickle.loads((folder / "programs.pickle").read_bytes())
    found: Any = (run_plain if kind == "plain" else run_managed)(programs, folder.resolve())
    (folder / f"{kind}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    from tests.programs import program_runner  # outcomes are pickled by this name

    if sys.argv[1] == "alone":
        program_runner.run_alone(sys.argv[2])
    else:
        program_runner.main(sys.argv[1], Path(sys.argv[2]))
