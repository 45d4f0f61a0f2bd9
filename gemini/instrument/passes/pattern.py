"""Declarative passes: a pattern with holes and its replacement.

    Rewrite("torch.nn.Linear($args)", "mylib.Linear($args)")

The pattern matches resolved names, under any alias in the file; the content of the holes stays as written, including
comments, on its own lines. Names in the replacement refer to modules that the user's file need not import. They are
written as importing expressions,

    __import__("mylib").Linear(3, 4)
    __import__("mylib.layers", fromlist=["__name__"]).Linear(3, 4)

which add no name to the file and import nothing before the expression runs. The part before the last dot is the module
unless `module=` names it (``module="mylib"`` for ``mylib.Factory.make``). The reserved name ``__gemini__`` stands for
`gemini.managed` as in any other pass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gemini.instrument.pass_manager.prelude_import import RESERVED
from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.pattern_match import Arguments, Match, Matcher
from gemini.instrument.passes.template import ANYTHING, ARGS, Template, bound_inside, hole_name, qualified_name
from gemini.instrument.text.edits import Edit, Span
from gemini.nearest_name import remedy

# Expressions that need no brackets in any context.
_ATOMS = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.JoinedStr)


class Rewrite(Pass):
    """A pass that replaces every match of `pattern` by `replacement`."""

    def __init__(
        self,
        pattern: str,
        replacement: str,
        *,
        name: str = "",
        description: str = "",
        needs: tuple[str, ...] = (),
        module: str = "",
    ) -> None:
        self.pattern = Template(pattern)
        self.replacement = Template(replacement, "replacement")
        self._module = module
        self._check()
        self.name = name or f"rewrite {pattern}"
        self.description = description or f"{pattern} → {replacement}"
        self.needs = needs
        self.triggers = _triggers(self.pattern.tree)
        self._matcher = Matcher(self.pattern)

    def edits(self, unit: Unit) -> Iterator[Edit]:
        """Yield one edit per match."""
        for match in self._matcher.find(unit):
            yield Edit.rebuild(match.node, _ReplacementRenderer(self, unit, match).parts(), self.description)

    def _check(self) -> None:
        pattern, replacement = self.pattern, self.replacement
        if hole_name(pattern.tree) is not None:
            raise pattern.fault(pattern.tree, "a single hole matches everything", "write the expression to replace")
        for template in (pattern, replacement):
            for node in ast.walk(template.tree):
                name = qualified_name(node)
                if isinstance(node, ast.Name) and name and "." not in name and not _is_root(node, template.tree):
                    what = f"{name!r} is neither a builtin nor a name in a module"
                    raise template.fault(node, what, f"write module.{name}, or ${name}")
        known = [hole.name for hole in pattern.holes if hole.name != ANYTHING]
        for node in ast.walk(replacement.tree):
            hole = hole_name(node)
            if hole == ANYTHING:
                raise replacement.fault(node, "$_ is not retained and cannot be used in a replacement", "name the hole")
            if hole is not None and hole not in known:
                raise replacement.fault(
                    node, f"the pattern has no hole ${hole}", remedy(hole, known) if known else "add it"
                )

    def importing_expression(self, name: str) -> str:
        """Return the importing expression for a name of the replacement."""
        module = self._module if self._module and name.startswith(f"{self._module}.") else name.rpartition(".")[0]
        rest = name[len(module) :]
        if "." in module:
            return f'__import__("{module}", fromlist=["__name__"]){rest}'
        return f'__import__("{module}"){rest}'


class _ReplacementRenderer:
    """The replacement of one match, as the parts of an edit."""

    def __init__(self, rewrite: Rewrite, unit: Unit, match: Match) -> None:
        self._rewrite = rewrite
        self._template = rewrite.replacement
        self._unit = unit
        self._match = match
        self._own = bound_inside(self._template.tree)
        self._parents = {child: node for node in ast.walk(self._template.tree) for child in ast.iter_child_nodes(node)}

    def parts(self) -> list[str | Span | ast.AST]:
        """Return the template's text with importing expressions and filled holes."""
        text = self._template.text
        made: list[str | Span | ast.AST] = []
        at = 0
        for start, end, content in sorted(self._slots(), key=lambda slot: slot[0]):
            before, after = text[at:start], text[end:]
            at = end
            if not content:  # an empty `$args` removes the comma beside it
                if after.lstrip().startswith(","):
                    at = len(text) - len(after.lstrip()[1:].lstrip())
                elif before.rstrip().endswith(","):
                    before = before.rstrip()[:-1]
            made.extend([before, *content])
        made.append(text[at:])
        top = self._template.tree
        if not isinstance(top, _ATOMS) and hole_name(top) is None:
            made = ["(", *made, ")"]
        return [part for part in made if part != ""]

    def _slots(self) -> Iterator[tuple[int, int, list[str | Span | ast.AST]]]:
        """Yield the replaced ranges of the template's text: (start, end, parts)."""
        stack: list[ast.AST] = [self._template.tree]
        while stack:
            node = stack.pop()
            hole = hole_name(node)
            name = qualified_name(node)
            if hole == ARGS and self._match.arguments is not None:
                yield (*self._template.span(node), self._arguments(node, self._match.arguments))
            elif hole is not None:
                yield (*self._template.span(node), self._expression(node, self._match.expressions[hole]))
            elif name is not None and isinstance(node, ast.Name | ast.Attribute):
                spelled = self._name(node, name)
                if spelled:
                    yield (*self._template.span(node), [spelled])
            else:
                stack.extend(ast.iter_child_nodes(node))

    def _name(self, node: ast.expr, name: str) -> str:
        """Return the text for a name of the replacement; empty where it stays as written."""
        root = name.partition(".")[0]
        if root == RESERVED or root in self._own:
            return ""
        if isinstance(node, ast.Name):
            return self._rewrite.importing_expression(name) if self._unit.resolve_builtin(node.id) is None else ""
        return self._rewrite.importing_expression(name)

    def _expression(self, node: ast.AST, value: ast.expr) -> list[str | Span | ast.AST]:
        parent = self._parents.get(node)
        is_argument = isinstance(parent, ast.Call) and node in parent.args
        if is_argument:
            whole = not isinstance(value, ast.Tuple | ast.Yield | ast.YieldFrom)
        else:
            whole = isinstance(value, _ATOMS) or (
                isinstance(value, ast.Constant) and isinstance(value.value, str | None)
            )
            whole = whole and "\n" not in self._unit.segment(value) and "\r" not in self._unit.segment(value)
        return [value] if whole else ["(", value, ")"]

    def _arguments(self, node: ast.AST, arguments: Arguments) -> list[str | Span | ast.AST]:
        if not arguments.count:
            return []
        parent = self._parents.get(node)
        followed = isinstance(parent, ast.Call) and bool(parent.keywords)
        alone = isinstance(parent, ast.Call) and len(parent.args) + len(parent.keywords) == 1
        if arguments.is_bare_generator and not alone:
            return ["(", arguments.span, ")"]
        return [arguments.trimmed if followed else arguments.span]


def _is_root(node: ast.Name, tree: ast.expr) -> bool:
    """Return whether a name is the first part of a dotted one, or bound by the template itself."""
    dotted = any(isinstance(other, ast.Attribute) and other.value is node for other in ast.walk(tree))
    return dotted or node.id in bound_inside(tree)


def _triggers(tree: ast.expr) -> tuple[str, ...]:
    """Return substrings of every matching file: the module of a name, or the name; else an attribute."""
    names = [name for node in ast.walk(tree) if (name := qualified_name(node)) and "." in name]
    if names:
        longest = max(names, key=len)
        own = longest.rpartition(".")[2]
        return (own,) if longest.startswith("builtins.") else (longest.partition(".")[0], own)
    return tuple({node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)})[:1]
