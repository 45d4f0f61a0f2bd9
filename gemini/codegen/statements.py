"""Statements: the Python text of one step."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import replace
from typing import Any

from gemini.batch_analysis.precompute import uses_host_rng
from gemini.codegen.attribute_paths import Paths
from gemini.codegen.expression_text import Text
from gemini.codegen.expressions import Expressions, follow_text
from gemini.codegen.import_block import Imports
from gemini.codegen.literals import string
from gemini.codegen.op_text import statement as operation_statement
from gemini.codegen.out_checks import needs_output_check
from gemini.codegen.stage_modules import HELD
from gemini.codegen.stage_statements import StageStatement, Target, Variable
from gemini.codegen.stage_steps import StageStep
from gemini.codegen.value_names import unique
from gemini.codegen.variables import Bindings, containers
from gemini.ir.graph import Graph
from gemini.ir.import_paths import Symbol
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import BackReference, MappingForm, ObjectForm, Ref, leaves
from gemini.ir.symint import Expr


class Statements:
    """Writes the statements of one stage."""

    def __init__(
        self,
        graph: Graph,
        bindings: Bindings,
        imports: Imports,
        paths: Paths,
        shares: MappingType[int, int] | None = None,
    ) -> None:
        self.graph, self.bindings, self.imports, self.paths = graph, bindings, imports, paths
        self.shares = shares or {}  # weighted nodes → indices into `self.shares` of the stage
        self.inner = "inner"
        self.inlined: dict[Ref, Text] = {}
        self.lengths: dict[int, int] = {}  # of every node's text, folded ones excluded
        self.write = Expressions(imports, paths, self.value, self.number)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────
    def value(self, ref: Ref) -> Text:
        """Return the text of a tensor."""
        if ref in self.inlined:
            return self.inlined.pop(ref)
        if ref in self.bindings.turns:
            variable, at = self.bindings.turns[ref]
            return Text(f"{variable.name}[{at}]")
        if ref in self.bindings.places:
            variable, path = self.bindings.places[ref]
            return follow_text(Text(variable.name), path)
        node = self.graph.nodes[ref.node]
        if node.kind in HELD:
            return Text(self.paths.tensor(node.target))
        return self._argument(node, ref)

    def _argument(self, node: Node, ref: Ref) -> Text:
        """Return a tensor that is an attribute of an argument, where that is an object of the model."""
        which, step, *rest = ref.path
        form: Any = (node.args, node.kwargs)[which[1]]
        part = form.items[step[1]] if step[0] == "i" else dict(form.items)[step[1]]
        return follow_text(self.write.form(part), tuple(rest))

    def number(self, expr: Expr) -> Text | None:
        """Return the text of a number that was read already."""
        variable = self.bindings.numbers.get(expr)
        return None if variable is None else Text(variable.name)

    def results(self, values: list[Ref | Expr]) -> list[str]:
        """Return the texts of a stage's results; a list that is returned entirely is `*items`."""
        found: list[str] = []
        at = 0
        while at < len(values):
            turns = self.bindings.lists_from.get(values[at], ())
            if turns and tuple(values[at : at + len(turns)]) == turns:
                found.append(f"*{self.bindings.turns[turns[0]][0].name}")
                at += len(turns)
                continue
            found.append(self._result(values[at]))
            at += 1
        return found

    def _result(self, value: Ref | Expr) -> str:
        return str(self.value(value)) if isinstance(value, Ref) else self.bindings.leaving[value].name

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────
    def lines(self, statement: StageStatement) -> list[str]:
        """Return the lines of a statement, without indentation (relative indentation inside)."""
        lines: list[str] = []
        self.write.prepared = {}
        for step in statement.steps:
            if step is statement.main:
                lines += self._main(step)
            elif step.node is not None:
                lines += self._hoist(step.node)
                result = self._call(step.node)
                path = self._single_path(step.node)
                self.inlined[Ref(step.node.id, "ret", path)] = follow_text(result, path)
        return [*(f"{name} = {text}" for text, name in self.write.prepared.items()), *lines]

    def _single_path(self, node: Node) -> Any:
        """Return the path of the single value of an inlined node that is read."""
        return self.bindings.targets[node.id].path

    def _main(self, step: StageStep) -> list[str]:
        if step.guard is not None:
            return self._guard(step)
        if step.port is not None:
            assert isinstance(step.port.value, Expr)
            return [f"{self.bindings.leaving[step.port.value].name} = {self.write.expr(step.number)}"]
        assert step.node is not None
        return self._node(step.node)

    def _guard(self, step: StageStep) -> list[str]:
        guard = step.guard
        assert guard is not None
        expect = self.imports.support("expect")
        text = self.write.expr(guard.expr)
        return [f"{expect}({text}, {self.write.plain(guard.expected)}, {string(text.code)})  # {guard.line}"]

    def _node(self, node: Node) -> list[str]:
        target = self.bindings.targets[node.id]
        before = self._hoist(node)
        if node.kind == "op":
            args, kwargs = self._arguments(node)
            text = operation_statement(self.write, node.target, args, kwargs)
            if text is not None:
                return [*before, text]
        inner = sorted({str(ref.path[0][1]) for _, ref in target.sides if ref.source == "inner"})
        line = self._assign(node, target)
        after = [f"{variable.name} = {self._side(node, ref)}" for variable, ref in target.sides]
        if not inner:
            return [*before, line, *after]
        modules = ", ".join(f"{string(name)}: {self.paths.module(name)}" for name in inner)
        self.inner = unique("inner", self.write.taken)
        after = [f"{variable.name} = {self._side(node, ref)}" for variable, ref in target.sides]
        return [
            *before,
            f"with {self.imports.support('inner_results')}({{{modules}}}) as inner:",
            f"    {line}",
            *after,
        ]

    def _assign(self, node: Node, target: Target) -> str:
        result = self._call(node)
        if target.pattern is not None:
            return f"{_unpack_text(target.pattern).removeprefix('(').removesuffix(')')} = {result}"
        if target.whole is not None:
            return f"{target.whole.name} = {follow_text(result, target.path)}"
        return str(result)

    def _side(self, node: Node, ref: Ref) -> Text:
        if ref.source == "attr":
            return follow_text(Text(self.paths.module(node.target)), ref.path)
        (_, name), (_, call), *rest = ref.path
        return follow_text(Text(f"{self.inner}[{string(name)}][{call}]"), tuple(rest))

    def _hoist(self, node: Node) -> list[str]:
        """Write containers that get a variable; one that contains itself is created first and then filled."""
        self.write.where = f"node {node.name} ({node.line})" if node.line else f"node {node.name}"
        self.write.labels = {}, {}
        lines = []
        for which, label, variable in self.bindings.targets[node.id].hoisted:
            form = (node.args, node.kwargs)[which]
            container = next(part for part in containers(form) if part.label == label)
            with self.write.inside(which):
                lines += self._make_container(container, variable.name, self.write.labels[which])
            self.write.labels[which][label] = variable.name
        return lines

    def _make_container(self, container: Any, name: str, labels: dict[int, str]) -> list[str]:
        if not any(isinstance(leaf, BackReference) and leaf.label == container.label for leaf in leaves(container)):
            return [f"{name} = {self.write.form(container)}"]
        labels[container.label] = name
        if isinstance(container, ObjectForm):
            fill = self.imports.support("fill")
            made = self.write.state(container.state)
            return [f"{name} = {self.write.form(replace(container, state=(), label=-1))}", f"{fill}({name}{made})"]
        empty = replace(container, items=(), label=-1)
        return [
            f"{name} = {self.write.form(empty)}",
            f"{name}.update({self.write.form(MappingForm(dict, container.items))})",
        ]

    def _arguments(self, node: Node) -> tuple[Any, Any]:
        return getattr(node.args, "items", ()), getattr(node.kwargs, "items", ())

    def _call(self, node: Node) -> Text:
        text = self._call_text(node)
        if node.id in self.shares:
            weigh = self.imports.name("gemini.batch_analysis.microbatch_weights", "weigh")
            text = Text(f"{weigh}({text}, self.shares[{self.shares[node.id]}])")
        self.lengths[node.id] = len(text.code)
        return text

    def _call_text(self, node: Node) -> Text:
        """Return the expression that runs a node."""
        args, kwargs = self._arguments(node)
        watched = needs_output_check(self.graph, node)
        if node.kind == "op" and not watched:
            return self.write.call_op(node.target, args, kwargs)
        function = self._function(node)
        if self.shares and uses_host_rng(self.graph, node):  # its readers receive the random numbers of the whole batch
            function = f"{self.imports.name('gemini.random_numbers.host_rng', 'preserve_host_rng')}({function})"
        if watched:
            function = f"{self.imports.support('check_output')}({function}, {string(node.out_spec)})"
        if not node.wrapped:
            return Text(f"{function}({', '.join(self.write.arguments(args, kwargs))})")
        checkpoint = self.imports.name("torch.utils.checkpoint", "checkpoint")
        if kwargs:
            partial = self.imports.name("functools", "partial")
            function = f"{partial}({', '.join([function, *self.write.arguments((), kwargs)])})"
        given = [function, *self.write.arguments(args, ()), f"use_reentrant={node.wrapped == 'reentrant'}"]
        return Text(f"{checkpoint}({', '.join(given)})")

    def _function(self, node: Node) -> str:
        if node.kind in MODULES:
            return self.paths.module(node.target)
        if node.kind == "op":
            from gemini.codegen.op_text import function_text

            return function_text(self.write, node.target)
        module, _, name = node.target.partition(":")
        return self.imports.symbol(Symbol(module, name)) + (".apply" if node.kind == "function" else "")


def _unpack_text(pattern: Any) -> str:
    if pattern is None:
        return "_"
    if isinstance(pattern, Variable):
        return pattern.name
    inner = ", ".join(_unpack_text(part) for part in pattern)
    return f"({inner},)" if len(pattern) == 1 else f"({inner})"
