"""A program under `python`, in a child of this process, which has imported torch already.

Importing takes longer than most programs run. What noise is measured by is run so, what is compared with
only if asked for.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch

from conformance.scripts.registry import Program

_LIMIT = 240.0  # seconds


def run(program: Program, folder: Path, threads: int, moved: int, environment: dict[str, str]) -> tuple[str, str, int]:
    """What it prints, what it says on standard error, and its exit code; `moved`: seed of other last bits, or 0."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stdin").write_text(program.stdin)
    importlib.import_module("torch._dynamo")  # optimizers load it, which takes as long as torch itself
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _child(program, folder, threads, moved, environment)
    code = _ended(child)
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return texts[0], texts[1], code


def _ended(child: int) -> int:
    end = time.monotonic() + _LIMIT
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.05)


def _child(program: Program, folder: Path, threads: int, moved: int, environment: dict[str, str]) -> NoReturn:
    code = 1
    atexit._clear()
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for descriptor, (name, flags) in enumerate(
            (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY | os.O_CREAT), ("stderr", os.O_WRONLY | os.O_CREAT))
        ):
            os.dup2(os.open(name, flags, 0o644), descriptor)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        torch.set_num_threads(threads)
        if moved:
            from conformance.scripts import last_bits

            last_bits.install(moved)
        sys.argv = [str(program.path), *program.arguments]
        sys.path.insert(0, str(program.path.parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
