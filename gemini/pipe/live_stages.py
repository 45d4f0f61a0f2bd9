"""Live stages: generated source becomes modules.

The source is executed as a separate module, registered with `linecache` and `inspect`: tracebacks show the generated
lines, and a debugger steps through them. Parameters and layers are the objects of the model.
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

EDITED = "__gemini_edited__"  # an attribute of stages that were edited: their author answers for their effects
_EVERY = frozenset(vars(nn.Module()))  # attributes that every module has


def stage_file(stage: int) -> str:
    """Return the file name of a stage."""
    return f"stage_{stage}.py"


def load_module(source: str, path: str) -> ModuleType:
    """Execute a generated file; `path` is its actual or nominal location."""
    digest = hashlib.sha256(f"{path}\n{source}".encode()).hexdigest()[:12]
    module = ModuleType(f"gemini_stages_{digest}")
    module.__file__ = path
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    sys.modules[module.__name__] = module  # inspect and typing look up the module of a class here
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[module.__name__]
        raise GenerateError(
            f"{path} cannot be executed: {type(error).__name__}: {error}\n    → correct it, or generate it again"
        ) from error
    return module


def make_stages(codes: Iterable[StageCode], model: nn.Module, where: str) -> list[nn.Module]:
    """Return the live stages of a model; `where` is their folder, or a name of the model."""
    made = []
    for code in codes:
        path = f"{where}/{stage_file(code.interface.stage)}"
        cls = getattr(load_module(code.source, path), code.class_name, None)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise GenerateError(f"{path} defines no module {code.class_name}\n    → correct it, or generate it again")
        stage = cls(model)
        if code.is_edited:
            vars(stage)[EDITED] = True
        made.append(stage)
    follow_modes(made, model)
    check_complete(made, model)
    return made


def follow_modes(stages: Sequence[nn.Module], model: nn.Module) -> None:
    """Set the training mode of the generated modules to that of the model; modules of the model are not touched."""
    own = {id(module) for module in model.modules()}
    for stage in stages:
        for module in stage.modules():
            if id(module) not in own:
                module.training = model.training


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers, under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class StageTensors:
    """The tensors that generated modules hold themselves, each with the module of the model it belongs to.

    Layers are the objects of the model. But a parameter of a module that is cut is registered again by the stages that
    use it, and the script may replace it in the model; so may a buffer, or a tensor in an attribute.
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
        """Return whether the model still has the same tensors."""
        return not any(self._replaced())

    def follow(self) -> None:
        """Adopt the current tensors of the model."""
        for frame, key, now in self._replaced():
            frame[key] = frame[key] if now is None else now

    def _replaced(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield the tensors that the model has replaced: table of the stage, name, current value."""
        for frame, module, kind, key in self.held:
            held = getattr(frame, kind)
            now = getattr(module, kind).get(key, held[key] if kind == "__dict__" else None)
            if now is not held[key]:
                yield held, key, now


def check_complete(stages: Sequence[nn.Module], model: nn.Module) -> None:
    """Raise GenerateError unless the stages together have exactly the parameters and buffers of the model, by name."""
    held = dict(named_tensors(model))
    found: dict[str, torch.Tensor] = {}
    faults = []
    for at, stage in enumerate(stages):
        for name, tensor in named_tensors(stage):
            found[name] = tensor
            if held.get(name) is not tensor:
                faults.append(f"{name} of stage {at} is not that of the model")
    faults += [f"{name} is in no stage" for name in held if name not in found]
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults[:8])
        raise GenerateError(f"the stages of {type(model).__name__} do not make up the model:\n{listed}")
