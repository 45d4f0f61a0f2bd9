"""Shard costs: the time of ops and collectives on shards, from measured times where there are any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from gemini.tensor_parallel.layouts import Layout, Shard, conversions, move_collectives, unit_range, wire_bytes
from gemini.tensor_parallel.node_ports import NodeCall
from gemini.tensor_parallel.strategies import Strategy

_PRODUCTS = (
    "linear", "addmm", "baddbmm", "addmv", "matmul", "rmatmul", "bmm", "mm", "mv", "einsum", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
    "_grouped_mm", "grouped_mm", "bilinear",
)  # fmt: skip
_VIEWS = frozenset((
    "view", "reshape", "transpose", "permute", "t", "get_T", "get_mT", "expand", "expand_as", "unsqueeze", "squeeze",
    "split", "chunk", "unbind", "select", "narrow", "getitem", "flatten", "unflatten", "identity", "detach", "view_as",
    "movedim", "to", "contiguous", "float", "swapaxes", "split_with_sizes", "alias",
))  # fmt: skip
_ROWS = ("index_add", "scatter_add", "setitem")  # in place they touch the rows that they write
_PASSES = 3.0  # a forward and, twice as long, its backward
_FORWARD_ONLY = frozenset(("add", "sub", "cat", "stack"))  # their backward passes gradients on


@dataclass(frozen=True)
class ShardCosts:
    """Speeds of one shard and its links, and measured times of nodes where there are any.

    `node_ms` are times of whole nodes per step, forward and backward; those of other nodes follow from their flops and
    bytes.
    """

    link_gb: float = 3.0  # 10⁹ bytes per second that a shard sends
    latency_us: float = 7.0  # of a collective
    gflops: float = 50.0  # of matrix products
    memory_gb: float = 20.0  # 10⁹ bytes per second that other ops read and write
    node_ms: Mapping[int, float] = field(default_factory=dict)

    def collective_ms(self, name: str, size: float, count: int) -> float:
        """Return the time of a collective over a whole value of `size` bytes."""
        return self.latency_us * 1e-3 + self.transfer_ms(name, size, count) if name else 0.0

    def transfer_ms(self, name: str, size: float, count: int) -> float:
        """Return the time of the bytes of a collective alone."""
        return wire_bytes(name, size, count) / self.link_gb * 1e-6

    def work_ms(self, call: NodeCall) -> float:
        """Return the time of a whole node per step."""
        if call.node.is_source:
            return 0.0
        if call.node.id in self.node_ms:
            return self.node_ms[call.node.id]
        passes = _PASSES if any(port.grad for port in call.results) else 1.0
        if call.name.startswith("recurrent_"):
            return passes * 2 * _recurrent_products(call) / self.gflops * 1e-6
        made = sum(prod(port.shape) for port in call.results)
        if call.name in _PRODUCTS and len(call.inputs) > 1:
            return passes * 2 * made * _depth(call) / self.gflops * 1e-6
        ports = call.inputs[1:] if call.node.mutates and call.name in _ROWS else (*call.inputs, *call.results)
        size = sum(prod(port.shape) * port.dtype.itemsize for port in ports)
        passes = 1.0 if call.name in _FORWARD_ONLY else passes
        return float(passes * size / self.memory_gb * 1e-6 * (0.02 if call.name in _VIEWS else 1.0))

    def strategy_ms(self, call: NodeCall, strategy: Strategy, work_ms: float, count: int) -> float:
        """Return the time of a node under a strategy, on the shard that has most to do."""
        layouts = (*strategy.inputs, *strategy.results)
        share = 1.0
        drawn = call.node.random and "dropout" in call.name  # every shard draws the random numbers of the whole
        if strategy.units and not drawn and any(isinstance(layout, Shard) for layout in layouts):
            start, stop = unit_range(strategy.units, count, 0)
            share = (stop - start) / strategy.units
        return work_ms * share + sum(
            one.times * self.collective_ms(one.name, one.size, count) for one in strategy.collectives
        )

    def conversion_ms(self, have: Layout, wanted: frozenset[Layout], size: float, count: int, grad: bool) -> float:
        """Return the time of all moves that make the wanted versions of a value."""
        return sum(
            self.collective_ms(name, size, count)
            for one in conversions(have, wanted, grad)
            for name in move_collectives(*one, grad)
        )


def _recurrent_products(call: NodeCall) -> float:
    """Return the multiplications of all steps of a recurrent layer."""
    weights = sum(prod(port.shape) for port in call.inputs if isinstance(port.key, str))
    return float(weights * prod(call.inputs[0].shape[:-1]))


def _depth(call: NodeCall) -> float:
    """Return the multiplications per element of the result."""
    first, second = call.inputs[0].shape, call.inputs[1].shape
    if call.name == "scaled_dot_product_attention":
        return 2.0 * second[-2]
    if call.name.startswith("conv_transpose"):
        return float(prod(second) / call.results[0].shape[1])
    if call.name.startswith("conv"):
        return float(prod(second[1:]))
    if call.name == "linear":
        return float(second[-1])
    if call.name in ("addmm", "baddbmm"):
        return float(second[-1])
    return float(first[-1]) if first else 1.0
