"""Name resolution: from a `Name` or `Attribute` chain to the qualified name of the object.

    import torch.nn.functional as F      F.relu           torch.nn.functional.relu
    from torch import nn as N            N.Linear         torch.nn.Linear
    L = N.Linear                         L                torch.nn.Linear
    def f(torch): torch.device           torch.device     None: a parameter

A name resolves only where every binding that can reach the use (see `scopes`) means the same object; a binding to
another or an unknown object makes it None. So no name is matched by its spelling. An unavailable import
(``except ImportError: torch = None``) does not count: the attribute access or call that follows cannot succeed on None.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Protocol

from gemini.instrument.names import framework_names
from gemini.instrument.names.scopes import Binding, ReachingBindings, Scopes, start_of
from gemini.instrument.names.tree_index import Index


class ModuleNames(Protocol):
    """The names of another module."""

    def export(self, name: str) -> str | None:
        """Return the qualified name that `name` of the module refers to; None if unknown or defined in it."""

    def star(self) -> frozenset[str] | None:
        """Return the names that ``from module import *`` binds; None if unknown."""


ModuleLookup = Callable[[str], "ModuleNames | None"]

_ABSENT = ""  # the meaning of ``torch = None`` where the import failed
_BUILTINS = frozenset(dir(builtins))
_UNSEEN = "?"


class _Everything:
    """A container of every name."""

    def __contains__(self, _: object) -> bool:
        return True


_EVERYTHING = _Everything()


class Names:
    """The names of one module, also as the `ModuleNames` of it for other modules."""

    def __init__(
        self,
        tree: ast.Module,
        module: str = "",
        *,
        is_package: bool = False,
        modules: ModuleLookup | Mapping[str, ModuleNames] | None = None,
        index: Index | None = None,
    ) -> None:
        self._tree = tree
        self._index = index or Index(tree)
        self._module = module
        self._is_package = is_package
        self._modules: ModuleLookup = modules.get if isinstance(modules, Mapping) else modules or (lambda _: None)
        self._scopes = Scopes(self._index)
        self._running: set[ast.AST] = set()
        self._meanings: dict[ast.AST, str | None] = {}
        # Names that can have a qualified name. Most names of a file are plain variables, which cannot.
        self._resolvable: Container[str] = (
            _EVERYTHING if self._scopes.stars else _BUILTINS | self._scopes.resolvable(defined=bool(module))
        )
        self._chains: dict[ast.AST, str | None] = {}
        self._sole: dict[str, Binding | None] = {}
        self._overwritten: dict[str, list[ast.expr]] | None = None

    def resolve(self, expr: ast.AST) -> str | None:
        """Return the qualified name of `expr`, or None where it may be another object."""
        if expr.__class__ is ast.Attribute:
            return self._chain(expr)
        if not isinstance(expr, ast.Name) or expr.id not in self._resolvable or not isinstance(expr.ctx, ast.Load):
            return None
        return self._lookup(expr.id, expr, bare=True)

    def _chain(self, node: ast.AST) -> str | None:
        """Return the qualified name of a `Name` or `Attribute` inside or at the end of a chain."""
        if node.__class__ is ast.Name:
            return self._lookup(node.id, node, bare=False) if node.id in self._resolvable else None
        if not isinstance(node, ast.Attribute):
            return None
        known = self._chains.get(node, _UNSEEN)
        if known is not _UNSEEN:
            return known
        base = self._chain(node.value)
        found = None if base is None else self._member(base, node.attr)
        self._chains[node] = found  # set before the check: attributes may be overwritten through each other
        if found is not None and self._is_overwritten(node, found):
            found = self._chains[node] = None
        return found

    def builtin(self, name: str) -> str | None:
        """The qualified name of the builtin `name`, or None where the module may rebind it."""
        if self._scopes.is_bound(name) or name not in _BUILTINS:
            return None
        found = self._unbound(name, self._tree)
        return found if found == f"builtins.{name}" else None

    # Exports.

    def export(self, name: str) -> str | None:
        """Return the qualified name that `name` of this module refers to after the module has run."""
        bindings = self._scopes.owners(name).get(self._tree)
        if not bindings:
            return self._from_stars(name, None)
        return self._agree(self._scopes.at_end(bindings), bare=False)

    def star(self) -> frozenset[str] | None:
        """Return the names that ``from this import *`` binds, or None where ``__all__`` is computed."""
        listed = self._read_all_list()
        if listed is not None or self._scopes.is_bound("__all__"):
            return listed
        names = {name for name in self._scopes.module_names(self._tree) if not name.startswith("_")}
        for star in self._scopes.stars:
            known = self._star_names(star)
            if known is None:
                return None
            names |= known
        return frozenset(names)

    def _read_all_list(self) -> frozenset[str] | None:
        bindings = self._scopes.owners("__all__").get(self._tree, [])
        if len(bindings) != 1 or not isinstance(bindings[0].statement, ast.Assign):
            return None
        value = bindings[0].statement.value
        if not isinstance(value, ast.List | ast.Tuple):
            return None
        texts = [item.value for item in value.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        is_extended = any(
            isinstance(use, ast.Name)
            and use.id == "__all__"
            and isinstance(self._index.parents.get(use), ast.Attribute)
            for use in self._index.nodes(ast.Name)
        )
        return frozenset(texts) if len(texts) == len(value.elts) and not is_extended else None

    def imported_from_user_modules(self) -> frozenset[str]:
        """Return the names imported from other modules of the user, which may have renamed objects."""
        nodes = self._index.nodes
        imports: list[ast.Import | ast.ImportFrom] = [*nodes(ast.Import), *nodes(ast.ImportFrom)]
        found = {
            alias.asname or alias.name.partition(".")[0]
            for statement in imports
            for alias in statement.names
            if any(isinstance(self._modules(module), Names) for module in self._origins(statement, alias.name))
        }
        if "*" in found:
            found |= {use.id for use in nodes(ast.Name) if not self._scopes.is_bound(use.id)} - _BUILTINS
        return frozenset(found)

    def _origins(self, statement: ast.Import | ast.ImportFrom, name: str) -> Iterator[str]:
        """Yield the modules that `name` of an import may be or come from; none of a framework."""
        base = name if isinstance(statement, ast.Import) else self._import_base(statement)
        if base and not framework_names.is_framework(base):
            yield base
            if isinstance(statement, ast.ImportFrom):
                yield f"{base}.{name}"

    # Lookup of the root of a chain.

    def _lookup(self, name: str, use: ast.AST, *, bare: bool) -> str | None:
        if name not in self._sole:
            self._sole[name] = None if self._scopes.stars else self._scopes.sole_binding(name)
        sole = self._sole[name]
        if sole is not None and sole.done <= start_of(use):
            return self._meaning(sole) or None
        reached = self._scopes.reach(name, use) if self._scopes.is_bound(name) else None
        if reached is None:
            return self._unbound(name, use)
        if isinstance(reached.scope, ast.Module) and self._scopes.stars:
            return self._with_stars(name, reached, use, bare=bare)
        meaning = self._agree(reached.bindings, bare=bare and not self._is_called(use)) if reached.bindings else _ABSENT
        if reached.certain:
            return meaning or None
        # The name may not be bound yet: its meaning in the outer scope must be the same.
        outside = self._outside(name, reached.scope, use)
        if meaning == _ABSENT:
            return outside or None
        return meaning if outside in (meaning, _ABSENT) else None

    def _outside(self, name: str, scope: ast.AST, use: ast.AST) -> str | None:
        """Return the meaning of `name` where `scope` has not bound it; absent where it has none."""
        if isinstance(scope, ast.ClassDef):
            outer = self._scopes.reach(name, scope) if self._scopes.is_bound(name) else None
            if outer is None:
                return self._unbound(name, use) or _ABSENT
            return self._agree(outer.bindings, bare=False)
        return f"builtins.{name}" if name in _BUILTINS else _ABSENT

    def _unbound(self, name: str, use: ast.AST) -> str | None:
        """Return the meaning of a name that no scope of this module binds: from a star import, or a builtin."""
        if self._scopes.stars:
            return self._from_stars(name, use)
        return f"builtins.{name}" if name in _BUILTINS else None

    def _is_called(self, use: ast.AST) -> bool:
        parent = self._index.parents.get(use)
        return isinstance(parent, ast.Call) and parent.func is use

    def _agree(self, bindings: tuple[Binding, ...] | list[Binding], *, bare: bool) -> str | None:
        """Return the common meaning of `bindings`; None if they differ or one is unknown, absent if none has any."""
        agreed = _ABSENT
        for binding in bindings:
            meaning = self._meaning(binding)
            if meaning is None or (meaning == _ABSENT and bare):
                return None
            if meaning == _ABSENT:
                continue
            if agreed not in (_ABSENT, meaning):
                return None
            agreed = meaning
        return agreed

    # Star imports, which bind names in the module's scope that do not appear in its text.

    def _with_stars(self, name: str, reached: ReachingBindings, use: ast.AST, *, bare: bool) -> str | None:
        """Return the meaning of a name bound in the module's scope, where a star import may bind it too."""
        meaning = self._agree(reached.bindings, bare=bare and not self._is_called(use))
        if not reached.bindings:
            return self._from_stars(name, use)
        if not meaning:
            return None
        first = min(binding.done for binding in reached.bindings)
        for star in self._scopes.stars:
            # A star import above every reaching binding is overwritten by them, one below the use has not run.
            if reached.certain and start_of(star) < first:
                continue
            known = self._star_names(star)
            if known is None and (bare or not framework_names.is_framework(meaning)):
                return None  # an unknown module may bind any name, but hardly that of a framework's module
            if known is not None and name in known and self._star_member(star, name) != meaning:
                return None
        if not reached.certain and name in _BUILTINS:
            return None
        return meaning

    def _from_stars(self, name: str, use: ast.AST | None) -> str | None:
        """Return the meaning of a name that only star imports can bind; an unknown module may bind any name."""
        sources: list[ast.ImportFrom] = []
        is_unknown = False
        for star in self._scopes.stars:
            known = self._star_names(star)
            if known is not None and name not in known:
                continue
            is_unknown = is_unknown or known is None
            sources.append(star)
            if is_unknown and (len(sources) > 1 or name in _BUILTINS):
                return None
        if not sources:
            return f"builtins.{name}" if use is not None and name in _BUILTINS else None
        meanings = {self._star_member(star, name) for star in sources}
        return meanings.pop() if len(meanings) == 1 else None

    def _star_names(self, star: ast.ImportFrom) -> frozenset[str] | None:
        module = self._import_base(star)
        if module is None:
            return None
        known = framework_names.star(module)
        if known is not None:
            return known
        other = self._modules(module)
        return other.star() if other is not None and other is not self else None

    def _star_member(self, star: ast.ImportFrom, name: str) -> str | None:
        module = self._import_base(star)
        return self._member(module, name) if module else None

    # The meaning of one binding.

    def _meaning(self, binding: Binding) -> str | None:
        node = binding.node
        if node in self._meanings:
            return self._meanings[node]
        if node in self._running:  # ``a = b; b = a`` in a loop
            return None
        self._running.add(node)
        try:
            meaning = self._meanings[node] = self._find_meaning(binding)
        finally:
            self._running.discard(node)
        return meaning

    def _find_meaning(self, binding: Binding) -> str | None:
        node, statement = binding.node, binding.statement
        if isinstance(node, ast.alias):
            return self._import_meaning(node, statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            value = self._assigned_value(node, statement)
            if value is None:
                return None
            if isinstance(value, ast.Constant) and value.value is None:
                return _ABSENT if self._is_conditional(statement) else None
            if isinstance(value, ast.Call):
                return self._import_call_target(value)
            return self.resolve(value)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and self._module:
            own = isinstance(self._index.parents.get(node), ast.Module)
            return f"{self._module}.{node.name}" if own else None
        return None

    def _import_meaning(self, alias: ast.alias, statement: ast.AST) -> str | None:
        if isinstance(statement, ast.Import):
            return framework_names.canonical(alias.name if alias.asname else alias.name.partition(".")[0])
        base = self._import_base(statement) if isinstance(statement, ast.ImportFrom) else None
        return self._member(base, alias.name) if base else None

    def _import_base(self, statement: ast.ImportFrom) -> str | None:
        """Return the module that a ``from`` import takes names from, as an absolute name."""
        if not statement.level:
            return statement.module
        package = self._module.split(".") if self._module else []
        drop = statement.level - self._is_package
        if drop >= len(package):  # a module outside of packages has no relative imports
            return None
        base = package[: len(package) - drop]
        return ".".join([*base, statement.module] if statement.module else base)

    def _assigned_value(self, name: ast.Name, statement: ast.AST) -> ast.expr | None:
        """Return the expression that `name` is bound to; None where the value is computed or unpacked."""
        if isinstance(statement, ast.NamedExpr | ast.AnnAssign):
            return statement.value if statement.target is name else None
        if not isinstance(statement, ast.Assign):
            return None
        for target in statement.targets:
            if target is name:
                return statement.value
            if isinstance(target, ast.Tuple | ast.List) and name in target.elts:
                return _matching_element(target.elts, statement.value, target.elts.index(name))
        return None

    def _import_call_target(self, call: ast.Call) -> str | None:
        """Return the module of ``importlib.import_module("torch")`` or ``__import__("torch")``."""
        if len(call.args) != 1 or call.keywords or not isinstance(call.args[0], ast.Constant):
            return None
        module = call.args[0].value
        if not isinstance(module, str) or module.startswith("."):
            return None
        function = self.resolve(call.func)
        if function == "importlib.import_module":
            return framework_names.canonical(module)
        return module.partition(".")[0] if function == "builtins.__import__" else None

    def _is_conditional(self, statement: ast.AST) -> bool:
        return isinstance(self._index.parents.get(statement), ast.ExceptHandler | ast.If | ast.Try)

    # Members.

    def _member(self, base: str, attribute: str) -> str:
        """Return the qualified name of `attribute` of `base`, through the user's modules and public aliases."""
        other = None if framework_names.is_framework(base) else self._modules(base)
        if other is not None and other is not self:
            exported = other.export(attribute)
            if exported:
                return exported
        return framework_names.canonical(f"{base}.{attribute}")

    def _is_overwritten(self, node: ast.Attribute, name: str) -> bool:
        """Return whether this module assigns to the attribute that `node` reads: ``torch.device = fake``."""
        if self._overwritten is None:
            self._overwritten = self._find_overwritten()
        owners = self._overwritten.get(node.attr)
        if not owners or not isinstance(node.ctx, ast.Load):
            return False
        bases = (self._chain(owner) for owner in owners)
        return any(base is not None and self._member(base, node.attr) == name for base in bases)

    def _find_overwritten(self) -> dict[str, list[ast.expr]]:
        """Return the attributes that are assigned or deleted, also by `setattr`, with their objects."""
        found: dict[str, list[ast.expr]] = {}
        for target in self._index.nodes(ast.Attribute):
            if target.ctx.__class__ is not ast.Load:
                found.setdefault(target.attr, []).append(target.value)
        for call in self._index.nodes(ast.Call):
            if getattr(call.func, "id", "") in ("setattr", "delattr") and len(call.args) > 1:
                name = call.args[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.setdefault(name.value, []).append(call.args[0])
        return found


def _matching_element(targets: list[ast.expr], value: ast.expr, at: int) -> ast.expr | None:
    """Return the element of a tuple `value` that goes to the target number `at`."""
    if not isinstance(value, ast.Tuple | ast.List) or len(value.elts) != len(targets):
        return None
    if any(isinstance(each, ast.Starred) for each in (*targets, *value.elts)):
        return None
    return value.elts[at]
