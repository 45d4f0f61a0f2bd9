"""Cost signatures: the key of nodes with equal cost.

Nodes with equal signatures are equivalent (the same code on the same sizes) and have the same role in backward, so one
measurement serves all. A signature is text, the same in every process, so that it also keys the cache. For user code it
includes the byte code: a changed model finds no stale entry.
"""

from __future__ import annotations

import hashlib
import types
from typing import Any

from torch import nn

from gemini.ir.equivalence import node_signature
from gemini.ir.graph import Graph
from gemini.ir.import_paths import Symbol
from gemini.ir.node import MODULES, Node
from gemini.ir.op_targets import find_call
from gemini.ir.pytree import Ref, leaves
from gemini.profiling.gradient_flow import GradientFlow

_PLAIN = (bool, int, float, str, type(None), tuple, bytes)
_TORCH = ("torch.", "builtins")


def node_class_signature(graph: Graph, node: Node, flow: GradientFlow) -> str:
    """Return the signature of a node."""
    parts = [node.target if node.kind not in MODULES else node.cls, node_signature(graph, node)]
    parts += [
        _argument_pattern(node),
        _model_tensors_text(graph, node),
        _code_fingerprint(graph, node, flow.codes),
        repr(flow.readers(node)),
        str(len(node.mutates)),
    ]
    return "\n".join(parts)


def digest(text: str) -> str:
    """Return a short hash of a signature."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _argument_pattern(node: Node) -> str:
    """Describe which arguments are the same value: `f(x, x)` differs from `f(x, y)`."""
    seen: dict[Ref, int] = {}
    refs = (leaf for form in (node.args, node.kwargs) for leaf in leaves(form) if isinstance(leaf, Ref))
    return " ".join(str(seen.setdefault(ref, len(seen))) for ref in refs)


def _model_tensors_text(graph: Graph, node: Node) -> str:
    """Describe which arguments are parameters or buffers, and the buffers of a module."""
    kinds = [graph.nodes[ref.node].kind if graph.nodes[ref.node].is_source else "" for ref in node.inputs()]
    module = _module(graph, node)
    buffers = [] if module is None else [(name, tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers()]
    return f"{kinds} {buffers}"


def _module(graph: Graph, node: Node) -> nn.Module | None:
    if node.kind not in MODULES:
        return None
    model = graph.bound_model()
    return model.get_submodule(node.target) if node.target else model


def _code_fingerprint(graph: Graph, node: Node, known: dict[type, str]) -> str:
    module = _module(graph, node)
    if module is not None:
        return " ".join(dict.fromkeys(_class_code(type(part), known) for part in module.modules()))
    if node.kind == "function":
        where, _, qualname = node.target.partition(":")
        return _class_code(Symbol(where, qualname).resolve(), known)
    if node.kind == "call":
        owner, name = find_call(node.target)
        return _fingerprint([(name, getattr(owner, name))])
    return ""


def _class_code(cls: type, known: dict[type, str]) -> str:
    """Return a fingerprint of the code of a class, without that of torch and Python."""
    if cls not in known:
        owners = [owner for owner in cls.__mro__ if not owner.__module__.startswith(_TORCH)]
        members = [member for owner in owners for member in sorted(vars(owner).items(), key=lambda item: item[0])]
        known[cls] = _fingerprint(members)
    return known[cls]


def _fingerprint(members: list[tuple[str, Any]]) -> str:
    """Return a fingerprint of functions and of the user functions that they call by global name."""
    found = hashlib.sha256()
    waiting, seen = list(members), set()
    while waiting:
        name, member = waiting.pop(0)
        function = getattr(member, "__func__", member)
        code = getattr(function, "__code__", None)
        if not isinstance(code, types.CodeType) or code in seen:
            continue
        seen.add(code)
        found.update(name.encode() + _code_text(code))
        globals_ = getattr(function, "__globals__", {})
        called = [(other, globals_.get(other)) for other in sorted(_global_names(code))]
        waiting += [(other, one) for other, one in called if isinstance(one, types.FunctionType) and _is_user_code(one)]
    return found.hexdigest()[:16] if members else ""


def _is_user_code(function: types.FunctionType) -> bool:
    return not (function.__module__ or "").startswith(_TORCH)


def _global_names(code: types.CodeType) -> set[str]:
    nested = [_global_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*nested)


def _code_text(code: types.CodeType) -> bytes:
    """Return the byte code with its names and plain constants, nested functions included."""
    nested = b"".join(_code_text(part) for part in code.co_consts if isinstance(part, types.CodeType))
    plain = repr([part for part in code.co_consts if isinstance(part, _PLAIN)])
    return code.co_code + repr(code.co_names).encode() + plain.encode() + nested
