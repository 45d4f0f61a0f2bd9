"""Failure replay: the call in which a step failed, saved so that it can be repeated in one process, under a debugger.

    .gemini/failures/20250131-120000-4711-1/
        failure.json            the module, its worker, the error, the plan, and the arguments as plain data
        tensors.safetensors     the tensors among them, the generator state, the gradients of a backward

    >>> from gemini.runtime.failure_replay import load, replay
    >>> load(folder).args                      # the arguments of the module
    >>> replay(model, folder)                  # repeats the call: raises what it raised

Weights are not saved: load the checkpoint of the run. Nothing is pickled, so a folder from elsewhere can be opened;
values that are neither tensors nor plain data are saved as text. A folder is complete or absent, the last three are
retained, and tensors of more than 256 MB in total are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gemini.atomic_files import unused_path
from gemini.errors import ArtifactError
from gemini.ir.autograd_modes import Region
from gemini.random_numbers.rng_state import set_state
from gemini.runtime.local_mode import run_locally

MAX_SAVED = 3
_LARGE = 256 << 20  # bytes of tensors
_RECORD, _TENSORS = "failure.json", "tensors.safetensors"
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Unsaved:
    """Stands for a value that could not be saved."""

    text: str


@dataclass(frozen=True)
class Failure:
    """A saved call."""

    model: str
    unit: str  # the name of the module in the model
    action: str  # forward or backward
    worker: int
    error: str
    traceback: str
    plan: list[list[Any]]  # remote modules, each with its worker
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: list[torch.Tensor | None]  # of the outputs, for a backward
    generator: bytes
    region: Region
    training: list[bool]  # flags of its submodules


# ── saving ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def save(folder: Path, failure: Failure) -> Path:
    """Write a failure into a folder of failures; the new folder in it appears complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    data = {
        **{key: value for key, value in vars(failure).items() if key not in ("generator", "region")},
        "args": _encode(failure.args, tensors),
        "kwargs": _encode(failure.kwargs, tensors),
        "gradients": _encode(failure.gradients, tensors),
        "region": asdict(failure.region),
        "versions": {"torch": str(torch.__version__)},
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    data["left_out"] = size if size > _LARGE else 0
    if size > _LARGE:
        tensors = {}
    tensors["generator"] = torch.frombuffer(bytearray(failure.generator), dtype=torch.uint8)
    being_written = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        (being_written / _RECORD).write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
        save_file(tensors, str(being_written / _TENSORS))
        target = unused_path(folder)
        being_written.rename(target)
    except BaseException:
        shutil.rmtree(being_written, ignore_errors=True)
        raise
    for old in _find_failures(folder)[:-MAX_SAVED]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _find_failures(folder: Path) -> list[Path]:
    """Return complete failures, oldest first."""
    found = [one for one in folder.iterdir() if not one.name.startswith(".") and (one / _RECORD).is_file()]
    return sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name))


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return plain data: lists stand for themselves, everything else that is not plain is `{kind: …}`."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return {"unsaved": f"a tensor of layout {value.layout}"}
        name = f"tensor_{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name, "requires_grad": value.requires_grad, "device": str(value.device)}
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_encode(one, tensors) for one in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_encode(one, tensors) for one in value]}
    if type(value) is dict:
        return {"dict": [[_encode(key, tensors), _encode(one, tensors)] for key, one in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"unsaved": f"{value!r:.500}"}


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────────────────
def load(folder: str | os.PathLike[str]) -> Failure:
    """Read a saved failure."""
    path = Path(folder)
    try:
        data = json.loads((path / _RECORD).read_text(encoding="utf-8"))
        tensors = load_file(str(path / _TENSORS))
        region = data.pop("region")
        return Failure(
            **{
                key: data[key]
                for key in ("model", "unit", "action", "worker", "error", "traceback", "plan", "training")
            },
            args=_decode(data["args"], tensors),
            kwargs=_decode(data["kwargs"], tensors),
            gradients=_decode(data["gradients"], tensors),
            generator=tensors["generator"].numpy().tobytes(),
            region=Region(region["grad"], region["inference"], tuple(tuple(part) for part in region["autocast"])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} holds no saved failure: {type(error).__name__}: {error}\n"
            "    → name a folder in .gemini/failures, such as the one that the error named"
        ) from error


def _decode(data: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(data, list):
        return [_decode(one, tensors) for one in data]
    if not isinstance(data, dict):
        return data
    kind, value = next(iter(data.items()))
    if kind == "tensor":
        if value not in tensors:
            return Unsaved("a tensor, left out for its size")
        return tensors[value].requires_grad_(data["requires_grad"])
    if kind == "tuple":
        return tuple(_decode(one, tensors) for one in value)
    if kind == "dict":
        return {_decode(key, tensors): _decode(one, tensors) for key, one in value}
    if kind == "dtype":
        return getattr(torch, value)
    return Unsaved(value)


def replay(model: nn.Module, folder: str | os.PathLike[str]) -> Any:
    """Repeat a saved call in this process; return its result, or raise what it raised."""
    failure = load(folder)
    missing = _find_unsaved([failure.args, failure.kwargs, failure.gradients])
    if missing:
        raise ArtifactError(f"{folder} cannot be replayed: it has no {missing[0].text}\n    → load() returns the rest")
    try:
        module = model.get_submodule(failure.unit)
    except AttributeError as error:
        raise ArtifactError(
            f"{type(model).__name__} has no module {failure.unit!r}\n    → pass the model of the run, a {failure.model}"
        ) from error
    modules, before = list(module.modules()), [one.training for one in module.modules()]
    try:
        for one, training in zip(modules, failure.training, strict=False):
            one.training = training
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(run_locally())
            set_state(failure.generator)
            failure.region.enter(stack, Region.current())
            result = module(*failure.args, **failure.kwargs)
            if failure.action == "backward":
                _backward(result, failure.gradients)
            return result
    finally:
        for one, training in zip(modules, before, strict=True):
            one.training = training


def _backward(result: Any, gradients: list[torch.Tensor | None]) -> None:
    from gemini.runtime.transport.serialization import ClassTable, pack

    _, tensors = pack(result, ClassTable(stays=True))
    pairs = [
        (t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None and t.requires_grad
    ]  # fmt: skip
    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def _find_unsaved(value: Any) -> list[Unsaved]:
    if isinstance(value, Unsaved):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [one for part in parts for one in _find_unsaved(part)]
