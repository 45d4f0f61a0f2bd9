"""Processes of `gemini tune`: one that captures the model of a script, one that trains a model for a few steps.

python -m gemini.cli.tune_worker capture OUT WORKERS train.py [arguments]      costs of the first model that trains
python -m gemini.cli.tune_worker steps OUT STEPS train.py [arguments]  seconds of steps under plain python
python -m gemini.cli.tune_worker trial OUT CONFIG STEPS TARGET         seconds of every step
python -m gemini.cli.tune_worker script --config CONFIG … train.py     a script under gemini_python

Each ends when the tuner ends, however that happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
FAULT = "gemini tune cannot capture: "


def main(arguments: list[str]) -> int:
    """Run one of these."""
    _end_with_parent()
    if arguments[0] == "script":
        os.execv(sys.executable, [sys.executable, "-m", "gemini.cli.python", *arguments[1:]])
    if arguments[0] == "capture":
        return capture_script(Path(arguments[1]), int(arguments[2]), arguments[3:])
    if arguments[0] == "steps":
        return time_script(Path(arguments[1]), int(arguments[2]), arguments[3:])
    return run_trial(Path(arguments[1]), Path(arguments[2]), int(arguments[3]), arguments[4])


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent ends; where the kernel can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def capture_script(out: Path, workers: int, program: list[str]) -> int:
    """Run a script until its largest model is first called with gradients; write the costs of that call."""
    import torch
    from torch import nn

    from gemini.errors import GeminiError
    from gemini.tune.machine_capture import capture_machine_costs
    from gemini.tune.machine_costs import save_costs

    original = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())
        if not trains or not module.training or isinstance(module, nn.modules.loss._Loss):
            return original(module, *args, **kwargs)
        nn.Module.__call__ = original  # a capture must not meet this function in the model
        try:
            save_costs(capture_machine_costs(module, args, kwargs, workers), out)
        except GeminiError as error:
            print(f"{FAULT}{error}", file=sys.stderr, flush=True)
            os._exit(2)
        sys.stdout.flush()
        os._exit(0)

    nn.Module.__call__ = called
    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    runpy.run_path(program[0], run_name="__main__")
    return 3  # the script ended without training a model


def time_script(out: Path, steps: int, program: list[str]) -> int:
    """Run a script until its optimizer has made that many steps; write the seconds between them."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends = [time.perf_counter()]

    def stepped(*_: Any) -> None:
        ends.append(time.perf_counter())
        out.write_text(json.dumps([late - early for early, late in itertools.pairwise(ends)]), encoding="utf-8")
        if len(ends) > steps:
            os._exit(0)

    register_optimizer_step_post_hook(stepped)
    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    runpy.run_path(program[0], run_name="__main__")
    return 0


def run_trial(out: Path, config: Path, steps: int, target: str) -> int:
    """Train the model of a function for some steps with a configuration; write the seconds of each."""
    import torch

    import gemini
    from gemini.cli.profile import make_model

    torch.manual_seed(0)
    model, batch, keywords = make_model(target)
    optimizer = torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=1e-4)
    gemini.compile(model, gemini.GeminiConfig.load(config))
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = reduce_output(model(*batch, **keywords))
        loss.backward()
        optimizer.step()
        float(loss)
        times.append(time.perf_counter() - begin)
        out.write_text(json.dumps(times), encoding="utf-8")
    return 0


def reduce_output(output: Any) -> Any:
    """Return a loss: that of the output where it has one, else the mean of its first tensor."""
    import torch

    if hasattr(output, "loss") and output.loss is not None:
        return output.loss
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.float().mean()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
