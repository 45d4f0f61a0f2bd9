"""Model guards of a piped call: check that the model is in the state that its stages were generated for.

ObjectIdentities   the values of some dictionaries are the same objects as before: loops in C over one flat list
PythonStateGuard   the Python state of a model is unchanged, at a fraction of the cost of a fingerprint
GradientGuard      no tensor that is not a parameter has started to require a gradient
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn

from gemini.capture.python_state import changeable_reads, config_facts, read_facts
from gemini.ir.encode import walk
from gemini.ir.graph import Graph
from gemini.ir.interpreter import find_model_tensor

_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")  # scripted modules have tables like dictionaries
_TENSOR_FACTS = attrgetter("requires_grad", "dtype", "device", "shape")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TRAINED = attrgetter("requires_grad")
_CONTAINERS = (list, tuple, dict)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes that every module has


class ObjectIdentities:
    """The contents of some dictionaries at construction."""

    def __init__(self, spaces: Iterable[dict[Any, Any]]) -> None:
        watched = list(spaces)
        self._empty = [space for space in watched if not space]
        self._full = [space for space in watched if space]
        self._sizes, self._names = [*map(len, self._full)], [*chain.from_iterable(map(_KEYS, self._full))]
        self._values = [*chain.from_iterable(map(_VALUES, self._full))]

    def are_unchanged(self) -> bool:
        """Return whether the dictionaries have the same keys, in the same order, with the same objects."""
        return (
            not any(self._empty)
            and [*map(len, self._full)] == self._sizes
            and [*chain.from_iterable(map(_KEYS, self._full))] == self._names
            and all(map(is_, chain.from_iterable(map(_VALUES, self._full)), self._values))
        )


class PythonStateGuard:
    """The objects of a model at construction.

    A fingerprint records all that the Python of a model may branch on, which takes milliseconds for a deep model.
    Usually all objects are still the same, which is cheap to verify; otherwise the fingerprint decides.
    """

    def __init__(self, model: nn.Module, glue: Sequence[str]) -> None:
        self.modules = modules = dict(model.named_modules(remove_duplicate=False))
        opened = [modules[name] for name in glue if name in modules]
        read = {name.partition("@")[2] for name in glue if "@" in name}  # also of modules that run as one node
        spaces: list[dict[str, Any]] = [vars(module) for module in opened]
        spaces += [module.__dict__ for name, module in modules.items() if name in read]
        configs = {id(own["config"]): own["config"] for own in spaces if hasattr(own.get("config"), "__dict__")}
        hooks = [own[kind] for own in spaces for kind in _HOOKS]
        each = {id(module): module for module in modules.values()}.values()
        tensors = [held for module in each for held in (module._parameters, module._buffers)]
        children = [module._modules for module in each]
        self.objects = ObjectIdentities([*spaces, *hooks, *tensors, *children])
        self.tensors = [tensor for held in tensors for tensor in held.values() if tensor is not None]
        self.kinds = [*map(_TENSOR_FACTS, self.tensors)]
        self.settings = ObjectIdentities(vars(config) for config in configs.values())
        self.default = torch.get_default_dtype()
        self.classes = [*map(type, modules.values())]
        self.reads = changeable_reads(model, glue)
        self.facts = read_facts(modules, self.reads)
        self.configs = [(config, config_facts(config, changeable=True)) for config in configs.values()]

    def is_unchanged(self, modules_unchanged: bool = False) -> bool:
        """Return whether every object is the same; `modules_unchanged`: the caller has verified all modules."""
        return (
            (modules_unchanged or (self.objects.are_unchanged() and self._are_tensors_unchanged()))
            and self.settings.are_unchanged()
            and torch.get_default_dtype() is self.default
            and read_facts(self.modules, self.reads) == self.facts
            and all(config_facts(config, changeable=True) == facts for config, facts in self.configs)
        )

    def _are_tensors_unchanged(self) -> bool:
        """Return whether requires_grad, dtype, device and shape of tensors and the classes of modules are the same."""
        return [*map(_TENSOR_FACTS, self.tensors)] == self.kinds and [*map(type, self.modules.values())] == self.classes


class GradientGuard:
    """The tensors of a model that are no parameters.

    An attribute that the script turns into a trained tensor (`model.scale.requires_grad_()`) does not change the
    forward, so no fingerprint shows it. But stages and workers return gradients of parameters only. The guard inspects
    the tensors that the graph reads, and those of modules that run as one node.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._read = [node.target for node in graph.nodes if node.kind == "attribute"]
        self._modules: object = None
        self._state: object = None
        self._opaque = self._opaque_modules()
        self._before = {name for name, tensor in self._tensors() if _requires_grad(name, tensor)}
        self._inspected: list[torch.Tensor] = []  # the inspected tensors, and their requires_grad
        self._trained: list[bool] = []

    def find_new_gradient(self, modules: object, state: object) -> str:
        """Return the name of a tensor that newly requires a gradient; '' where none does.

        `modules` is a token that changes with the modules of the model, `state`, unless None, one that changes with any
        attribute.
        """
        if not torch.is_grad_enabled():
            return ""
        if modules is not self._modules:
            self._modules, self._opaque = modules, self._opaque_modules()
        elif state is not None and state is self._state and [*map(_TRAINED, self._inspected)] == self._trained:
            return ""
        tensors = [*self._tensors()]
        for name, tensor in tensors:
            if name not in self._before and _requires_grad(name, tensor):
                return name
        # The content of a container may be replaced while the container stays: such a model is inspected in every call.
        self._state = None if any("[" in name for name, _ in tensors) else state
        self._inspected = [tensor for _, tensor in tensors]
        self._trained = [*map(_TRAINED, self._inspected)]
        return ""

    def _opaque_modules(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the attributes of modules that are one node; those of torch.nn read parameters and buffers only."""
        validity = self._graph.validity
        glue = set() if validity is None else set(validity.glue)
        return [
            (name, vars(module))
            for name, module in self._graph.bound_model().named_modules()
            if name not in glue and not type(module).__module__.startswith("torch.nn.")
        ]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._graph.bound_model()
        for name in self._read:
            try:
                found: Any = find_model_tensor(model, name)
            except (AttributeError, LookupError, TypeError):
                continue  # the attribute is missing: the model itself will raise
            if isinstance(found, torch.Tensor):
                yield name, found
        for prefix, own in self._opaque:
            for key, value in own.items():
                if isinstance(value, torch.Tensor):
                    yield f".{prefix}.{key}", value
                elif isinstance(value, _CONTAINERS) and value and key not in _MODULE_ATTRIBUTES:
                    yield from ((f".{prefix}.{key}[…]", one) for _, one in walk(value) if isinstance(one, torch.Tensor))


def _requires_grad(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor requires a gradient, without results of earlier calls in modules that are one node."""
    return tensor.requires_grad and (tensor.is_leaf or not name.startswith("."))
