"""Allowances: what pure code may reach, as data. Everything that is not listed makes code impure.

    PLAIN        types whose values never change
    CONTAINERS   types that are followed into their items
    FUNCTIONS    modules whose functions and classes depend on their arguments alone, or on global random generators,
                 which are saved, compared and restored around trial runs
    DENIED       exceptions inside these modules
    DENIED_METHODS   methods that are not pure on any object
    STATEFUL     members of the classes of trusted libraries that are not pure
    LIBRARIES    packages whose code is trusted as a whole, and so are objects of their classes; their attributes are
                 checked where the model's own code names them
    OPS          name spaces of `torch.ops`
    VALUES       types of other modules whose objects are values

A name covers everything below it: `torch.nn` covers `torch.nn.functional.relu`. The longest matching name decides.
"""

from __future__ import annotations

import collections
import random
import types
from collections import deque
from enum import Enum
from typing import Any

import numpy as np
import torch

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), slice, range, Enum,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, np.generic, np.dtype,
)  # fmt: skip
CONTAINERS = (
    list, tuple, dict, set, frozenset, deque, types.MappingProxyType, collections.UserDict, collections.UserList,
    collections.ChainMap,
)  # fmt: skip

FUNCTIONS = frozenset(
    [
        "abc", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "decimal", "enum",
        "fractions", "functools", "heapq", "inspect", "itertools", "math", "numbers", "numpy", "operator", "re",
        "_operator", "_functools", "_collections", "_collections_abc", "_bisect", "_heapq", "statistics", "string",
        "struct", "torch", "types", "typing", "typing_extensions", "warnings", "_warnings", "_abc", "_typing",
        "torch.profiler.record_function", "torch.autograd.profiler.record_function", "time.sleep",
    ]
)  # fmt: skip
DENIED = frozenset(
    [
        "builtins.open", "builtins.input", "builtins.print", "builtins.exec", "builtins.eval", "builtins.compile",
        "builtins.globals", "builtins.__import__", "builtins.breakpoint", "builtins.id", "builtins.hash",
        "builtins.exit", "builtins.quit", "builtins.help",
        "numpy.load", "numpy.save", "numpy.savez", "numpy.savez_compressed", "numpy.savetxt", "numpy.loadtxt",
        "numpy.genfromtxt", "numpy.fromfile", "numpy.memmap", "numpy.random", "numpy.lib", "numpy.seterr",
        "numpy.geterr", "numpy.seterrcall", "numpy.geterrcall", "numpy.getbufsize", "numpy.setbufsize",
        "numpy.get_printoptions", "numpy.set_printoptions", "numpy.printoptions",
        "decimal.getcontext", "decimal.setcontext", "decimal.localcontext",
        "warnings.warn", "warnings.warn_explicit", "warnings.showwarning", "warnings.simplefilter",
        "warnings.filterwarnings", "warnings.resetwarnings", "warnings.filters",
        "torch.Generator", "torch.save", "torch.load", "torch.serialization",
        "torch.hub", "torch.distributed", "torch.multiprocessing",
        "torch.utils.data", "torch.utils.tensorboard", "torch.utils.cpp_extension", "torch.package", "torch.classes",
        "torch._C.Generator", "torch.from_file", "torch.UntypedStorage", "torch.TypedStorage", "torch.jit.load",
        "torch.jit.save", "torch.onnx", "torch.export", "torch.profiler", "torch.autograd.profiler", "torch.cuda.Event",
        "torch.cuda.memory", "torch.cuda.memory_allocated", "torch.cuda.max_memory_allocated", "torch.futures",
        "torch.ops.load_library", "torch.utils.benchmark", "torch.seed", "torch.random.seed", "torch.set_num_threads",
        "torch.set_default_dtype", "torch.set_default_device", "torch.set_default_tensor_type",
        "torch.use_deterministic_algorithms", "torch.set_float32_matmul_precision", "torch.set_flush_denormal",
        "inspect.stack", "inspect.currentframe", "inspect.trace", "inspect.getouterframes", "inspect.getinnerframes",
        "inspect.getsource", "inspect.getsourcelines", "inspect.getsourcefile", "inspect.getfile",
        "scipy.io", "scipy.datasets", "torchvision.io", "torchvision.datasets", "torchvision.utils.save_image",
        "torchaudio.load", "torchaudio.save", "torchaudio.datasets", "transformers.utils.logging", "timm.data",
        "lightning.pytorch.loggers", "pytorch_lightning.loggers", "accelerate.tracking", "accelerate.logging",
        "safetensors.torch.load_file", "safetensors.torch.save_file", "safetensors.safe_open",
    ]
)  # fmt: skip
DENIED_METHODS = frozenset(
    [
        "tofile", "write_bytes", "write_text", "read_bytes", "read_text", "share_memory_", "__defaults__",
        "__kwdefaults__", "__closure__", "cell_contents", "__globals__", "f_globals", "f_locals", "__subclasses__",
        "cache_info", "cache_clear",  # of memoized functions
    ]
)  # fmt: skip
STATEFUL = {  # members of library classes that have effects, or that change during a run, by root of the library
    "lightning": frozenset(
        [
            "log", "log_dict", "print", "trainer", "logger", "loggers", "fabric", "optimizers", "lr_schedulers",
            "manual_backward", "backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "all_gather",
            "current_epoch", "global_step", "global_rank", "local_rank", "on_gpu",
        ]
    ),
    "accelerate": frozenset(["print", "log", "step", "backward", "gather", "reduce", "trackers", "wait_for_everyone"]),
    "torchmetrics": frozenset(["reset", "sync", "unsync"]),
}  # fmt: skip
STATEFUL["pytorch_lightning"] = STATEFUL["lightning"]
LIBRARIES = frozenset(
    [
        "accelerate", "diffusers", "einops", "flash_attn", "lightning", "lightning_fabric", "lightning_utilities",
        "peft", "pytorch_lightning", "safetensors", "scipy", "sentence_transformers", "timm", "tokenizers", "torch",
        "torchaudio", "torchmetrics", "torchvision", "transformers", "xformers", "gemini",
    ]
)  # fmt: skip
VALUES = frozenset(
    [
        "argparse.Namespace", "argparse._AttributeHolder",
        "_collections", "collections", "dataclasses", "decimal", "fractions", "functools.partial",
        "inspect",
        "operator", "re.Pattern", "types", "typing", "typing_extensions", "contextlib.nullcontext", "numpy.ufunc",
        "numpy.finfo", "numpy.iinfo", "_abc", "uuid.UUID",
    ]
)  # fmt: skip
OPS = frozenset(  # name spaces of `torch.ops` whose ops are pure, those written in Python too
    [
        "aten", "flash_attn", "higher_order", "inductor", "mkl", "mkldnn", "onednn", "prims", "profiler", "quantized",
        "rngprims", "timm", "torchaudio", "torchvision", "xformers",
    ]
)  # fmt: skip
_GLOBAL_GENERATORS = (random._inst, np.random.mtrand._rand)


def is_allowed(name: str) -> bool:
    """Return whether a function or class with this full name is pure."""
    return _longest(name, FUNCTIONS) > _longest(name, DENIED)


def is_denied(name: str) -> bool:
    """Return whether a name is one of the exceptions inside the allowed modules."""
    return _longest(name, DENIED) > _longest(name, FUNCTIONS)


def is_of_library(module: str) -> bool:
    """Return whether a module belongs to a trusted library."""
    return module.partition(".")[0] in LIBRARIES and _longest(module, DENIED) < 0


def is_value_type(kind: type) -> bool:
    """Return whether objects of a class are values, or are trusted with the library of the class."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return _longest(name, VALUES) >= 0 or (is_of_library(kind.__module__) and _longest(name, DENIED) < 0)


def is_global_generator(value: Any) -> bool:
    """Return whether a value is Python's or NumPy's global generator, whose use is detected and restored."""
    return any(value is one for one in _GLOBAL_GENERATORS)


def _longest(name: str, listed: frozenset[str]) -> int:
    """Return the length of the longest listed name that covers a name; -1 if none does."""
    while name not in listed:
        name, _, rest = name.rpartition(".")
        if not rest or not name:
            return -1
    return len(name)
