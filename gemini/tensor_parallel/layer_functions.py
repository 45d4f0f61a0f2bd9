"""Layer functions: layers of torch.nn whose parameters are slices, as calls of functions on these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.ir.pytree import Literal, MappingForm, Path, SequenceForm
from gemini.tensor_parallel.layer_calls import layer_call, positional_arguments

_FUNCTIONAL = "torch.nn.functional."
_NAMES: dict[type, str] = {nn.RMSNorm: "rms_norm", nn.LogSoftmax: "log_softmax"}
_RECURRENT: dict[type, str] = {
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), "gemini.collectives.recurrent_ops.recurrent_layer"),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), "gemini.collectives.recurrent_ops.recurrent_cell"),
}
_KEYWORDS: dict[type, tuple[str, ...]] = {nn.LayerNorm: ("eps",), nn.RMSNorm: ("eps",)}
_FUNCTIONS = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.PReLU, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.CrossEntropyLoss, *_RECURRENT,
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


def layer_function(layer: nn.Module, args: Any, kwargs: Any, weights: Callable[[str], Any]) -> LayerFunction | None:
    """Return the call that a layer makes with arguments of these forms; None for a layer that is not known.

    `weights` returns the form of a parameter by its name in the layer, or None.
    """
    if type(layer) not in _FUNCTIONS:
        return None
    given = positional_arguments(layer, tuple(getattr(args, "items", ())), dict(getattr(kwargs, "items", ())))
    call = None if given is None else layer_call(layer, given, weights)
    if given is None or call is None:
        return None
    name = _NAMES.get(type(layer), call.name)
    if (target := _RECURRENT.get(type(layer), _FUNCTIONAL + name)).startswith(_FUNCTIONAL) and not hasattr(
        torch.nn.functional, name
    ):
        return None
    options = tuple((key, Literal(getattr(layer, key))) for key in _KEYWORDS.get(type(layer), ()))
    forms = tuple(_form(one, given) for one in call.args)
    return LayerFunction(target, SequenceForm(tuple, forms), MappingForm(dict, options), call.places)


def _form(value: Any, given: tuple[Any, ...]) -> Any:
    """Return a plain argument as a form; those of the call, and what stands for parameters, are forms already."""
    if any(value is one for one in given):
        return value
    if isinstance(value, (tuple, list)):
        kind = type(value) if type(value) in (tuple, list) else tuple
        return SequenceForm(kind, tuple(_form(one, given) for one in value))
    return Literal(value) if value is None or isinstance(value, (bool, int, float, str)) else value
