"""Scopes: the bindings that a name in a tree may refer to.

`Scopes` follows Python's scoping (functions, classes, comprehensions, lambdas, `global`, `nonlocal`, the walrus) and
returns the bindings that can reach a use of a name. It errs on the side of *more* bindings: one is excluded only where
the order of execution is certain:

    import torch            ─┐ dead for the use below: the next one always runs in between
    import fake as torch     │ reaches the use
    torch.device             │ the use
    torch = None            ─┘ not yet run when the use runs (unless a loop holds both, or the use is in a function)

Results are computed on demand, by name.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gemini.instrument.names.tree_index import Index

Place = tuple[int, int]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TYPE_PARAMETERS = ("TypeVar", "ParamSpec", "TypeVarTuple")  # Python 3.12
_SURE = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, *_FUNCTIONS, ast.ClassDef)
"""Statements that always bind their names when they complete."""
_IMPORTING = ("import_module", "__import__")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True, eq=False)
class Binding:
    """One binding of a name.

    `node` is the binding node (a stored `Name`, an `alias`, a definition, an `arg`, …) and `statement` the statement it
    belongs to. `done` is the position after which the binding has happened. A `dynamic` one happens at an unknown time:
    through `global` or `nonlocal` in another function.
    """

    node: ast.AST
    statement: ast.AST
    done: Place
    dynamic: bool


@dataclass(frozen=True)
class ReachingBindings:
    """The bindings that reach a use, the scope that owns them, and whether the name is certainly bound."""

    scope: ast.AST
    bindings: tuple[Binding, ...]
    certain: bool


class Scopes:
    """The scopes and bindings of one tree."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._parents = index.parents
        self._sites = self._collect_sites()
        self._declared = self._collect_declarations()
        self._owners: dict[str, dict[ast.AST, list[Binding]]] = {}
        self.stars = [node for node in index.nodes(ast.ImportFrom) if node.names[0].name == "*"]

    def is_bound(self, name: str) -> bool:
        """Return whether the tree binds `name` (other than by a star import)."""
        return name in self._sites

    def sites(self, name: str) -> list[ast.AST]:
        """Return the nodes that bind or delete `name` in any scope."""
        return self._sites.get(name, [])

    def resolvable(self, *, defined: bool) -> frozenset[str]:
        """Return the names that some scope binds to an object with a qualified name, directly or through other names.

        These are imports, assignments of names, attributes and importing calls, and, where the module's name is known
        (`defined`), functions and classes. All other names are variables.
        """
        nodes = self._index.nodes
        found = {alias.asname or alias.name.partition(".")[0] for alias in nodes(ast.alias)}
        if defined:
            found.update(node.name for node in self._index.tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef)))
        aliases_of: dict[str, list[str]] = defaultdict(list)
        assigned = [(one.targets, one.value) for one in nodes(ast.Assign)]
        assigned += [([one.target], one.value) for one in nodes(ast.AnnAssign) if one.value is not None]
        assigned += [([one.target], one.value) for one in nodes(ast.NamedExpr)]
        for targets, whole in assigned:
            for target, value in _pairs(targets, whole):
                root = _root(value)
                if root is not None:
                    aliases_of[root].append(target)
        reached = [*found, *(name for name in aliases_of if hasattr(builtins, name))]
        while reached:
            for target in aliases_of.pop(reached.pop(), ()):
                found.add(target)
                reached.append(target)
        return frozenset(found)

    def sole_binding(self, name: str) -> Binding | None:
        """Return the only binding of `name` in the tree if it is unconditional, at the top level of the module."""
        if len(self._sites.get(name, ())) != 1:
            return None
        owned = self.owners(name).get(self._index.tree)
        if not owned or owned[0].dynamic or self._parents.get(owned[0].statement) is not self._index.tree:
            return None
        return owned[0] if isinstance(owned[0].statement, _SURE) else None

    def _collect_sites(self) -> dict[str, list[ast.AST]]:
        sites: dict[str, list[ast.AST]] = defaultdict(list)
        nodes = self._index.nodes
        for use in nodes(ast.Name):
            if use.ctx.__class__ is not ast.Load:
                sites[use.id].append(use)
        for kind in (
            ast.FunctionDef,
            ast.AsyncFunctionDef,
            ast.ClassDef,
            ast.ExceptHandler,
            ast.MatchAs,
            ast.MatchStar,
        ):
            for node in nodes(kind):
                name = node.name  # type: ignore[attr-defined]
                if name:
                    sites[name].append(node)
        for argument in nodes(ast.arg):
            sites[argument.arg].append(argument)
        for alias in nodes(ast.alias):
            sites[alias.asname or alias.name.partition(".")[0]].append(alias)
        for mapping in nodes(ast.MatchMapping):
            if mapping.rest:
                sites[mapping.rest].append(mapping)
        for type_parameter in _TYPE_PARAMETERS:
            if hasattr(ast, type_parameter):
                for parameter in nodes(getattr(ast, type_parameter)):
                    sites[parameter.name].append(parameter)
        return sites

    def _collect_declarations(self) -> dict[tuple[ast.AST, str], type[ast.AST]]:
        """(scope, name) → `Global` or `Nonlocal`."""
        declared: dict[tuple[ast.AST, str], type[ast.AST]] = {}
        for node in (*self._index.nodes(ast.Global), *self._index.nodes(ast.Nonlocal)):
            scope = self.around(node)[0]
            for name in node.names:  # type: ignore[attr-defined]
                declared[scope, name] = type(node)
        return declared

    def around(self, node: ast.AST) -> list[ast.AST]:
        """Return the scopes in which `node` is evaluated, innermost first, the module last."""
        parents = self._parents
        found: list[ast.AST] = []
        below, child, parent = node, node, parents.get(node)
        while parent is not None:
            kind = parent.__class__
            if kind in _FUNCTIONS or kind is ast.ClassDef:
                # Decorators, defaults, annotations and bases are evaluated outside.
                if isinstance(child, ast.stmt):
                    found.append(parent)
            elif kind is ast.Lambda:
                if child is parent.body:  # type: ignore[attr-defined]
                    found.append(parent)
            elif kind in _COMPREHENSIONS:
                first: ast.comprehension = parent.generators[0]  # type: ignore[attr-defined]
                if not (child is first and below is first.iter):  # the first iterable is evaluated outside
                    found.append(parent)
            elif kind is ast.Module:
                found.append(parent)
            below, child, parent = child, parent, parents.get(parent)
        return found or [node]

    def owners(self, name: str) -> dict[ast.AST, list[Binding]]:
        """Return the bindings of `name` by the scope that owns them, each in order of position."""
        known = self._owners.get(name)
        if known is None:
            known = self._owners[name] = {}
            for node in self._sites.get(name, ()):
                scope, dynamic = self._owner(node, name)
                if scope is not None:
                    known.setdefault(scope, []).append(self._binding(node, dynamic))
            for bindings in known.values():
                bindings.sort(key=lambda one: one.done)
        return known

    def _owner(self, node: ast.AST, name: str) -> tuple[ast.AST | None, bool]:
        if isinstance(node, ast.arg):
            function = self._parents[self._parents[node]]  # arg → arguments → function
            return function, False
        if node.__class__.__name__ in _TYPE_PARAMETERS:
            return self._parents[node], False
        scopes = self.around(node)
        if isinstance(self._parents.get(node), ast.NamedExpr):  # a walrus binds outside of comprehensions
            scopes = [scope for scope in scopes if not isinstance(scope, _COMPREHENSIONS)]
        declared = self._declared.get((scopes[0], name))
        if declared is ast.Global:
            return scopes[-1], scopes[0] is not scopes[-1]
        if declared is ast.Nonlocal:
            return self._nonlocal_owner(scopes, name), True
        return scopes[0], False

    def _nonlocal_owner(self, scopes: list[ast.AST], name: str) -> ast.AST | None:
        """Return the function that owns a name declared `nonlocal` in the first of `scopes`."""
        for scope in scopes[1:]:
            if isinstance(scope, (*_FUNCTIONS, ast.Lambda)) and (scope, name) not in self._declared:
                for node in self._sites.get(name, ()):
                    if not self._is_declared_elsewhere(node, name) and self._owner(node, name)[0] is scope:
                        return scope
        return None

    def _is_declared_elsewhere(self, node: ast.AST, name: str) -> bool:
        return (self.around(node)[0], name) in self._declared

    def _binding(self, node: ast.AST, dynamic: bool) -> Binding:
        if isinstance(node, ast.arg):
            return Binding(node, node, start_of(node), dynamic)
        statement = node
        while not isinstance(statement, ast.stmt) and statement in self._parents:
            if isinstance(statement, ast.ExceptHandler | ast.match_case | ast.NamedExpr | ast.comprehension):
                break
            statement = self._parents[statement]
        if isinstance(statement, ast.comprehension):  # the element is written before the target that it uses
            return Binding(node, statement, (0, 0), dynamic)
        simple = not isinstance(
            statement, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith | ast.ExceptHandler | ast.match_case
        )
        return Binding(node, statement, end_of(statement) if simple else start_of(node), dynamic)

    def reach(self, name: str, use: ast.AST) -> ReachingBindings | None:
        """Return the bindings that can reach the use of `name` at `use`; None where no scope binds it."""
        scopes = self.around(use)
        owners = self.owners(name)
        module = scopes[-1]
        candidates: Iterator[ast.AST] = iter(scopes)
        declared = self._declared.get((scopes[0], name))
        if declared is ast.Global:
            candidates = iter([module])
        elif declared is ast.Nonlocal:
            candidates = iter(scopes[1:])
        for scope in candidates:
            if scope.__class__ is ast.ClassDef and scope is not scopes[0]:
                continue  # names of a class are not visible in its functions
            if scope is not scopes[0] and scope is not module and self._declared.get((scope, name)) is ast.Global:
                scope = module
            if scope in owners:
                bindings, certain = self._find_reaching(owners[scope], scope, use, scopes)
                return ReachingBindings(scope, tuple(bindings), certain)
            if scope is module:
                break
        return None

    def _find_reaching(
        self, bindings: list[Binding], scope: ast.AST, use: ast.AST, scopes: list[ast.AST]
    ) -> tuple[list[Binding], bool]:
        """Return the bindings in `scope` that can reach `use`, and whether one of them is certain to have happened."""
        later = scopes[: scopes.index(scope)] if scope in scopes else scopes
        deferred = any(one.__class__ not in (ast.ListComp, ast.SetComp, ast.DictComp) for one in later)
        place = start_of(use)
        above = self._path(use)
        last_sure: Binding | None = None
        alive: list[Binding] = []
        for one in bindings:
            if one.dynamic:
                alive.append(one)
            elif one.done > place and not deferred and not self._share_loop(one.node, above, scope):
                continue  # has not run yet
            else:
                if one.done <= place and self._dominates(one, above):
                    last_sure = one
                alive.append(one)
        if last_sure is None:
            return alive, isinstance(scope, (*_FUNCTIONS, ast.Lambda, *_COMPREHENSIONS))
        # Bindings before the last sure one are overwritten, unless a loop repeats them before a deferred use.
        sure_above = self._path(last_sure.node)
        alive = [
            one
            for one in alive
            if one.dynamic or one.done >= last_sure.done or (deferred and self._share_loop(one.node, sure_above, scope))
        ]
        return alive, not any(self._deletes(one) for one in alive)

    def at_end(self, bindings: list[Binding]) -> list[Binding]:
        """Return those of a module's `bindings` of one name that can be in effect after the module has run."""
        top = self._index.tree
        sure = [
            one
            for one in bindings
            if not one.dynamic and isinstance(one.statement, _SURE) and self._parents.get(one.statement) is top
        ]
        if not sure:
            return bindings
        return [one for one in bindings if one.dynamic or one.done >= sure[-1].done]

    def module_names(self, module: ast.Module) -> list[str]:
        """Return the names that `module` itself binds."""
        return [name for name in self._sites if module in self.owners(name)]

    def _path(self, node: ast.AST) -> dict[ast.AST, ast.AST]:
        """Return the ancestors of `node`, each with its child on the path to `node`."""
        parents, path = self._parents, {}
        while (parent := parents.get(node)) is not None:
            path[parent] = node
            node = parent
        return path

    def _dominates(self, one: Binding, above: dict[ast.AST, ast.AST]) -> bool:
        """Return whether `one` always runs before the use below `above`, as an earlier statement of a block."""
        statement = one.statement
        if isinstance(one.node, ast.arg):
            return True
        if not isinstance(statement, _SURE):
            return False
        parent = self._parents[statement]
        child = above.get(parent)
        return child is not None and self._block(parent, statement) == self._block(parent, child)

    def _block(self, parent: ast.AST, child: ast.AST) -> str:
        """Return the field of `parent` that contains `child`; empty if it is not a block."""
        if parent.__class__ in (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.With):
            return "body" if isinstance(child, ast.stmt) else ""
        for field in ("body", "orelse", "finalbody", "handlers"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and child in block:
                return field
        return ""

    def _share_loop(self, node: ast.AST, above: dict[ast.AST, ast.AST], scope: ast.AST) -> bool:
        """Return whether a loop inside `scope` contains both `node` and the use below `above`."""
        for around in self._index.ancestors(node):
            if around is scope:
                return False
            if around in above and isinstance(around, _LOOPS):
                return True
        return False

    @staticmethod
    def _deletes(one: Binding) -> bool:
        return isinstance(one.node, ast.Name) and isinstance(one.node.ctx, ast.Del)


def _pairs(targets: list[ast.expr], value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names an assignment binds, each with its expression."""
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for one, other in zip(target.elts, value.elts):
                yield from _pairs([one], other)


def _root(node: ast.expr) -> str | None:
    """Return the first name of a chain, or of the function in a call that imports."""
    if isinstance(node, ast.Call):
        node = node.func
        if (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) not in _IMPORTING:
            return None
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def start_of(node: ast.AST) -> Place:
    """Return the start of `node`; (0, 0) without a position."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end_of(node: ast.AST) -> Place:
    """Return the end of `node`."""
    return getattr(node, "end_lineno", None) or 0, getattr(node, "end_col_offset", None) or 0
