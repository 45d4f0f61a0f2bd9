"""Evidence about the names of a program: the bases of its classes, and the values of its variables.

The use of a variable seldom shows its type: `optimizer.step()` is in one function, the optimizer was constructed in
another. Evidence is therefore collected over all files first, by name and without following the control flow: a name
that is ever assigned a model counts as one, in its own file before other files, and for a name that is never assigned
(a parameter) the conventions of the field decide (`net`, `criterion`, `optimizer`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gemini.instrument.inspect.pytorch_vocabulary import PYTORCH
from gemini.instrument.inspect.tensorflow_vocabulary import TENSORFLOW
from gemini.instrument.inspect.vocabulary import Vocabulary
from gemini.instrument.names.qualified_names import ModuleLookup, Names
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import is_inserted_call
from gemini.instrument.text.source_file import SourceFile

VOCABULARIES: tuple[Vocabulary, ...] = (PYTORCH, TENSORFLOW)

_CONVENTIONS = {
    "model": re.compile(
        r"(?i)^(.*_)?(model|net|network|generator|discriminator|encoder|decoder|backbone|actor|critic|policy|"
        r"student|teacher|classifier|unet|vae|ddp|engine)\d*$|^net[A-Z]\w*$|^(gen|disc|[GD])$"
    ),
    "optimizer": re.compile(r"(?i)^(.*_)?(opt|optim|optimi[sz]er)s?(_?\w{1,3}|\d+)?$|scaler$"),
    "scheduler": re.compile(r"(?i)sched"),
    "loss": re.compile(r"(?i)^(.*_)?(crit|criterion|criteria|loss_?(fn|func|function|f)|objective)\w{0,3}$"),
    "trainer": re.compile(r"(?i)(trainer|accelerator|fabric)$"),
    "device": re.compile(r"(?i)(device|dev|gpu|gpu_id|local_rank)$"),
    "tape": re.compile(r"(?i)tape\d?$"),
    "session": re.compile(r"(?i)sess(ion)?$"),
    "checkpoint": re.compile(r"(?i)(saver|checkpoint|ckpt)\w*$"),
    "train op": re.compile(r"(?i)^train_?(op|step)\w*$"),
}
# Methods that return their receiver or a copy of it.
_SAME = {"to", "cuda", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "requires_grad_", "module"}
_WRAPPERS = {"torch.compile", "torch.nn.parallel.DataParallel", "torch.nn.parallel.DistributedDataParallel"}


@dataclass
class FileEvidence:
    """The evidence of one file."""

    unit: Unit
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)  # by qualified name
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    holders: dict[str, set[str]] = field(default_factory=dict)  # last component of a target → kinds of its values

    @property
    def source(self) -> SourceFile:
        """The file itself."""
        return self.unit.source

    @classmethod
    def of(cls, source: SourceFile, modules: ModuleLookup) -> FileEvidence:
        """Return the classes and functions of `source`; `Evidence` adds the values of variables."""
        evidence = cls(Unit(source, modules))
        evidence._define(source.tree.body, source.module)
        return evidence

    def _define(self, body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                name = f"{prefix}.{node.name}" if prefix else node.name
                self.classes[name] = node
                self._define(node.body, name)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}.{node.name}" if prefix else node.name
                self.functions[name] = node
                self._define(node.body, name)
            else:
                for inner in ("body", "orelse", "finalbody"):
                    self._define(getattr(node, inner, ()), prefix)

    def resolve(self, expr: ast.expr) -> str | None:
        """Return the qualified name of `expr`: an imported object, or one defined in this file."""
        expr = strip_inserted_calls(expr)
        found = self.unit.resolve(expr)
        if found is None and isinstance(expr, ast.Name):
            name = f"{self.source.module}.{expr.id}" if self.source.module else expr.id
            return name if name in self.classes or name in self.functions else self._find_nested(expr.id)
        return found

    def _find_nested(self, name: str) -> str | None:
        """Return the class or function of that name inside a function of this file (closures)."""
        for known in (*self.classes, *self.functions):
            if known.endswith(f".{name}"):
                return known
        return None

    @cached_property
    def imports(self) -> frozenset[str]:
        """The top-level packages that this file imports."""
        found: set[str] = set()
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
        return frozenset(found)


class Evidence:
    """The evidence of all files of a program."""

    def __init__(self, sources: Iterable[SourceFile]) -> None:
        self.files = [FileEvidence.of(source, self._names_of) for source in sources]
        self._by_module = {file.source.module: file for file in self.files if file.source.module}
        self._anywhere: dict[str, set[str]] = {}
        self._bases = {
            name: [base for base in map(file.resolve, node.bases) if base]
            for file in self.files
            for name, node in file.classes.items()
        }
        self._class_kinds: dict[str, str | None] = {}
        self._returns: dict[str, str | None] = {}
        imported = frozenset[str]().union(*(file.imports for file in self.files))
        self.vocabularies = [each for each in VOCABULARIES if each.roots & imported]
        for _ in range(2):  # the second round uses the returned kinds of the first
            for file in self.files:
                self._collect_holders(file)
            self._collect_returns()
        for file in self.files:
            for name, kinds in file.holders.items():
                self._anywhere.setdefault(name, set()).update(kinds)

    def _names_of(self, module: str) -> Names | None:
        """Return the names of a module of the program, so that a re-exported class is found where it is defined."""
        file = self._by_module.get(module)
        return file.unit.names if file is not None else None

    def kind_of_class(self, name: str) -> str | None:
        """Return the kind of the program's class `name`, by its bases; None for other names."""
        if name not in self._bases:
            return None
        if name not in self._class_kinds:
            self._class_kinds[name] = None  # ends the recursion of classes that derive from each other
            kinds = (self._kind_of_base(base) for base in self._bases[name])
            self._class_kinds[name] = next((kind for kind in kinds if kind), None)
        return self._class_kinds[name]

    def kind_of_call(self, name: str) -> str | None:
        """Return the kind of a call of `name`: by the vocabularies, or by a class or function of the program."""
        for vocabulary in self.vocabularies:
            kind = vocabulary.kind_of_call(name)
            if kind:
                return kind
        return self.kind_of_class(name) or self._returns.get(name)

    def is_users(self, name: str) -> bool:
        """Return whether `name` is a class or function of the program."""
        return name in self._bases or name in self._returns

    def is_variable(self, name: str) -> bool:
        """Return whether `name` is in a module of the program, but neither a class nor a function."""
        return name.rpartition(".")[0] in self._by_module and not self.is_users(name)

    def may_be_users(self, name: str) -> bool:
        """Return whether `name` is defined by the program."""
        return self.is_users(name) or self.is_variable(name)

    def holds(self, file: FileEvidence, expr: ast.expr, kind: str) -> bool:
        """Return whether the variable (or attribute) `expr` counts as a `kind`."""
        expr = strip_inserted_calls(expr)
        name = last_name(expr)
        if name is None:
            return isinstance(expr, ast.Call) and self.kind_of_value(file, expr) == kind
        known = file.holders.get(name) or self._anywhere.get(name)
        return kind in known if known else is_called_like(name, kind)

    def kind_of_value(self, file: FileEvidence, value: ast.expr) -> str | None:
        """Return the kind of an expression's value, by its outermost call."""
        value = strip_inserted_calls(value)
        if isinstance(value, ast.Await):
            value = value.value
        if isinstance(value, ast.IfExp):
            return self.kind_of_value(file, value.body) or self.kind_of_value(file, value.orelse)
        if isinstance(value, ast.Constant):
            return "device" if isinstance(value.value, str) and is_device_name(value.value) else None
        if isinstance(value, (ast.Name, ast.Attribute)):
            kinds = file.holders.get(last_name(value) or "", set())
            return next(iter(sorted(kinds)), None)
        if not isinstance(value, ast.Call):
            return None
        name = file.resolve(value.func)
        if name:
            return self._kind_of_named_call(file, name, value)
        if isinstance(value.func, ast.Attribute):
            return self._kind_of_method(file, value.func)
        return None

    def _kind_of_named_call(self, file: FileEvidence, name: str, call: ast.Call) -> str | None:
        if name.endswith("GradientTape"):
            return "tape"
        if any(vocabulary.canonical(name) in _WRAPPERS for vocabulary in self.vocabularies) and call.args:
            return self.kind_of_value(file, call.args[0]) or "model"
        kind = self.kind_of_call(name)
        if kind == "layer":
            return "model"  # a layer in a variable of the script counts as a model
        return kind or ("other" if not self.is_users(name) else None)

    def _kind_of_method(self, file: FileEvidence, func: ast.Attribute) -> str | None:
        if func.attr in _SAME:
            return self.kind_of_value(file, func.value)
        if func.attr in ("minimize", "apply_gradients"):
            return "train op"
        if func.attr == "from_pretrained":
            return "model"
        return None

    def _kind_of_base(self, base: str) -> str | None:
        for vocabulary in VOCABULARIES:
            kind = vocabulary.kind_of_subclass(base)
            if kind:
                return kind
        return self.kind_of_class(base)

    def _collect_holders(self, file: FileEvidence) -> None:
        for target, value in _assignments(file.source.tree):
            name = last_name(target)
            kind = self.kind_of_value(file, value) if name else None
            if name and kind:
                file.holders.setdefault(name, set()).add(kind)

    def _collect_returns(self) -> None:
        for file in self.files:
            for name, node in file.functions.items():
                kinds = (self.kind_of_value(file, value) for value in _returned_values(node))
                found = next((kind for kind in kinds if kind in ("model", "optimizer", "scheduler", "data")), None)
                self._returns[name] = found


def last_name(expr: ast.expr) -> str | None:
    """`optimizer` of `optimizer`, `self.optimizer` and `self.optimizers[0]`; None without a name."""
    while isinstance(expr, ast.Subscript):
        expr = expr.value
    if isinstance(expr, ast.Name):
        return expr.id
    return expr.attr if isinstance(expr, ast.Attribute) else None


def strip_inserted_calls(expr: ast.expr) -> ast.expr:
    """Return `x` of `__gemini__.on(x)` and of the other calls that passes insert."""
    while isinstance(expr, ast.Call) and len(expr.args) == 1 and is_inserted_call(expr):
        expr = expr.args[0]
    return expr


def is_called_like(name: str, kind: str) -> bool:
    """Return whether `name` is a conventional name of a `kind`."""
    convention = _CONVENTIONS.get(kind)
    return bool(convention and convention.search(name))


def is_device_name(text: str) -> bool:
    """Return whether a string constant names a device."""
    return bool(re.fullmatch(r"(cpu|cuda|mps|xpu|hpu|/?(?:\w+:\d+/)*(?:device:)?[CGT]PU)(:\d+)?", text, re.IGNORECASE))


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            for left, right in zip(target.elts, value.elts):
                yield from _pairs(left, right)
    else:
        yield target, value


def _returned_values(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    for node in own_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `function`, without those of functions and classes defined in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))
