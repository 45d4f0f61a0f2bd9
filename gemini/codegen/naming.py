"""Naming: what a value is called. First approximation: after the op or module that made it."""

from __future__ import annotations

import builtins
import keyword
import re

from gemini.capture.forms import Ref
from gemini.capture.graph import Graph

RESERVED = frozenset({*dir(builtins), *keyword.kwlist, *keyword.softkwlist, "self", "torch", "nn", "F", "Tensor"})


class Namer:
    """Names for the values of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def of(self, ref: Ref) -> str:
        """What a value would best be called."""
        node = self.graph.nodes[ref.node]
        if node.kind == "input":
            return identifier("_".join(str(step) for _, step in self.graph.inputs[ref.node]))
        stem = node.name.partition("#")[0].rpartition(".")[2]
        if stem.isdigit():
            stem = "_".join(node.name.partition("#")[0].split(".")[-2:])
        return identifier("_".join([stem.strip("_"), *(str(step) for _, step in ref.path)]))


def identifier(text: str) -> str:
    """The text as a Python identifier that hides nothing."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    name = f"value_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in RESERVED else name


def unique(name: str, taken: set[str]) -> str:
    """The name, numbered if it is taken."""
    if name not in taken:
        return name
    count = 2
    while f"{name}_{count}" in taken:
        count += 1
    return f"{name}_{count}"
