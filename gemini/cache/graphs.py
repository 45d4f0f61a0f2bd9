"""Graph cache: a captured graph is reused where the model, its code and the call are the same.

Capture compares graph and model on several batches, which takes as long as a few training steps. A verified graph is
stored under a key of everything that it depends on: the source files of the model's classes and of their imports, the
state of all modules, the call, and versions. A reused graph is compared with the model once more, on the current batch:
outputs, buffers and the autograd graph. So a global that the code reads (an option of the script) may have changed.
Where anything is uncertain, the model is captured again.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.cache_files import evict_oldest, hash_facts, mark_used, software_versions
from gemini.capture import capture, torch_flags
from gemini.capture.entry import attach_model
from gemini.capture.options import DEFAULT_OPTIONS, CaptureOptions
from gemini.capture.python_state import fingerprint
from gemini.capture.specialize import accepts_call
from gemini.capture.verify.gradient_record import autograd_graph_text
from gemini.capture.verify.step_observation import tensor_difference
from gemini.errors import GeminiError
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall, bind, signature_of
from gemini.ir.encode import tensors
from gemini.ir.graph import Graph
from gemini.ir.hook_tables import has_hooks
from gemini.ir.interpreter import GuardBroken, NodeFailed
from gemini.ir.out_spec import structure_of
from gemini.ir.serialize import load_graph
from gemini.ir.validity import describe_state
from gemini.snapshot.model_state import ModelSnapshot

_LIMIT = 64  # entries
_GRAPH = "graph.json"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_VERSIONED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "builtins"})  # identified by their versions


def load_or_capture(  # noqa: PLR0917
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: dict[str, Any],
    folder: Path | None,
    options: CaptureOptions = DEFAULT_OPTIONS,
) -> tuple[Graph, bool]:
    """Return the graph of a model and whether it came from the cache; `settings` and `options` are those of capture."""
    key = None if folder is None else _key(model, args, kwargs, settings, options)
    if folder is None or key is None:
        return capture(model, args, kwargs, **settings, options=options), False
    place = folder / key
    graph = _load(place, model, args, kwargs)
    if graph is not None:
        return graph, True
    graph = capture(model, args, kwargs, **settings, options=options)
    if not graph.is_whole and not graph.reassigned:
        _store(graph, place)
    return graph, False


# ── the key ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _key(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: dict[str, Any],
    options: CaptureOptions,
) -> str | None:
    """Return a key that differs where the graph might; None where that cannot be determined."""
    code = _hash_sources(model)
    if code is None or has_hooks(model):
        return None
    modules = dict(model.named_modules())
    facts: list[Any] = [
        software_versions(),
        settings,
        Region.current(),
        torch_flags.current_flags(),
        code,
    ]
    facts.append(signature_of(bind(model, args, kwargs)))
    facts += [*options.sample_dims(), options.repeats, options.opens_leaves]
    facts += describe_state(fingerprint(model, modules))
    for name, module in modules.items():
        plain = sorted((key, repr(value)) for key, value in vars(module).items() if isinstance(value, _PLAIN))
        facts.append((name, type(module).__qualname__, plain))
    facts += [(name, tuple(tensor.shape)) for name, tensor in model.state_dict(keep_vars=True).items()
              if isinstance(tensor, torch.Tensor)]  # fmt: skip
    return hash_facts(facts)


def _hash_sources(model: nn.Module) -> list[tuple[str, str]] | None:
    """Return the modules that define the model and their imports, with hashes; None if one has no file."""
    queue = sorted({cls.__module__ for module in model.modules() for cls in type(module).__mro__})
    queue += ["gemini.capture.driver", "gemini.capture.tracer"]  # a change of capture invalidates every entry
    found: dict[str, str] = {}
    while queue:
        name = queue.pop()
        if name in found or name.partition(".")[0] in _VERSIONED:
            continue
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        try:
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
        except OSError:
            found[name] = ""
        if not found[name]:
            return None
        queue += _imported_modules(module)
    return sorted(found.items())


def _imported_modules(module: Any) -> Iterator[str]:
    """Yield the modules of the functions, classes and modules in a namespace."""
    for value in list(vars(module).values()):
        if isinstance(value, types.ModuleType) and getattr(value, "__file__", None):
            yield value.__name__
        elif isinstance(value, (type, types.FunctionType)) and getattr(
            sys.modules.get(value.__module__), "__file__", None
        ):
            yield value.__module__


# ── entries ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _load(place: Path, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph | None:
    try:
        graph = attach_model(load_graph(place / _GRAPH), model)
    except GeminiError:
        return None
    if (
        graph.is_whole
        or not accepts_call(graph, bind(model, args, kwargs))
        or not _agrees(graph, model, ModelCall(args, kwargs))
    ):
        return None
    mark_used(place)
    return graph


def _agrees(graph: Graph, model: nn.Module, call: ModelCall) -> bool:
    """Return whether graph and model have equal results on a batch; nothing is left changed."""
    state = ModelSnapshot(model, watch=True)
    try:
        with state.watch_writes():
            args, kwargs = call.arguments()
            expected = _observe(model, model(*args, **kwargs), (args, kwargs))
            state.restore()
            args, kwargs = call.arguments()
            found = _observe(model, graph.execute(args, kwargs), (args, kwargs))
    except (GuardBroken, NodeFailed):
        return False
    finally:
        state.restore()
    if state.reassigned:
        return False
    same = expected[:2] == found[:2] and len(expected[2]) == len(found[2])
    return same and not any(tensor_difference(a, b) for a, b in zip(expected[2], found[2], strict=True))


def _observe(model: nn.Module, output: Any, arguments: Any) -> tuple[str, str, list[torch.Tensor]]:
    outputs = [tensor for _, tensor in tensors(output)]
    back = autograd_graph_text(model, outputs, [tensor for _, tensor in tensors(arguments)])
    made = [tensor.detach() for tensor in outputs]
    held = [tensor.detach().clone() for tensor in (*model.buffers(), *(t for _, t in tensors(arguments)))]
    return structure_of(output), back, [*made, *held]


def _store(graph: Graph, place: Path) -> None:
    """Store a graph; that it cannot be written is no error."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".", ignore_cleanup_errors=True) as scratch:
            fresh = Path(scratch) / "graph"
            graph.save(fresh / _GRAPH)
            shutil.rmtree(place, ignore_errors=True)
            fresh.rename(place)
    except (OSError, GeminiError):
        return
    evict_oldest(place.parent, _LIMIT)
