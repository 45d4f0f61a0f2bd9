"""Node costs: time and memory of one graph node, in ms and MB."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class NodeCost:
    """The cost of a node.

    Peaks count beyond the node's parameters, buffers and inputs. `saved_mb` is the memory saved from forward
    to backward, parameters excluded; `saved_values` lists the graph values among it, as indices of `Profile.values_mb`,
    since nodes that save the same value share it; `input_values` and `output_values` likewise, where a view has the
    index of its base.
    """

    id: int
    name: str
    kind: str
    node_class: str  # shared by nodes of equal cost
    pooled: int  # number of nodes in the class
    forward_ms: float
    backward_ms: float
    noise: float  # relative standard deviation of the two times together
    samples: int
    rejected: int
    forward_peak_mb: float
    backward_peak_mb: float
    parameter_mb: float
    buffer_mb: float
    input_mb: float
    output_mb: float
    saved_mb: float
    saved_own_mb: float
    flops: int  # forward and backward
    moved_mb: float  # bytes read and written by all kernels
    forward_flops: int = 0  # the forward part of both
    forward_moved_mb: float = 0.0
    host_ms: float = 0.0  # calling thread's part on an asynchronous device, forward and backward
    device_ms: float = 0.0  # the device's part
    source: str = "measured"
    reason: str = ""  # why it is not measured
    recomputed: bool = False
    parameters: tuple[str, ...] = ()  # names of parameters and buffers
    saved_values: tuple[int, ...] = ()
    input_values: tuple[int, ...] = ()
    output_values: tuple[int, ...] = ()
    weight_share: float | None = None  # share of backward that computes parameter gradients; None: not measured

    @property
    def ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

    def with_recomputation(self) -> NodeCost:
        """Return the cost if the node saves only its inputs and is recomputed in backward."""
        if self.recomputed or not self.backward_ms:
            return self
        return replace(
            self,
            recomputed=True,
            backward_ms=self.forward_ms + self.backward_ms,
            flops=self.flops + self.forward_flops,
            moved_mb=self.moved_mb + self.forward_moved_mb,
            backward_peak_mb=max(self.forward_peak_mb, self.backward_peak_mb),
            saved_mb=self.input_mb,
            saved_own_mb=0.0,
            saved_values=self.input_values,
        )
