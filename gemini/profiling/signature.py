"""Signatures: what makes two nodes equal in cost.

Two nodes with one signature are alike by capture's reckoning (the same code on the same sizes) and take the same part
in backward; so one measurement serves both. A signature is text, the same in every process, so that it also names
an entry of the cache. Where code is the user's own, its byte code is part of it: another version of the model finds
no stale entry.
"""

from __future__ import annotations

import hashlib
import types
from typing import Any

from torch import nn

from gemini.capture.forms import Ref, leaves
from gemini.capture.graph import Graph
from gemini.capture.interception import find_call
from gemini.capture.node import MODULES, Node
from gemini.capture.structure import node_signature
from gemini.capture.symbols import Symbol
from gemini.profiling.flow import GradientFlow

_PLAIN = (bool, int, float, str, type(None))


def class_of(graph: Graph, node: Node, flow: GradientFlow) -> str:
    """The signature of a node."""
    parts = [node.target if node.kind not in MODULES else node.cls, node_signature(graph, node)]
    parts += [
        _pattern(node),
        _held(graph, node),
        _code_of(graph, node),
        repr(flow.readers(node)),
        str(len(node.mutates)),
    ]
    return "\n".join(parts)


def digest(text: str) -> str:
    """A short name for a signature."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _pattern(node: Node) -> str:
    """Which arguments are the same value: `f(x, x)` is not `f(x, y)`."""
    seen: dict[Ref, int] = {}
    refs = (leaf for form in (node.args, node.kwargs) for leaf in leaves(form) if isinstance(leaf, Ref))
    return " ".join(str(seen.setdefault(ref, len(seen))) for ref in refs)


def _held(graph: Graph, node: Node) -> str:
    """Which arguments are parameters or buffers, and the buffers of a module."""
    kinds = [graph.nodes[ref.node].kind if graph.nodes[ref.node].is_source else "" for ref in node.inputs()]
    module = _module(graph, node)
    buffers = [] if module is None else [(name, tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers()]
    return f"{kinds} {buffers}"


def _module(graph: Graph, node: Node) -> nn.Module | None:
    if node.kind not in MODULES:
        return None
    model = graph.bound_model()
    return model.get_submodule(node.target) if node.target else model


def _code_of(graph: Graph, node: Node) -> str:
    module = _module(graph, node)
    if module is not None:
        return " ".join(dict.fromkeys(_class_code(type(part)) for part in module.modules()))
    if node.kind == "function":
        where, _, qualname = node.target.partition(":")
        return _class_code(Symbol(where, qualname).resolve())
    if node.kind == "call":
        owner, name = find_call(node.target)
        return _fingerprint([(name, getattr(owner, name))])
    return ""


_CODES: dict[type, str] = {}


def _class_code(cls: type) -> str:
    """A fingerprint of the code of a class, without what torch and Python bring."""
    if cls not in _CODES:
        owners = [owner for owner in cls.__mro__ if not owner.__module__.startswith(("torch.", "builtins"))]
        members = [member for owner in owners for member in sorted(vars(owner).items(), key=lambda item: item[0])]
        _CODES[cls] = _fingerprint(members)
    return _CODES[cls]


def _fingerprint(members: list[tuple[str, Any]]) -> str:
    found = hashlib.sha256()
    for name, member in members:
        code = getattr(getattr(member, "__func__", member), "__code__", None)
        if isinstance(code, types.CodeType):
            found.update(name.encode() + code.co_code + repr(code.co_names).encode())
            found.update(repr([c for c in code.co_consts if isinstance(c, _PLAIN)]).encode())
    return found.hexdigest()[:16] if members else ""
