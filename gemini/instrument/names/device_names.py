"""Names of devices and of CUDA-only functions in PyTorch source, shared by the device pass and the script API."""

from __future__ import annotations

# Device types that may be absent from a machine. All other types ("cpu", "meta") exist on every machine.
ACCELERATORS = frozenset({"cuda", "hip", "hpu", "mps", "mtia", "npu", "xla", "xpu"})

# Keywords of PyTorch functions whose values name a device; the script API has a function of the same name for each.
DEVICE_KEYWORDS = ("device", "device_type", "map_location", "pin_memory")

_TENSOR_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"

# Functions and classes that raise where CUDA is absent and that the script API replaces there.
CUDA_STUBS = frozenset(
    f"torch.{name}"
    for name in (
        *(f"cuda.{kind}Tensor" for kind in _TENSOR_TYPES.split()),
        "cuda.Event", "cuda.Stream", "cuda.amp.GradScaler", "cuda.amp.autocast", "cuda.current_device",
        "cuda.current_stream", "cuda.default_stream", "cuda.device", "cuda.get_device_capability",
        "cuda.get_device_name", "cuda.get_device_properties", "cuda.get_rng_state", "cuda.init", "cuda.initial_seed",
        "cuda.ipc_collect", "cuda.mem_get_info", "cuda.memory_summary", "cuda.nvtx.mark", "cuda.nvtx.range",
        "cuda.nvtx.range_pop", "cuda.nvtx.range_push", "cuda.reset_accumulated_memory_stats",
        "cuda.reset_max_memory_allocated", "cuda.reset_max_memory_cached", "cuda.reset_peak_memory_stats",
        "cuda.set_device", "cuda.set_per_process_memory_fraction", "cuda.set_rng_state", "cuda.set_stream",
        "cuda.synchronize", "Tensor.cuda", "nn.Module.cuda",
    )
)  # fmt: skip
