"""Headline: a node of the syntax tree as one line.

Simple statements and expressions are shown as their source; compound statements as their heads:
`for x, y in loader`, `class Net(nn.Module)`, `def train(model, loader)`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from gemini.instrument.text.source_file import SourceFile


def headline(node: ast.AST, source: SourceFile | None = None) -> str:
    """Return the headline of `node`: as written in `source` if that is one line, else as unparsed."""
    head = _HEADS.get(type(node))
    if head is not None:
        return head(node)
    if source is not None and isinstance(node, (ast.expr, ast.stmt)):
        text = source.segment(node)
        if text and "\n" not in text and "\r" not in text:
            return text
    return " ".join(_text(node).split("\n"))


def _text(node: Any) -> str:
    if node is None:
        return ""
    try:
        return ast.unparse(node)
    except (AttributeError, RecursionError, ValueError):
        return type(node).__name__


def _target(node: ast.expr) -> str:
    """Return the targets of a loop, without the brackets of a tuple."""
    return ", ".join(map(_text, node.elts)) if isinstance(node, ast.Tuple) and node.elts else _text(node)


def _function(word: str) -> Callable[[Any], str]:
    def head(node: Any) -> str:
        returns = f" -> {_text(node.returns)}" if node.returns else ""
        return f"{word} {node.name}({_text(node.args)}){returns}"

    return head


def _class(node: ast.ClassDef) -> str:
    inside = [*map(_text, node.bases), *map(_text, node.keywords)]
    return f"class {node.name}({', '.join(inside)})" if inside else f"class {node.name}"


def _with(word: str) -> Callable[[Any], str]:
    return lambda node: f"{word} {', '.join(map(_text, node.items))}"


def _handler(node: ast.ExceptHandler) -> str:
    kind = f" {_text(node.type)}" if node.type else ""
    return f"except{kind}" + (f" as {node.name}" if node.name else "")


def _case(node: Any) -> str:
    guard = f" if {_text(node.guard)}" if node.guard else ""
    return f"case {_text(node.pattern)}{guard}"


_HEADS: dict[type[ast.AST], Callable[[Any], str]] = {
    ast.Module: lambda _: "module",
    ast.FunctionDef: _function("def"),
    ast.AsyncFunctionDef: _function("async def"),
    ast.ClassDef: _class,
    ast.For: lambda node: f"for {_target(node.target)} in {_text(node.iter)}",
    ast.AsyncFor: lambda node: f"async for {_target(node.target)} in {_text(node.iter)}",
    ast.While: lambda node: f"while {_text(node.test)}",
    ast.If: lambda node: f"if {_text(node.test)}",
    ast.With: _with("with"),
    ast.AsyncWith: _with("async with"),
    ast.Try: lambda _: "try",
    ast.ExceptHandler: _handler,
    ast.Match: lambda node: f"match {_text(node.subject)}",
    ast.match_case: _case,
}
if hasattr(ast, "TryStar"):
    _HEADS[ast.TryStar] = lambda _: "try (groups)"
