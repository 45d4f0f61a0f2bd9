"""Layer functions: layers of torch.nn whose parameters are slices, as calls of functions on these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.ir.pytree import Literal, MappingForm, Path, SequenceForm
from gemini.tensor_parallel.layer_calls import layer_call

_FUNCTIONAL = "torch.nn.functional."
_NAMES: dict[type, str] = {nn.RMSNorm: "rms_norm", nn.LogSoftmax: "log_softmax"}
_KEYWORDS: dict[type, tuple[str, ...]] = {nn.LayerNorm: ("eps",), nn.RMSNorm: ("eps",)}
_FUNCTIONS = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.PReLU, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm,
    nn.CrossEntropyLoss,
)  # fmt: skip


@dataclass(frozen=True)
class LayerFunction:
    """A function with the forms of its arguments; `places` are the attributes of the layer that hold its numbers."""

    target: str
    args: SequenceForm
    kwargs: MappingForm
    places: tuple[tuple[Path, Path], ...]

    def place_of(self, attribute: Path) -> Path:
        """Return where the number of an attribute is among the arguments."""
        return next((argument for argument, held in self.places if held == attribute), attribute)


def layer_function(layer: nn.Module, args: Any, weights: Callable[[str], Any]) -> LayerFunction | None:
    """Return the call that a layer makes with arguments of these forms; None for a layer that is not known.

    `weights` returns the form of a parameter by its name in the layer, or None.
    """
    if type(layer) not in _FUNCTIONS:
        return None
    call = layer_call(layer, tuple(getattr(args, "items", ())), weights)
    if call is None or not hasattr(torch.nn.functional, name := _NAMES.get(type(layer), call.name)):
        return None
    kwargs = tuple((key, Literal(getattr(layer, key))) for key in _KEYWORDS.get(type(layer), ()))
    forms = tuple(_form(one, args) for one in call.args)
    return LayerFunction(f"{_FUNCTIONAL}{name}", SequenceForm(tuple, forms), MappingForm(dict, kwargs), call.places)


def _form(value: Any, args: Any) -> Any:
    """Return a plain argument as a form; those of the call, and what stands for parameters, are forms already."""
    if any(value is one for one in getattr(args, "items", ())):
        return value
    if isinstance(value, (tuple, list)):
        return SequenceForm(
            type(value) if type(value) in (tuple, list) else tuple, tuple(Literal(one) for one in value)
        )
    return Literal(value) if value is None or isinstance(value, (bool, int, float, str)) else value
