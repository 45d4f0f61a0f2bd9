"""Code reads: the names that a function reads and writes, from its bytecode.

    os.path.exists(p)      global   os.path.exists
    self.rng.normal()      self     rng.normal
    scale * x              closure  scale            a variable around the function
    def f(x, seen=[])      default  seen
    from m import tau      import   m.tau
    counts["n"] += 1       global   counts           CHANGED: a store into an item on the same line
    y = counts; y.clear()  global   counts           CHANGED: a local variable is another name of it
    y = t["a"]; y.clear()  global   t                CHANGED_INSIDE: perhaps an item of it

Nested functions count as part of the function. Names that start at other local variables are not resolved: only their
attribute names are known (`attributes`), and what lines that assign them name.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_MAYBE_NULL")
_SILENT = ("PUSH_NULL", "EXTENDED_ARG", "CACHE", "NOP", "PRECALL", "COPY", "DUP_TOP")
_MUTATORS = frozenset(
    [
        "append", "appendleft", "extend", "extendleft", "insert", "remove", "pop", "popleft", "popitem", "clear",
        "update", "setdefault", "add", "discard", "sort", "reverse", "rotate", "__setitem__", "__delitem__", "fill",
    ]
)  # fmt: skip
_CHANGING = frozenset(  # functions that change an argument
    [
        "setattr", "delattr", "setitem", "delitem", "iadd", "heappush", "heappop", "heapify", "heapreplace", "shuffle",
        "insort", "insort_left", "insort_right", "copyto", "put", "place", "putmask", "fill_diagonal", "next",
    ]
)  # fmt: skip
_BY_STRINGS = frozenset(["getattr", "hasattr", "setattr", "delattr", "getattr_static", "__getattribute__"])
_DYNAMIC = frozenset(["vars", "__dict__", "attrgetter", "methodcaller", "dir"])


class Change(IntEnum):
    """What code does to a value."""

    READ = 0
    CHANGED_INSIDE = 1  # it changes an item of it, or what a method of it returns
    CHANGED = 2


class NameChain(NamedTuple):
    """A dotted name that code uses, by where its first name is found."""

    root: str  # global, closure, default, self, import or local
    names: tuple[str, ...]
    change: Change = Change.READ

    @property
    def text(self) -> str:
        """The name as in the source."""
        return ".".join(("self", *self.names) if self.root == "self" else self.names)


class CodeReads(NamedTuple):
    """What one function reads and writes."""

    chains: frozenset[NameChain]
    attributes: frozenset[str]  # names of attributes, of whatever object
    strings: frozenset[str]  # constants that may name attributes, where code takes attributes by strings
    is_dynamic: bool  # it takes attributes by computed names
    stored_globals: frozenset[str]
    stored_cells: frozenset[str]  # variables around the function that it assigns
    self_stores: frozenset[str]  # attributes that it sets, of its first argument
    stored_attributes: frozenset[str]  # attributes that it sets, of objects that it got from elsewhere


@functools.lru_cache(maxsize=16_384)
def read_code(code: types.CodeType) -> CodeReads:
    """Return what a function with this code, nested functions included, reads and writes."""
    return _Reader(code).read()


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


class _Line:
    """What has been read on the current line of code."""

    def __init__(self) -> None:
        self.chains: dict[NameChain, None] = {}
        self.has_change = False  # of something that is not resolved: of what the line names
        self.has_arithmetic = False  # its results are new values


class _Reader:
    def __init__(self, code: types.CodeType) -> None:
        self._code = code
        count = code.co_argcount + code.co_kwonlyargcount
        self._arguments = frozenset(code.co_varnames[:count])
        self._self = code.co_varnames[0] if code.co_argcount else ""
        self._chains: dict[NameChain, None] = {}
        self._attributes: set[str] = set()
        self._globals: set[str] = set()
        self._cells: set[str] = set()
        self._self_stores: set[str] = set()
        self._stored: set[str] = set()
        self._line = _Line()
        self._aliases: dict[str, set[NameChain]] = defaultdict(set)  # what local variables may stand for
        self._changed_locals: set[str] = set()

    def read(self) -> CodeReads:
        codes = [*nested_codes(self._code)]
        for one in codes:
            self._read_one(one, is_outer=one is self._code)
        self._resolve_aliases()
        named = {chain.names[0] for chain in self._chains if chain.root == "global"} | self._attributes
        takes_strings = not named.isdisjoint(_BY_STRINGS)
        is_dynamic = not named.isdisjoint(_DYNAMIC) or (takes_strings and any(map(_computes_names, codes)))
        constants = (value for one in codes for value in one.co_consts)
        strings = {value for value in constants if isinstance(value, str) and value.isidentifier()}
        strings = strings if is_dynamic or takes_strings else set()
        return CodeReads(
            frozenset(self._chains), frozenset(self._attributes), frozenset(strings), is_dynamic,
            frozenset(self._globals), frozenset(self._cells), frozenset(self._self_stores),
            frozenset(self._stored | (strings if "setattr" in named or "__setattr__" in named else set())),
        )  # fmt: skip

    def _read_one(self, code: types.CodeType, *, is_outer: bool) -> None:
        current: NameChain | None = None  # the chain that the next instruction may extend
        place: int | None = None
        before = ""  # the operation of the last instruction, and its symbol
        for step in dis.get_instructions(code):
            if step.opname in _SILENT:
                continue
            if current is not None and step.opname in _ATTRIBUTES:
                self._attributes.add(step.argval)
                current = current._replace(names=(*current.names, step.argval))
                continue
            if step.opname == "IMPORT_FROM" and current is not None:  # `from m import a, b` takes a, stores it, takes b
                self._note(NameChain("import", (current.names[0], step.argval)))
                current = current._replace(root="from")
            elif current is not None and current.root == "from" and step.opname.startswith("STORE_"):
                continue
            self._note(current)
            at = _line_of(step)
            if at is not None and at != place:
                self._end_line()
                place = at
            if step.opname == "IMPORT_FROM":
                continue
            self._note_store(step, current)
            self._note_local_store(step, current, before)
            self._note_call(step, code)
            before = step.opname + step.argrepr
            current = self._begin(step, is_outer)
        self._note(current)
        self._end_line()

    def _begin(self, step: dis.Instruction, is_outer: bool) -> NameChain | None:
        """Return the chain that an instruction starts."""
        if step.opname in _GLOBALS:
            return NameChain("global", (step.argval,))
        if step.opname == "IMPORT_NAME":
            return NameChain("import", (step.argval,))
        if step.opname in _CELLS and step.argval in self._code.co_freevars:
            return NameChain("closure", (step.argval,))
        if not step.opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST")) and step.opname not in _CELLS:
            return None
        name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        if is_outer or step.opname in _CELLS:
            if name == self._self:
                return NameChain("self", ())
            if name in self._arguments:
                return NameChain("default", (name,))
        return NameChain("local", (name,))

    def _note(self, chain: NameChain | None) -> None:
        """Record a complete chain; a container whose mutating method it names is changed."""
        if chain is None or chain.root == "from" or not chain.names:
            return
        if len(chain.names) > 1 and _changes_receiver(chain.names[-1]):
            self._note_change(chain._replace(names=chain.names[:-1]))
            # `list.append(a, 1)` and `torch.relu_(a)` change an argument
            self._line.has_change = self._line.has_change or chain.root in ("global", "import")
        elif chain.root == "global" and chain.names[-1] in _CHANGING:
            self._line.has_change = True
        self._line.chains[chain] = None
        if chain.root != "local":
            self._chains[chain] = None

    def _note_change(self, chain: NameChain) -> None:
        if chain.root in ("local", "default"):
            self._changed_locals.add(chain.names[0])
        if chain.root != "local":
            self._chains[chain._replace(change=Change.CHANGED)] = None

    def _note_store(self, step: dis.Instruction, current: NameChain | None) -> None:
        """Record what is stored to: the chain before, or one of the same line (`a.n += 1`, `a[i] = x`)."""
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self._globals.add(step.argval)
        elif step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in self._code.co_freevars:
            self._cells.add(step.argval)
        elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            for chain in [*self._line.chains]:
                self._note_change(chain)
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            self._attributes.add(step.argval)
            line = self._line.chains
            extended = [one._replace(names=one.names[:-1]) for one in line if one.names[-1] == step.argval]
            owners = extended if current is None else [current]
            if not owners or any(owner.root != "self" or owner.names for owner in owners):
                self._stored.add(step.argval)
            for owner in owners:
                if owner.names:
                    self._note_change(owner)
                elif owner.root == "self":
                    self._self_stores.add(step.argval)
        elif step.opname in (*_ATTRIBUTES, "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"):
            self._attributes.add(step.argval)
            self._line.has_change = self._line.has_change or _changes_receiver(step.argval)

    def _note_local_store(self, step: dis.Instruction, current: NameChain | None, before: str) -> None:
        """Record what a local variable may stand for: the chain before it, or an item of what its line names."""
        if step.opname not in _STORES:
            return
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname == "STORE_FAST_LOAD_FAST":
            names = names[:1]
        for name in names:
            if before.startswith("INPLACE_") or (before.startswith("BINARY_OP") and before.endswith("=")):
                self._changed_locals.add(name)
            elif current is not None and current.names:
                self._aliases[name].add(current)
            elif not self._line.has_arithmetic:
                self._aliases[name] |= {one._replace(change=Change.CHANGED_INSIDE) for one in self._line.chains}

    def _note_call(self, step: dis.Instruction, code: types.CodeType) -> None:
        """Record arithmetic, and calls with the argument `out`, which is changed."""
        name = step.opname
        if name.startswith(("BINARY_", "INPLACE_", "UNARY_", "COMPARE_OP")) and "SUBSCR" not in name:
            self._line.has_arithmetic = self._line.has_arithmetic or name != "BINARY_SLICE"
        keywords = code.co_consts[step.arg or 0] if name == "KW_NAMES" else step.argval if name == "LOAD_CONST" else ()
        if isinstance(keywords, tuple) and "out" in keywords:
            self._line.has_change = True

    def _end_line(self) -> None:
        for chain in self._line.chains if self._line.has_change else ():
            self._note_change(chain)
        self._line = _Line()

    def _resolve_aliases(self) -> None:
        """Record that what changed local variables may stand for is changed."""
        ahead, seen = [(name, Change.CHANGED) for name in self._changed_locals], set[tuple[str, Change]]()
        while ahead:
            name, change = ahead.pop()
            if (name, change) in seen:
                continue
            seen.add((name, change))
            for chain in self._aliases[name]:
                least = min(change, chain.change or Change.CHANGED)
                if chain.root != "local":
                    self._chains[chain._replace(change=least)] = None
                else:
                    ahead.append((chain.names[0], least))


def _changes_receiver(method: str) -> bool:
    """Return whether a method of this name changes the object that it is called on."""
    return method in _MUTATORS or (method.endswith("_") and not method.endswith("__"))


def _computes_names(code: types.CodeType) -> bool:
    """Return whether code passes anything but a constant as the name to `getattr` and its like."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
    for at, step in enumerate(steps):
        if step.opname in _GLOBALS and step.argval in _BY_STRINGS:
            end = next((n for n in range(at, len(steps)) if steps[n].opname.startswith("CALL")), at)
            count = steps[end].argval if isinstance(steps[end].argval, int) else 0
            given = steps[end - count + 1] if 2 <= count <= 3 else step  # the name is the second argument
            if given.opname != "LOAD_CONST" or not isinstance(given.argval, str):
                return True
    return False


def _line_of(step: dis.Instruction) -> int | None:
    """Return the line of an instruction; None if it is that of the one before."""
    positions = getattr(step, "positions", None)
    line: int | None = step.starts_line if positions is None else positions.lineno
    return line
