"""Signatures: what makes two nodes alike, as text that is the same in every process.

The same function of the same sizes: kind and target, arguments (their nest, plain values and functions by name, which
of them are one value), region, sizes of inputs and results with their place in memory; for a module its class,
settings and the sizes of what it holds, its children included. A number that only tells equal layers apart
(`layer_idx`) does not count; `padding_idx`, the same in all, does.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.ir.callables import Closure, Method, Partial
from gemini.ir.hook_tables import has_hooks
from gemini.ir.import_paths import Symbol
from gemini.ir.pytree import Again, Literal, Mapping, Number, Owned, Record, Ref, Sequence, Slice
from gemini.ir.symint import Expr

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import Node, TensorMeta

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_ORDINAL_NAMES = ("idx", "index", "id", "number", "no")
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_MANY = 64  # parts of a container that count


def node_signature(graph: Graph, node: Node, *, costs: bool = True) -> str:
    """A short text that is equal for alike nodes; without `costs`, for nodes that mean the same but may cost more:
    tensors lie otherwise in memory, or need a gradient.
    """
    names: dict[Ref, int] = {}

    def read(ref: Ref) -> Any:
        meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))  # None: an object that is no tensor
        return names.setdefault(ref, len(names)), None if meta is None else _known(meta, costs)

    facts: list[Any] = [node.kind, node.region, node.checkpoint, node.sketch, len(node.mutates)]
    facts += [_nest(node.args, read), _nest(node.kwargs, read)]
    facts += sorted((source, str(path), str(_known(meta, costs))) for (source, path), meta in node.outputs.items())
    facts += _module_facts(graph.model, node) if node.kind in ("module", "block") else [node.target]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _known(meta: TensorMeta, costs: bool) -> TensorMeta:
    return meta if costs else replace(meta, strides=None, requires_grad=False)


def _nest(form: Any, read: Any) -> Any:
    """A form as plain data without the names of nodes."""
    if isinstance(form, Ref):
        return read(form)
    if isinstance(form, Literal):
        return repr(form.value)
    if isinstance(form, Number):
        return _expression(form.expr)
    if isinstance(form, Sequence):
        return form.cls.__qualname__, [_nest(part, read) for part in form.items]
    if isinstance(form, (Mapping, Record)):
        items = (*getattr(form, "items", ()), *form.state)
        return form.cls.__qualname__, [(repr(key), _nest(part, read)) for key, part in items]
    if isinstance(form, Slice):
        return [_nest(part, read) for part in (form.start, form.stop, form.step)]
    if isinstance(form, Closure):
        return form.outer, form.indices, [_nest(part, read) for part in (*form.cells, *form.defaults)]
    if isinstance(form, Partial):
        return _nest(form.function, read), [_nest(part, read) for part in (*form.args, *(p for _, p in form.kwargs))]
    if isinstance(form, Method):
        return _nest(form.owner, read), form.name
    if isinstance(form, Owned):  # which module is a matter of the layer; what of it, is not
        return "owned", form.attribute
    return form if isinstance(form, (Symbol, Again)) else type(form).__name__


def _expression(expr: Any) -> Any:
    if isinstance(expr, Expr):
        return expr.op, [_expression(part) for part in expr.operands]
    return expr if isinstance(expr, (int, float, str)) else type(expr).__name__


# ── modules ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _module_facts(model: nn.Module | None, node: Node) -> list[Any]:
    if model is None:  # without the model, what is recorded must do
        return [node.cls]
    module = model.get_submodule(node.target) if node.target else model
    ordinals = _ordinals(model)
    facts: list[Any] = [
        (name, f"{type(part).__module__}.{type(part).__qualname__}", has_hooks(part), _settings(part, ordinals))
        for name, part in module.named_modules()
    ]
    facts += [(name, *_held(p), p.requires_grad) for name, p in module.named_parameters(remove_duplicate=False)]
    facts += [(name, *_held(buffer)) for name, buffer in module.named_buffers(remove_duplicate=False)]
    return facts


def _held(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.layout == torch.strided and not tensor.is_contiguous()
    return tuple(tensor.shape), str(tensor.dtype), str(tensor.layout), tensor.stride() if plain else ()


def _settings(part: nn.Module, ordinals: dict[type, set[str]]) -> list[tuple[str, Any]]:
    skipped = ordinals.get(type(part), set())
    return sorted(
        (key, repr(_setting(value))) for key, value in vars(part).items() if key not in _INTERNAL and key not in skipped
    )


def _setting(value: Any, depth: int = 0) -> Any:
    """What of an attribute tells two modules apart."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, functools.partial):
        return _setting(value.func), _setting(value.args, depth + 1), _setting(value.keywords, depth + 1)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if depth < 3 and isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MANY:
        return type(value).__name__, _some(value, depth)
    if depth < 3 and isinstance(value, dict) and len(value) <= _MANY:
        return [(repr(key), _setting(part, depth + 1)) for key, part in value.items()]
    return type(value).__qualname__


def _some(values: Iterable[Any], depth: int) -> list[Any]:
    found = [_setting(part, depth + 1) for part in values]
    return found if isinstance(values, (list, tuple)) else sorted(found, key=repr)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[type, set[str]]] = weakref.WeakKeyDictionary()


def _ordinals(model: nn.Module) -> dict[type, set[str]]:
    """Per class the attributes that number its instances: integers so named, another one in each."""
    if model not in _KNOWN:
        values: dict[tuple[type, str], list[int]] = defaultdict(list)
        counts: dict[type, int] = defaultdict(int)
        for module in model.modules():
            counts[type(module)] += 1
            for key, value in vars(module).items():
                if type(value) is int and key.rpartition("_")[2] in _ORDINAL_NAMES:
                    values[type(module), key].append(value)
        found: dict[type, set[str]] = defaultdict(set)
        for (cls, key), seen in values.items():
            if len(seen) == counts[cls] > 1 and len(set(seen)) == len(seen):
                found[cls].add(key)
        _KNOWN[model] = dict(found)
    return _KNOWN[model]
