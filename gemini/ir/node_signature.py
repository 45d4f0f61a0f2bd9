"""Node signatures: a text, the same in every process, that is equal for equivalent nodes.

Equivalent nodes are the same function of the same sizes: kind and target, arguments (structure, plain values,
functions by name, which of them are one value), region, shapes and strides of inputs and results; for a module its
class, settings and tensor sizes, children included. A number that only enumerates equal layers (`layer_idx`) does not
count; `padding_idx`, the same in all, does.
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

from gemini.ir.callables import ClosureForm, MethodForm, PartialForm
from gemini.ir.hook_tables import has_hooks
from gemini.ir.import_paths import Symbol
from gemini.ir.pytree import (
    BackReference,
    Literal,
    MappingForm,
    ModelObject,
    Number,
    ObjectForm,
    Ref,
    SequenceForm,
    SliceForm,
)
from gemini.ir.symint import Expr

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import Node, TensorMeta

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_ORDINAL_NAMES = ("idx", "index", "id", "number", "no")
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_MAX_ITEMS = 64  # larger containers count by their type


def node_signature(graph: Graph, node: Node, *, costs: bool = True) -> str:
    """Return the signature of a node.

    Without `costs`, strides and gradient flags do not count: equal nodes compute the same at different costs.
    """
    names: dict[Ref, int] = {}

    def read(ref: Ref) -> Any:
        meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))  # None: not a tensor
        return names.setdefault(ref, len(names)), None if meta is None else _without_costs(meta, costs)

    facts: list[Any] = [node.kind, node.region, node.checkpoint, node.out_spec, len(node.mutates)]
    facts += [_form_facts(node.args, read), _form_facts(node.kwargs, read)]
    facts += sorted(
        (source, str(path), str(_without_costs(meta, costs))) for (source, path), meta in node.outputs.items()
    )
    facts += _module_facts(graph.model, node) if node.kind in ("module", "block") else [node.target]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _without_costs(meta: TensorMeta, costs: bool) -> TensorMeta:
    return meta if costs else replace(meta, strides=None, requires_grad=False)


def _form_facts(form: Any, read: Any) -> Any:
    """Return a form as plain data without node ids."""
    if isinstance(form, Ref):
        return read(form)
    if isinstance(form, Literal):
        return repr(form.value)
    if isinstance(form, Number):
        return _expression(form.expr)
    if isinstance(form, SequenceForm):
        return form.cls.__qualname__, [_form_facts(part, read) for part in form.items]
    if isinstance(form, (MappingForm, ObjectForm)):
        items = (*getattr(form, "items", ()), *form.state)
        return form.cls.__qualname__, [(repr(key), _form_facts(part, read)) for key, part in items]
    if isinstance(form, SliceForm):
        return [_form_facts(part, read) for part in (form.start, form.stop, form.step)]
    if isinstance(form, ClosureForm):
        return form.outer, form.indices, [_form_facts(part, read) for part in (*form.cells, *form.defaults)]
    if isinstance(form, PartialForm):
        return _form_facts(form.function, read), [
            _form_facts(part, read) for part in (*form.args, *(p for _, p in form.kwargs))
        ]
    if isinstance(form, MethodForm):
        return _form_facts(form.owner, read), form.name
    if isinstance(form, ModelObject):  # the module differs from layer to layer; the attribute does not
        return "owned", form.attribute
    return form if isinstance(form, (Symbol, BackReference)) else type(form).__name__


def _expression(expr: Any) -> Any:
    if isinstance(expr, Expr):
        return expr.op, [_expression(part) for part in expr.operands]
    return expr if isinstance(expr, (int, float, str)) else type(expr).__name__


# ── modules ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _module_facts(model: nn.Module | None, node: Node) -> list[Any]:
    if model is None:
        return [node.cls]
    module = model.get_submodule(node.target) if node.target else model
    ordinals = _ordinals(model)
    facts: list[Any] = [
        (name, f"{type(part).__module__}.{type(part).__qualname__}", has_hooks(part), _settings(part, ordinals))
        for name, part in module.named_modules()
    ]
    facts += [(name, *_tensor_facts(p), p.requires_grad) for name, p in module.named_parameters(remove_duplicate=False)]
    facts += [(name, *_tensor_facts(buffer)) for name, buffer in module.named_buffers(remove_duplicate=False)]
    return facts


def _tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.layout == torch.strided and not tensor.is_contiguous()
    return tuple(tensor.shape), str(tensor.dtype), str(tensor.layout), tensor.stride() if plain else ()


def _settings(part: nn.Module, ordinals: dict[type, set[str]]) -> list[tuple[str, Any]]:
    skipped = ordinals.get(type(part), set())
    return sorted(
        (key, repr(_setting(value))) for key, value in vars(part).items() if key not in _INTERNAL and key not in skipped
    )


def _setting(value: Any, depth: int = 0) -> Any:
    """Return the part of an attribute that distinguishes two modules."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, functools.partial):
        return _setting(value.func), _setting(value.args, depth + 1), _setting(value.keywords, depth + 1)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if depth < 3 and isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MAX_ITEMS:
        return type(value).__name__, _settings_of_items(value, depth)
    if depth < 3 and isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        return [(repr(key), _setting(part, depth + 1)) for key, part in value.items()]
    return type(value).__qualname__


def _settings_of_items(values: Iterable[Any], depth: int) -> list[Any]:
    found = [_setting(part, depth + 1) for part in values]
    return found if isinstance(values, (list, tuple)) else sorted(found, key=repr)


_ORDINALS: weakref.WeakKeyDictionary[nn.Module, dict[type, set[str]]] = weakref.WeakKeyDictionary()


def _ordinals(model: nn.Module) -> dict[type, set[str]]:
    """Return, per class, the attributes that enumerate its instances: integers by name, distinct in each."""
    if model not in _ORDINALS:
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
        _ORDINALS[model] = dict(found)
    return _ORDINALS[model]
