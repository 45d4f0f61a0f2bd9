"""Attribute paths: the code by which a stage accesses its modules and tensors (`self.encoder.layer["6"].attention`)."""

from __future__ import annotations

import keyword

from torch import nn

from gemini.codegen.literals import string
from gemini.codegen.stage_modules import Holding, Skeleton, join, split_held

WHOLE_MODEL = "whole_model"


def is_name(text: str) -> bool:
    """Return whether a text can follow a dot."""
    return text.isidentifier() and not keyword.iskeyword(text)


def is_keyed(module: nn.Module) -> bool:
    """Return whether the mirror of a module is accessed by key."""
    return isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))


def attribute(owner: str, name: str) -> str:
    """Return the text of an attribute."""
    return f"{owner}.{name}" if is_name(name) else f"getattr({owner}, {string(name)})"


def child(owner: str, module: nn.Module, name: str, mirrored: bool) -> str:
    """Return the text of a child of a module: by key, index or name."""
    if mirrored and is_keyed(module):
        return f"{owner}[{string(name)}]"
    if not mirrored and isinstance(module, (nn.ModuleList, nn.Sequential)) and name.isdigit():
        own = type(module).__getitem__ in (nn.ModuleList.__getitem__, nn.Sequential.__getitem__)
        if own and list(module._modules) == [str(at) for at in range(len(module._modules))]:
            return f"{owner}[{name}]"
    if not mirrored and isinstance(module, nn.ModuleDict) and type(module).__getitem__ is nn.ModuleDict.__getitem__:
        return f"{owner}[{string(name)}]"
    return attribute(owner, name)


def original(model: nn.Module, path: str) -> str:
    """Return the text of a module of the original model."""
    text, module = "model", model
    for name in path.split(".") if path else ():
        text, module = child(text, module, name, mirrored=False), getattr(module, "_modules")[name]  # noqa: B009
    return text


class Paths:
    """Texts of a stage's modules and tensors; `local` maps modules to variables, `read` are those in use."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.local: dict[str, str] = {}
        self.read: set[str] = set()

    def module(self, path: str) -> str:
        """Return the text of a module."""
        if not path:
            return f"self.{WHOLE_MODEL}"
        if path in self.local:
            self.read.add(self.local[path])
            return self.local[path]
        owner, _, name = path.rpartition(".")
        holding = self.find(owner)
        mirrored = holding is not None and not holding.whole
        module = self._original(owner)
        return child(self.module(owner) if owner else "self", module, name, mirrored)

    def tensor(self, target: str) -> str:
        """Return the text of a tensor that the model holds."""
        path, name, subscripts = split_held(target)
        holding = self.find(path)
        if holding is not None and holding.whole and isinstance(self._original(path), nn.ParameterList):
            return f"{self.module(path)}[{name}]"
        return attribute(self.module(path) if path else "self", name) + subscripts.replace("'", '"')

    def model_object(self, path: str, name: str) -> str:
        """Return the text of a module or of an attribute of one."""
        if not name:
            return self.module(path)
        return attribute(self.module(path) if path else "self", name)

    def find(self, path: str) -> Holding | None:
        """Return the holding of a module, or of the whole module that contains it."""
        at: Holding = self.skeleton.root
        for name in path.split(".") if path else ():
            if at.whole:
                return at
            if name not in at.children:
                return None
            at = at.children[name]
        return at

    def _original(self, path: str) -> nn.Module:
        module: nn.Module = self.skeleton.root.module
        for name in path.split(".") if path else ():
            module = getattr(module, "_modules")[name]  # noqa: B009
        return module


# ── __init__ ───────────────────────────────────────────────────────────────────────────────────────────────────────
def init_lines(skeleton: Skeleton, extra: str) -> list[str]:
    """Return the statements that take modules and tensors from the model; `extra` is the class for extra state."""
    model = skeleton.root.module
    lines = [f'self.__dict__["{WHOLE_MODEL}"] = model'] if skeleton.needs_model else []
    paths = Paths(skeleton)
    lines += _own_lines(skeleton.root, "self", "model")
    for holding in skeleton.root.children.values():
        lines += _lines(holding, paths, model, extra)
    return lines


def _lines(holding: Holding, paths: Paths, model: nn.Module, extra: str) -> list[str]:
    here, there = paths.module(holding.path), original(model, holding.path)
    target = here if not here.startswith("getattr(") else ""
    value = there if holding.whole else f"{extra}({there})" if holding.extra_state else _mirror(holding, model)
    owner, _, name = holding.path.rpartition(".")
    if target:
        lines = [f"{target} = {value}"]
    else:
        lines = [f"{paths.module(owner) if owner else 'self'}.add_module({string(name)}, {value})"]
    if holding.whole:
        return lines
    lines += _own_lines(holding, here, there)
    rest = list(holding.children.values())
    if is_keyed(holding.module) and not holding.extra_state:
        rest = [child for child in rest if not (child.whole and child.path in _comprehension_children(holding))]
    for child_ in rest:
        lines += _lines(child_, paths, model, extra)
    return lines


def _own_lines(holding: Holding, here: str, there: str) -> list[str]:
    lines = []
    for name in holding.parameters:
        plain = is_name(name)
        lines.append(
            f"{here}.{name} = {there}.{name}"
            if plain
            else f"{here}.register_parameter({string(name)}, {attribute(there, name)})"
        )
    for name in holding.buffers:
        saved = "" if name not in holding.module._non_persistent_buffers_set else ", persistent=False"
        lines.append(f"{here}.register_buffer({string(name)}, {attribute(there, name)}{saved})")
    for name in holding.attributes:
        lines.append(
            f"{here}.{name} = {there}.{name}"
            if is_name(name)
            else f"setattr({here}, {string(name)}, {attribute(there, name)})"
        )
    return lines


def _comprehension_children(holding: Holding) -> dict[str, int]:
    """Return the children that a comprehension can cover: the first run of whole ones."""
    run: dict[str, int] = {}
    for name, part in holding.children.items():
        if not part.whole or not name.isdigit() or (run and int(name) != max(run.values()) + 1):
            break
        run[part.path] = int(name)
    return run if len(run) > 1 else {}


def _mirror(holding: Holding, model: nn.Module) -> str:
    if not is_keyed(holding.module):
        return "nn.Module()"
    run = _comprehension_children(holding)
    if not run:
        return "nn.ModuleDict()"
    there = original(model, holding.path)
    first, last = min(run.values()), max(run.values())
    span = f"range({last + 1})" if first == 0 else f"range({first}, {last + 1})"
    item = child(there, holding.module, "0", mirrored=False)
    if item != f"{there}[0]":
        item = f"{there}.get_submodule(str(index))"
    else:
        item = f"{there}[index]"
    return f"nn.ModuleDict({{str(index): {item} for index in {span}}})"


__all__ = ["WHOLE_MODEL", "Paths", "attribute", "init_lines", "is_keyed", "join"]
