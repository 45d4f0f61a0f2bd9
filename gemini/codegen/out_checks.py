"""Output checks: select the nodes whose output structure must be compared with the captured one.

Blocks, functions and custom modules run arbitrary Python and may return another structure for another batch. Layers of
torch and code with a single return always return the same structure, and are not checked.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn

from gemini.capture.concretize import PARTS, short_name
from gemini.ir.graph import Graph
from gemini.ir.hook_tables import has_hooks
from gemini.ir.import_paths import Symbol
from gemini.ir.node import Node
from gemini.ir.pytree import Literal, MappingForm, ObjectForm, Ref, SequenceForm

_DIM = {"unbind": 1, "split": 2, "chunk": 2, "tensor_split": 2}


def needs_output_check(graph: Graph, node: Node) -> bool:
    """Return whether the structure of a node's result must be checked."""
    node = graph.nodes[node.id]  # as captured: a loop has its own references
    if not node.target:
        return False  # an opaque model may return any structure
    if node.kind == "op":
        return _parts_vary(graph, node)
    if node.out_spec != "T" or _mutable(node.args) or _mutable(node.kwargs):
        return node.kind not in ("module", "block") or not _is_layer(graph.bound_model().get_submodule(node.target))
    if node.kind == "function":
        module, _, name = node.target.partition(":")
        return _count_returns(Symbol(module, name).resolve().forward) != 1
    if node.kind != "module":
        return True
    module = graph.bound_model().get_submodule(node.target)
    return not _is_layer(module) and ("forward" in vars(module) or _count_returns(type(module).forward) != 1)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not has_hooks(module)


def _parts_vary(graph: Graph, node: Node) -> bool:
    """Return whether an op returns a list whose length depends on the number of samples."""
    short = short_name(node.target)
    if short not in PARTS or (graph.validity is not None and not graph.validity.batch):
        return False
    args, kwargs = getattr(node.args, "items", ()), dict(getattr(node.kwargs, "items", ()))
    given = args[0] if args else None
    meta = graph.nodes[given.node].outputs.get((given.source, given.path)) if isinstance(given, Ref) else None
    dim = kwargs.get("dim", args[_DIM[short]] if len(args) > _DIM[short] else Literal(0))
    if meta is None or not isinstance(dim, Literal) or meta.batch_factor == 0:
        return True
    return meta.batch_dim is not None and dim.value % max(len(meta.shape), 1) == meta.batch_dim


def _mutable(form: Any) -> bool:
    """Return whether arguments hold containers that a function may change."""
    parts = form.items if isinstance(form, SequenceForm) else [part for _, part in getattr(form, "items", ())]
    return any(
        isinstance(inner, (MappingForm, ObjectForm)) or (isinstance(inner, SequenceForm) and inner.cls is not tuple)
        for part in parts
        for inner in _containers(part)
    )


def _containers(form: Any) -> Any:
    if isinstance(form, (SequenceForm, MappingForm, ObjectForm)):
        yield form
        parts = (
            form.items if isinstance(form, SequenceForm) else [p for _, p in (*getattr(form, "items", ()), *form.state)]
        )
        for part in parts:
            yield from _containers(part)


@functools.lru_cache(maxsize=1024)
def _count_returns(function: Any) -> int:
    """Count the return statements of a function; 0 where its source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return 0
    inner = {id(part) for one in ast.walk(tree) if isinstance(one, ast.Lambda) for part in ast.walk(one)}
    functions = [one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for nested in functions[1:]:
        inner |= {id(part) for part in ast.walk(nested)}
    returns = [one for one in ast.walk(tree) if isinstance(one, ast.Return) and id(one) not in inner]
    return len(returns)
