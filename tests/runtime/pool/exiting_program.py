"""A training program that exits as its argument says.

python exiting_program.py WAY POINT      POINT: seconds after the start, or after the first trained steps (with a "+")

With ENDINGS_PLAN in its environment whole steps run in the workers, by a plan. The way "worker" ends one of those.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini import GeminiCompiler, GeminiConfig, pipeline
from gemini.errors import WorkerError
from gemini.runtime.interception import dispatch

BY_PLAN = bool(os.environ.get("ENDINGS_PLAN"))
WARM = 8 if BY_PLAN else 3  # steps before those in which it ends


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(super().forward(x))
        return x


def say(*words: object) -> None:
    """A line at once: two threads that print may end up in one line."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(model: nn.Module, loader: Any, point: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for at in range(1_000_000):
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if os.environ.get("ENDINGS_NOISY"):
                say("step", at)
            if END.is_set():
                finish()
            if at == WARM:
                say("training", paths(model))
                if point.startswith("+"):
                    later(float(point))


def paths(model: nn.Module) -> dict[str, int]:
    """How steps were run, where plans are made."""
    found = dispatch.find_managed(model)
    return {} if found is None or found.pipelined is None else found.pipelined.journal.steps


def later(seconds: float) -> None:
    """Let the main thread end in its way after a time."""
    thread = threading.Thread(target=lambda: (time.sleep(seconds), END.set(), act()), daemon=True)
    thread.start()


END = threading.Event()
WAY = sys.argv[1] if len(sys.argv) > 1 else ""


def finish() -> None:
    if WAY == "exception":
        raise ValueError("the end")
    if WAY == "sys.exit":
        sys.exit(3)
    if WAY == "return":
        sys.exit(0)


def act() -> None:
    """What does not need the main thread."""
    if WAY == "os._exit":
        os._exit(4)
    if WAY == "worker":
        pid = workers()[-1]
        say("killed", pid, time.monotonic())
        os.kill(pid, signal.SIGKILL)
    if WAY.startswith("SIG"):
        name, _, times = WAY.partition("*")
        for _ in range(int(times or 1)):
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.02)


def workers() -> list[int]:
    """Processes of workers of this program."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            is_ours = folder.name.isdecimal() and f"\nPPid:\t{os.getpid()}\n" in (folder / "status").read_text()
            if is_ours and b"gemini.runtime.worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def main(point: str) -> None:
    torch.manual_seed(0)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # whoever runs the tests may ignore them
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    loader: Any = [torch.randn(16 if BY_PLAN else 8, 64)]
    say("begin")
    if not point.startswith("+"):
        later(float(point))
    models = [nn.Sequential(*(Slow(64, 64) for _ in range(6))) for _ in range(2)]
    if os.environ.get("ENDINGS_LOADER"):
        data = torch.utils.data.TensorDataset(torch.randn(64, 64))
        loader = torch.utils.data.DataLoader(
            data, 8, num_workers=2, persistent_workers=True, collate_fn=lambda rows: torch.stack([r[0] for r in rows])
        )
        next(iter(loader))
    if BY_PLAN:
        config = GeminiConfig(mode=pipeline, pipeline_degree=2, accum_degree=4, quiet=True, strict=True)
        train(GeminiCompiler().compiler(models[0], config), loader, point)
    for model in models:
        GeminiCompiler().compiler(model, GeminiConfig(mode=pipeline, pipeline_degree=2, quiet=True))
    train(nn.Sequential(*models), loader, point)


if __name__ == "__main__":
    try:
        main(sys.argv[2])
    except WorkerError as error:
        say("lost", time.monotonic(), str(error))
        sys.exit(5)
