"""Model capture: the costs of a model of PyTorch, for the devices of a cluster.

A model whose devices are those of this machine (class `cpu`) is measured node by node; for any other class, or on the
meta device, times come from the roofline model of the profiler with the rates and efficiencies of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemini.cluster.cluster_description import Cluster
from gemini.cluster.device_class import DeviceClass
from gemini.tune.captured_costs import CapturedCosts, captured_costs

if TYPE_CHECKING:
    from torch import nn

    from gemini.profiling.device_specs import DeviceSpec

_NARROW = {"bf16": 0.5, "fp16": 0.5, "fp8": 0.5}  # of the bytes of single precision
CPU_FIXED_US = 8.0  # per node and pass on a CPU


def capture_model(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    cluster: Cluster | None = None,
    *,
    precision: str = "",
    progress: Callable[[int, int, str], None] | None = None,
) -> CapturedCosts:
    """Capture a model on one batch and return its costs on the devices of `cluster` (default: measured here).

    With a `precision`, computation in single precision is estimated in that one instead, as automatic mixed precision
    runs it.
    """
    from gemini.capture import capture
    from gemini.profiling import profile

    graph = capture(model, args, kwargs or {})
    device = None if cluster is None else cluster.device
    is_local = device is None or device.name.startswith("cpu")
    on_meta = next((one.device.type for one in model.parameters()), "cpu") == "meta"
    analytic = None if device is None or (is_local and not on_meta) else device_spec(device, precision)
    found = profile(graph, args, kwargs or {}, analytic=analytic, progress=progress, rounds=1 if is_local else 3)
    fixed = CPU_FIXED_US if device is None or is_local else device.kernel_us
    narrow = analytic is not None and precision in _NARROW
    return captured_costs(
        graph, found, count_samples(graph), fixed_us=fixed, width=_NARROW[precision] if narrow else 1.0
    )


def count_samples(graph: Any) -> int:
    """Return the size of the captured batch."""
    sizes = [
        meta.shape[meta.batch_dim] // meta.batch_factor
        for node in graph
        if node.kind == "input"
        for meta in node.outputs.values()
        if meta.batch_dim is not None and meta.shape
    ]
    if sizes:
        return max(1, int(min(sizes)))
    shapes = [meta.shape for node in graph if node.kind == "input" for meta in node.outputs.values() if meta.shape]
    return max(1, int(shapes[0][0])) if shapes else 1


def device_spec(device: DeviceClass, precision: str = "") -> DeviceSpec:
    """Return a device class as the profiler describes devices; single precision runs as `precision`."""
    from gemini.profiling.device_specs import describe_class

    spec = describe_class(device)
    rates = dict(spec.matrix_tflops)
    if precision:
        rates["float32"] = device.tflops.get(precision, rates["float32"])
    bandwidth = spec.bandwidth_gb / _NARROW.get(precision, 1.0)
    return replace(spec, matrix_tflops=rates, bandwidth_gb=bandwidth, calibrated=True)
