"""Learning: whether a tensor that is no parameter has begun to want gradients since a model was captured.

An attribute that a program turns into something trained (`model.scale.requires_grad_()`, another tensor in its place,
a computed one) changes nothing that a forward does, so no fingerprint shows it. But workers and stages were made to
give gradients of parameters only. Looked at are the tensors that the graph reads, and what modules hold that run whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from gemini.capture.provenance import get_held
from gemini.ir.encode import walk
from gemini.ir.graph import Graph

_TRAINED = attrgetter("requires_grad")
_CONTAINERS = (list, tuple, dict)
_OWN = frozenset(vars(nn.Module()))  # attributes that every module has


class Learning:
    """The tensors of one graph's model that are none of its parameters."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._read = [node.target for node in graph.nodes if node.kind == "attribute"]
        self._modules: object = None
        self._state: object = None
        self._whole = self._running_whole()
        self._before = {name for name, tensor in self._held() if _learns(name, tensor)}
        self._loose: list[torch.Tensor] = []  # in attributes, and which of them learn
        self._trained: list[bool] = []

    def begun(self, modules: object, state: object) -> str:
        """The name of one that has begun to; '' where none has.

        `modules` is another object where the model may have other modules, and `state`, unless it is None, where an
        attribute is another object.
        """
        if not torch.is_grad_enabled():
            return ""
        if modules is not self._modules:
            self._modules, self._whole = modules, self._running_whole()
        elif state is not None and state is self._state and [*map(_TRAINED, self._loose)] == self._trained:
            return ""
        held = [*self._held()]
        for name, tensor in held:
            if name not in self._before and _learns(name, tensor):
                return name
        # What is in containers may be replaced though they stay: such a model is looked at in every call.
        self._state = None if any("[" in name for name, _ in held) else state
        self._loose = [tensor for _, tensor in held]
        self._trained = [*map(_TRAINED, self._loose)]
        return ""

    def _running_whole(self) -> list[tuple[str, dict[str, Any]]]:
        """The attributes of modules whose Python is no part of the graph; torch's own read parameters and buffers."""
        validity = self._graph.validity
        glue = set() if validity is None else set(validity.glue)
        return [
            (name, vars(module))
            for name, module in self._graph.bound_model().named_modules()
            if name not in glue and not type(module).__module__.startswith("torch.nn.")
        ]

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._graph.bound_model()
        for name in self._read:
            try:
                found: Any = get_held(model, name)
            except (AttributeError, LookupError, TypeError):
                continue  # it is gone, as the model will find out
            if isinstance(found, torch.Tensor):
                yield name, found
        for prefix, own in self._whole:
            for key, value in own.items():
                if isinstance(value, torch.Tensor):
                    yield f".{prefix}.{key}", value
                elif isinstance(value, _CONTAINERS) and value and key not in _OWN:
                    yield from ((f".{prefix}.{key}[…]", one) for _, one in walk(value) if isinstance(one, torch.Tensor))


def _learns(name: str, tensor: torch.Tensor) -> bool:
    """What modules that run whole have computed is left of the last call."""
    return tensor.requires_grad and (tensor.is_leaf or not name.startswith("."))
