"""Layer calls: layers of torch.nn as the functions that they call, so that the rules of functions hold for layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence

from gemini.batch_analysis.op_call import AnalysisRefused
from gemini.ir.pytree import Path

_POINTWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU,
    nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Threshold,
)  # fmt: skip


@dataclass(frozen=True)
class LayerCall:
    """A function with arguments; `places` are the attributes of the layer that hold its numbers."""

    name: str
    args: tuple[Any, ...]
    places: tuple[tuple[Path, Path], ...] = ()  # of an argument → of the attribute


@dataclass(frozen=True)
class _Layer:
    """A layer, the arguments of a call, and what stands for its weights."""

    module: Any
    args: tuple[Any, ...]
    weights: Callable[[str], Any]

    @property
    def both(self) -> tuple[Any, Any]:
        return self.weights("weight"), self.weights("bias")


def positional_arguments(layer: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the arguments of a layer by position; None where some are left out in between."""
    names = list(inspect.signature(type(layer).forward).parameters)[1 + len(args) :]
    if set(names[: len(named)]) != set(named):
        return None
    return (*args, *(named[name] for name in names[: len(named)]))


def layer_call(layer: nn.Module, args: tuple[Any, ...], weights: Callable[[str], Any]) -> LayerCall | None:
    """Return the function call of a layer with positional arguments; None for a layer without one.

    `weights` returns what stands for a parameter or buffer of the layer, None where the layer has none of that name.
    """
    if "forward" in vars(layer):
        return None
    if not args:
        return None
    if (name := _NAMES.get(type(layer))) is not None:
        return LayerCall(name, args)
    make = _CALLS.get(type(layer))
    return None if make is None else make(_Layer(layer, args, weights))


def _linear(one: _Layer) -> LayerCall:
    return LayerCall("linear", (*one.args, *one.both))


def _embedding(one: _Layer) -> LayerCall:
    layer = one.module
    options = (layer.padding_idx, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse)
    return LayerCall("embedding", (*one.args, one.weights("weight"), *options))


def _layer_norm(one: _Layer) -> LayerCall:
    return LayerCall("layer_norm", (*one.args, one.module.normalized_shape, *one.both))


def _convolution(one: _Layer) -> LayerCall | None:
    layer = one.module
    if layer.padding_mode != "zeros":
        return None
    given = (*one.args, *one.both, layer.stride, layer.padding, layer.dilation, layer.groups)
    return LayerCall(f"conv{len(layer.kernel_size)}d", given, (((("i", 6),), (("a", "groups"),)),))


def _group_norm(one: _Layer) -> LayerCall:
    given = (*one.args, one.module.num_groups, *one.both, one.module.eps)
    return LayerCall("group_norm", given, (((("i", 1),), (("a", "num_groups"),)),))


def _transposed_convolution(one: _Layer) -> LayerCall | None:
    layer = one.module
    if layer.padding_mode != "zeros" or len(one.args) > 1:
        return None
    given = (*one.args, *one.both, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
    return LayerCall(f"conv_transpose{len(layer.kernel_size)}d", given, (((("i", 6),), (("a", "groups"),)),))


def _flatten(one: _Layer) -> LayerCall:
    return LayerCall("flatten", (*one.args, one.module.start_dim, one.module.end_dim))


def _softmax(one: _Layer) -> LayerCall:
    return LayerCall("softmax", (*one.args, one.module.dim))


def _prelu(one: _Layer) -> LayerCall:
    return LayerCall("prelu", (*one.args, one.weights("weight")))


def _cross_entropy(one: _Layer) -> LayerCall:
    layer = one.module
    options = (None, layer.ignore_index, None, layer.reduction, layer.label_smoothing)
    return LayerCall("cross_entropy", (*one.args, one.weights("weight"), *options))


def _recurrent_layer(one: _Layer) -> LayerCall | None:
    layer = one.module
    if isinstance(one.args[0], PackedSequence):
        raise AnalysisRefused("packed sequences run whole")
    weights = [one.weights(name) for name in layer._flat_weights_names]
    options = (layer.num_layers, layer.bias, layer.dropout, layer.training, layer.bidirectional, layer.batch_first)
    states = one.args[1] if len(one.args) > 1 else None
    made = LayerCall("recurrent_layer", (one.args[0], states, weights, layer.mode, *options))
    return None if any(weight is None for weight in weights) else made


def _recurrent_cell(one: _Layer) -> LayerCall | None:
    layer = one.module
    weights = [one.weights(name) for name in ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") * layer.bias))]
    mode = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}.get(type(layer)) or f"RNN_{layer.nonlinearity.upper()}"
    states = one.args[1] if len(one.args) > 1 else None
    made = LayerCall("recurrent_cell", (one.args[0], states, weights, mode))
    return None if any(weight is None for weight in weights) else made


_CALLS: dict[type, Callable[[_Layer], LayerCall | None]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.PReLU: _prelu,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed_convolution),
    nn.Flatten: _flatten,
    nn.GroupNorm: _group_norm,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.CrossEntropyLoss: _cross_entropy,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _recurrent_layer),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _recurrent_cell),
}
_NAMES: dict[type, str] = {  # layers without weights and without numbers that count entries
    **dict.fromkeys(_POINTWISE, "relu"),
    nn.Dropout: "dropout",
    nn.Identity: "identity",
    **dict.fromkeys((nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d), "avg_pool1d"),
    **dict.fromkeys((nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d), "avg_pool2d"),
    **dict.fromkeys((nn.AvgPool3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d), "avg_pool3d"),
}
