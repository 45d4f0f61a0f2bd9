"""Recurrent ops: layers and cells of which the shards hold slices of the hidden units.

    gates of my units = W_ih[mine] x_t + W_hh[mine] h_{t-1}      h_{t-1} is whole
    my units of h_t   = cell(gates, c_{t-1}[mine])
    h_t               = those of all shards: an all-gather, and for its gradient a reduce-scatter

Products with the inputs of all steps are made at once. The directions of a layer take their steps together and share
the collective. Masks of dropout are those of whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import _VF, Tensor
from torch.nn import functional as F

from gemini.collectives.shard_group import active_group
from gemini.collectives.value_moves import move
from gemini.tensor_parallel.layouts import PARTIAL, PARTIAL_GRAD, Shard, take_shard

States: TypeAlias = Tensor | Sequence[Tensor] | None
_LAYERS: dict[str, Callable[..., Any]] = {
    "LSTM": _VF.lstm,
    "GRU": _VF.gru,
    "RNN_TANH": _VF.rnn_tanh,
    "RNN_RELU": _VF.rnn_relu,
}
_CELLS: dict[str, Callable[..., Any]] = {
    "LSTM": _VF.lstm_cell,
    "GRU": _VF.gru_cell,
    "RNN_TANH": _VF.rnn_tanh_cell,
    "RNN_RELU": _VF.rnn_relu_cell,
}
_GATES = {"LSTM": 4, "GRU": 3}


def recurrent_layer(  # noqa: PLR0917 - the attributes of the layer
    x: Tensor,
    states: States,
    weights: Sequence[Tensor],
    mode: str,
    num_layers: int,
    bias: bool,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    units: int = 0,
) -> Any:
    """Return (results, last states) of `nn.LSTM`, `nn.GRU` or `nn.RNN`: slices of `units` units, 0: the whole."""
    directions = 1 + bidirectional
    each = len(weights) // (num_layers * directions)
    cells = [_Cell(mode, weights[at : at + each], bias, units) for at in range(0, len(weights), each)]
    h, c = cells[0].initial_states(states, x, (len(cells), x.shape[0 if batch_first else 1]))
    if not units:
        given = h if c is None else (h, c)
        made = _LAYERS[mode](x, given, list(weights), bias, num_layers, dropout, training, bidirectional, batch_first)
        return made if c is None else (made[0], made[1:])
    values = x.transpose(0, 1) if batch_first else x
    ends: list[tuple[Tensor, Tensor | None]] = []
    own = values
    for at in range(0, len(cells), directions):
        if at and training and dropout:
            values = F.dropout(values, dropout)
        begin = [(h[one], None if c is None else c[one]) for one in range(at, at + directions)]
        values, own, last = _run_layer(values, begin, cells[at : at + directions], at + directions == len(cells))
        ends += last
    own = own.transpose(0, 1) if batch_first else own
    last_h = torch.stack([state for state, _ in ends])
    last_c = [state for _, state in ends if state is not None]
    return (own, (last_h, torch.stack(last_c))) if last_c else (own, last_h)


def recurrent_cell(x: Tensor, states: States, weights: Sequence[Tensor], mode: str, *, units: int = 0) -> Any:
    """Return the next states of `nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`: slices of `units` units, 0: the whole."""
    cell = _Cell(mode, weights, len(weights) > 2, units)
    h, c = cell.initial_states(states, x, (x.shape[0],))
    if not units:
        return _CELLS[mode](x, h if c is None else (h, c), *weights)
    own, c = cell.step(cell.project(x), h, c)
    return own if c is None else (own, c)


def _run_layer(
    values: Tensor, begin: list[tuple[Tensor, Tensor | None]], cells: Sequence[_Cell], is_last: bool
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor | None]]]:
    """Return the results of a layer, whole and in slices, and the last states; no whole ones of the last layer."""
    steps, count = len(values), len(cells)
    inputs = [cell.project(values).unbind(0) for cell in cells]
    h, c = [state for state, _ in begin], [state for _, state in begin]
    own: list[Tensor] = []
    wholes: list[list[Tensor]] = [[h[0]] * steps for _ in cells]
    slices: list[list[Tensor]] = [[h[0]] * steps for _ in cells]
    for step in range(steps):
        places = (step, steps - 1 - step)[:count]
        made = [cell.step(inputs[at][places[at]], h[at], c[at]) for at, cell in enumerate(cells)]
        own, c = [one for one, _ in made], [state for _, state in made]
        if not is_last or step < steps - 1 or cells[0].projection is not None:
            h = list(cells[0].join(torch.stack(own, 1)).unbind(1))
        if cells[0].projection is not None:
            own = [cell.slice_of(whole) for cell, whole in zip(cells, h, strict=True)]
        for at in range(count):
            wholes[at][places[at]], slices[at][places[at]] = h[at], own[at]
    whole = values if is_last else _join_directions(wholes)
    return whole, _join_directions(slices), list(zip(own, c, strict=True))


def _join_directions(values: list[list[Tensor]]) -> Tensor:
    """Return the values of all steps, those of each direction beside each other."""
    return torch.cat([torch.stack(one) for one in values], -1)


class _Cell:
    """The weights of a cell, and one step for the units of the shard."""

    def __init__(self, mode: str, weights: Sequence[Tensor], bias: bool, units: int) -> None:
        self.mode, self.units = mode, units
        self.w_ih, self.w_hh = weights[:2]
        self.b_ih: Tensor | None = weights[2] if bias else None
        self.b_hh: Tensor | None = weights[3] if bias else None
        self.projection = weights[-1] if len(weights) % 2 else None

    def initial_states(self, states: States, x: Tensor, lead: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Return h, whole, and the shard's units of c, which may be given whole."""
        own = self.w_ih.shape[0] // _GATES.get(self.mode, 1)
        if states is None:
            c = x.new_zeros(*lead, own) if self.mode == "LSTM" else None
            return x.new_zeros(*lead, self.w_hh.shape[1]), c
        if isinstance(states, Tensor):
            return states, None
        h, c = states
        return h, c if c.shape[-1] == own else self.slice_of(c)

    def project(self, values: Tensor) -> Tensor:
        """Return what the gates get of the inputs."""
        return F.linear(values, self.w_ih, self.b_ih)

    def step(self, inputs: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the shard's units of h and c; with a projection, its part of the sum h."""
        own, c = _STEPS[self.mode](self, inputs, F.linear(h, self.w_hh, self.b_hh), h, c)
        return own if self.projection is None else F.linear(own, self.projection), c

    def join(self, own: Tensor) -> Tensor:
        """Return h, whole."""
        if self.projection is not None:
            return move(own, PARTIAL, PARTIAL_GRAD)
        have = Shard(own.dim() - 1, self.w_hh.shape[1] // self.units)
        return move(own, have, PARTIAL_GRAD, self.units)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return the shard's units of a whole state."""
        group = active_group()
        return take_shard(whole, Shard(whole.dim() - 1, whole.shape[-1] // self.units), group.size, group.rank)


def _lstm_step(_: _Cell, inputs: Tensor, hidden: Tensor, __: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(cell: _Cell, inputs: Tensor, hidden: Tensor, h: Tensor, _: None) -> tuple[Tensor, None]:
    i, own = inputs.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = (i[0] + own[0]).sigmoid(), (i[1] + own[1]).sigmoid()
    new = (i[2] + reset * own[2]).tanh()
    return new + update * (cell.slice_of(h) - new), None


def _rnn_step(cell: _Cell, inputs: Tensor, hidden: Tensor, __: Tensor, _: None) -> tuple[Tensor, None]:
    return getattr(inputs + hidden, "tanh" if cell.mode == "RNN_TANH" else "relu")(), None


_STEPS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "LSTM": _lstm_step, "GRU": _gru_step, "RNN_TANH": _rnn_step, "RNN_RELU": _rnn_step,
}  # fmt: skip
