"""Watch: whether a model's Python is exactly as it was, at a fraction of the cost of a fingerprint.

A fingerprint writes down all that the glue of a model may branch on, which takes milliseconds for a deep model. Most
often nothing has changed: the very same objects are where they were. That is quick to see; if anything at all is
another object, the fingerprint decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from gemini.capture.python_state import changeable_reads, config_facts, read_facts
from gemini.pipe.identity_guard import Sameness

_KIND = attrgetter("requires_grad", "dtype", "device", "shape")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Watch:
    """A model's objects as they are now."""

    def __init__(self, model: nn.Module, glue: Sequence[str]) -> None:
        self.modules = modules = dict(model.named_modules(remove_duplicate=False))
        opened = [modules[name] for name in glue if name in modules]
        read = {name.partition("@")[2] for name in glue if "@" in name}  # of modules that run whole, too
        spaces: list[dict[str, Any]] = [vars(module) for module in opened]
        spaces += [module.__dict__ for name, module in modules.items() if name in read]
        configs = {id(own["config"]): own["config"] for own in spaces if hasattr(own.get("config"), "__dict__")}
        hooks = [own[kind] for own in spaces for kind in _HOOKS]
        each = {id(module): module for module in modules.values()}.values()
        tensors = [held for module in each for held in (module._parameters, module._buffers)]
        children = [module._modules for module in each]
        self.objects = Sameness([*spaces, *hooks, *tensors, *children])
        self.tensors = [tensor for held in tensors for tensor in held.values() if tensor is not None]
        self.kinds = [*map(_KIND, self.tensors)]
        self.settings = Sameness(vars(config) for config in configs.values())
        self.default = torch.get_default_dtype()
        self.classes = [*map(type, modules.values())]
        self.reads = changeable_reads(model, glue)
        self.facts = read_facts(modules, self.reads)
        self.configs = [(config, config_facts(config, changeable=True)) for config in configs.values()]

    def is_unchanged(self, modules_are: bool = False) -> bool:
        """Whether everything is the same object as before; `modules_are`: those of all modules are known to be."""
        return (
            (modules_are or (self.objects.holds() and self._are_alike()))
            and self.settings.holds()
            and torch.get_default_dtype() is self.default
            and read_facts(self.modules, self.reads) == self.facts
            and all(config_facts(config, changeable=True) == facts for config, facts in self.configs)
        )

    def _are_alike(self) -> bool:
        """Whether tensors learn or not, and modules are of the classes, as before."""
        return [*map(_KIND, self.tensors)] == self.kinds and [*map(type, self.modules.values())] == self.classes
