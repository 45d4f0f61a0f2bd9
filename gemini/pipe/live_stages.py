"""Stages: generated text becomes live modules.

The text is executed as a module of its own, known to `linecache` and `inspect`: a traceback through a stage shows
the generated lines, and a debugger steps through them. Parameters and layers are the model's own objects.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import GenerateError

if TYPE_CHECKING:
    from gemini.codegen.stage_generator import StageCode

_EVERY = frozenset(vars(nn.Module()))  # attributes that every module has


def stage_file(stage: int) -> str:
    """The name of a stage's file."""
    return f"stage_{stage}.py"


def load_module(source: str, path: str) -> ModuleType:
    """Execute a generated file; `path` is where it is, or would be."""
    digest = hashlib.sha256(f"{path}\n{source}".encode()).hexdigest()[:12]
    module = ModuleType(f"gemini_stages_{digest}")
    module.__file__ = path
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    sys.modules[module.__name__] = module  # where inspect and typing look the module of a class up
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[module.__name__]
        raise GenerateError(
            f"{path} cannot be executed: {type(error).__name__}: {error}\n    → generate the stages again"
        ) from error
    return module


def make_stages(codes: Iterable[StageCode], model: nn.Module, where: str) -> list[nn.Module]:
    """The live stages of a model; `where` is their folder, or names the model where they have none."""
    made = []
    for code in codes:
        path = f"{where}/{stage_file(code.interface.stage)}"
        cls = getattr(load_module(code.source, path), code.class_name, None)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise GenerateError(f"{path} defines no module {code.class_name}\n    → generate the stages again")
        made.append(cls(model))
    follow_modes(made, model)
    check_complete(made, model)
    return made


def follow_modes(stages: Sequence[nn.Module], model: nn.Module) -> None:
    """Let the frames of the stages be in training mode as the model is; its own modules keep their own modes."""
    own = {id(module) for module in model.modules()}
    for stage in stages:
        for module in stage.modules():
            if id(module) not in own:
                module.training = model.training


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class StageTensors:
    """What the frames of the stages hold themselves, each with the module of the model it belongs to.

    Layers are the model's own objects and hold what they hold. But a parameter that the model registered on a module
    which is cut is registered again by the stages that use it, and may be replaced in the model later; so may a buffer,
    or a tensor in an attribute.
    """

    def __init__(self, stages: Sequence[nn.Module], model: nn.Module) -> None:
        own = {id(module) for module in model.modules()}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.held = [
            (frame, modules[name], kind, key)
            for stage in stages
            for name, frame in stage.named_modules()
            if id(frame) not in own and name in modules
            for kind in ("_parameters", "_buffers", "__dict__")
            for key in getattr(frame, kind)
            if key not in _EVERY
        ]

    def are_current(self) -> bool:
        """Whether the model still holds the same."""
        return not any(self._others())

    def follow(self) -> None:
        """Hold what the model holds now, if it has anything of the name."""
        for frame, key, now in self._others():
            frame[key] = frame[key] if now is None else now

    def _others(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Where the model holds something else: what the frame has, the name, what it is now."""
        for frame, module, kind, key in self.held:
            held = getattr(frame, kind)
            now = getattr(module, kind).get(key, held[key] if kind == "__dict__" else None)
            if now is not held[key]:
                yield held, key, now


def check_complete(stages: Sequence[nn.Module], model: nn.Module) -> None:
    """Raise GenerateError unless the stages together hold exactly the model's parameters and buffers, by name."""
    held = dict(named_tensors(model))
    found: dict[str, torch.Tensor] = {}
    faults = []
    for at, stage in enumerate(stages):
        for name, tensor in named_tensors(stage):
            found[name] = tensor
            if held.get(name) is not tensor:
                faults.append(f"{name} of stage {at} is not the model's")
    faults += [f"{name} is in no stage" for name in held if name not in found]
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults[:8])
        raise GenerateError(f"the stages of {type(model).__name__} do not make up the model:\n{listed}")
