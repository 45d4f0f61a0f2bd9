"""Value names: variable names for the values of a graph.

First choice is the variable that the model's code assigned the value to, else the module or op that made it.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re

from gemini.capture.concretize import short_name
from gemini.codegen.source_names import ModelSources, outermost, target_names
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import Path, Ref
from gemini.tensor_parallel.divided_graph import MOVE

RESERVED = frozenset(
    {*dir(builtins), *keyword.kwlist, *keyword.softkwlist, "self", "model", "torch", "nn", "F", "np", "math", "Tensor"}
)
_WORDS = {
    "__getitem__": "part", "add": "total", "sub": "difference", "mul": "product", "div": "quotient", "neg": "negated",
    "matmul": "product", "bmm": "product", "pow": "power", "__and__": "both", "__or__": "either",
    "eq": "equal", "ne": "unequal", "lt": "less", "le": "less", "gt": "greater", "ge": "greater", "cat": "joined",
    "to": "converted", "view": "viewed", "reshape": "reshaped", "transpose": "transposed", "permute": "permuted",
    "unsqueeze": "widened", "squeeze": "squeezed", "expand": "expanded", "flatten": "flat", "chunk": "chunks",
    "split": "parts", "unbind": "parts", "scaled_dot_product_attention": "attention", "cross_entropy": "loss",
    "contiguous": "packed", "clone": "copy", "detach": "detached", "float": "floats", "repeat": "repeated",
    "__invert__": "inverse",
}  # fmt: skip


class Namer:
    """Names for the values of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        model = graph.model
        classes = () if model is None else {type(module).__module__: None for module in model.modules()}
        self.sources = ModelSources(tuple(classes))
        self._known: dict[tuple[int, Path], str] = {}

    def of(self, ref: Ref) -> str:
        """Return the preferred name of a value."""
        key = ref.node, ref.path
        if key not in self._known:
            node = self.graph.nodes[ref.node]
            moved = next(node.inputs()) if node.target == MOVE else None
            name = self.of(moved) if moved else self.assigned_name(node, ref.path) or self._made_by(node, ref)
            self._known[key] = identifier(name)
        return self._known[key]

    def only(self, ref: Ref) -> str:
        """Return the preferred name of a value that is the only part of a result which is read."""
        name = self.of(ref)
        parts = "_".join(str(step) for _, step in ref.path)
        return name.removesuffix(f"_{parts}") if parts and all(kind == "i" for kind, _ in ref.path) else name

    def statement(self, node: Node) -> ast.stmt | None:
        """Return the statement of the model's code that a node is part of."""
        return self.sources.statement(node.line) if node.line else None

    def assigned_name(self, node: Node, path: Path) -> str:
        """Return the variable that the model's code assigned a value to; '' if there is none, or no source."""
        statement = self.statement(node)
        names = target_names(statement)
        value = getattr(statement, "value", None)
        if not names or value is None:
            return ""
        made_by, is_module = _made_by(node), node.kind in MODULES
        if isinstance(statement, ast.AugAssign):
            return names[0] if made_by.strip("_").removeprefix("i") == _is_augmented(statement) else ""
        if len(path) == 1 and isinstance(value, ast.Subscript) and outermost(value.value, made_by, is_module):
            return names[0] if len(names) == 1 and _constant(value.slice) == path[0][1] else ""
        if not outermost(value, made_by, is_module):
            return ""
        if len(names) == 1:
            return names[0] if not path else "_".join([names[0], *(str(step) for _, step in path)])
        return names[path[0][1]] if len(path) == 1 and path[0][0] == "i" and path[0][1] < len(names) else ""

    def _made_by(self, node: Node, ref: Ref) -> str:
        if node.kind == "input":
            return "_".join(str(step) for _, step in self.graph.inputs[node.id])
        parts = [str(step) for _, step in ref.path if str(step) not in node.target]
        if node.kind in MODULES or node.is_source:
            stem = module_word(node.target or self.graph.model_name)
        elif isinstance(self.statement(node), ast.Return) and node.scope and node.scope[-1] and self._is_returned(node):
            stem = module_word(node.scope[-1])
        else:
            made_by = _made_by(node)
            stem = _WORDS.get(made_by, made_by.strip("_"))
        return "_".join([snake(stem), *parts])

    def _is_returned(self, node: Node) -> bool:
        """Return whether the model's code returns a value directly."""
        value = getattr(self.statement(node), "value", None)
        return outermost(value, _made_by(node), node.kind in MODULES)


def _made_by(node: Node) -> str:
    if node.kind in MODULES:
        return node.target.rpartition(".")[2]
    if node.kind == "op":
        return short_name(node.target)
    name = node.target.rpartition(":")[2].rpartition(".")[2]
    return name if node.kind == "call" else "apply" if node.kind == "function" else name


def _is_augmented(statement: ast.AugAssign) -> str:
    probe = ast.BinOp(ast.Name("_"), statement.op, ast.Name("_"))
    known = ("add", "sub", "mul", "div", "floordiv", "remainder", "pow", "matmul", "and", "or", "xor")
    return next((name for name in known if outermost(probe, name, is_module=False)), "")


def _constant(expr: ast.expr) -> object:
    return expr.value if isinstance(expr, ast.Constant) else None


def module_word(path: str) -> str:
    """Return a word for a module: the last part of its name that is not a number."""
    parts = path.split(".")
    name = next((part for part in reversed(parts) if not part.isdigit()), "value")
    return singular(name) if parts[-1].isdigit() else name


def scope_word(path: str) -> str:
    """Return a variable name for a module: `layer` for `layers.3`, `attention_self` for `attention.self`."""
    word = module_word(path)
    outer = path.rpartition(".")[0]
    return identifier(snake(f"{module_word(outer)}_{word}" if word in RESERVED and outer else word))


def singular(name: str) -> str:
    """Return the singular of a name."""
    return name[:-1] if len(name) > 3 and name.endswith("s") and not name.endswith("ss") else name


def snake(text: str) -> str:
    """Return `CamelCase` as `camel_case`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()


def identifier(text: str) -> str:
    """Return the text as a Python identifier that shadows nothing."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    name = f"value_{name}" if name[0].isdigit() else name
    return f"{name}_" if name in RESERVED else name


class UniqueNames:
    """Names that differ from all earlier ones."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}  # names of a family that are taken

    def take(self, name: str) -> str:
        """Return the name, numbered if it is taken; the result is taken from then on."""
        found, count = name, self._counts.get(name, 1)
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._counts[name] = count
        self._taken.add(found)
        return found


def unique(name: str, taken: set[str]) -> str:
    """Return the name, numbered if it is taken."""
    if name not in taken:
        return name
    count = 2
    while f"{name}_{count}" in taken:
        count += 1
    return f"{name}_{count}"
