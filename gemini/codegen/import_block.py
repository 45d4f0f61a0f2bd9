"""Import block: the names that a generated file imports, each in one spelling."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from typing import Any

from gemini.errors import GenerateError
from gemini.ir.import_paths import Symbol

SUPPORT = "gemini.codegen.stage_runtime"


class Imports:
    """The imports of a file; `taken` are names that its code uses otherwise."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = {*taken, "torch", "nn", "F", "np", "math", "Tensor", "Any"}
        self.modules: dict[str, str] = {"torch": "", "torch.nn": "nn"}  # module → alias; nn is `from torch import nn`
        self.names: dict[tuple[str, str], str] = {}  # (module, name) → local name

    def alias(self, module: str, name: str) -> str:
        """Import a module under another name."""
        self.modules[module] = name
        return name

    def support(self, name: str) -> str:
        """Import a function of the support module."""
        return self.name(SUPPORT, name)

    def name(self, module: str, name: str) -> str:
        """Import one name from a module."""
        key = (module, name)
        if key not in self.names:
            called, count = name, 2
            while called in self.taken or called in self.names.values():
                called, count = f"{name}_{count}", count + 1
            self.names[key] = called
        return self.names[key]

    def symbol(self, symbol: Symbol) -> str:
        """Return the text of an importable object."""
        if symbol.module == "builtins" and hasattr(builtins, symbol.qualname):
            return symbol.qualname
        if symbol.module == "torch.nn.functional":
            return f"{self.alias('torch.nn.functional', 'F')}.{symbol.qualname}"
        if symbol.module == "torch" or (symbol.module.startswith("torch.") and reachable(symbol)):
            return f"{symbol.module}.{symbol.qualname}"
        head, _, rest = symbol.qualname.partition(".")
        return f"{self.name(symbol.module, head)}{'.' if rest else ''}{rest}"

    def cls(self, cls: type, where: str) -> str:
        """Return the text of a class."""
        symbol = Symbol(cls.__module__, cls.__qualname__)
        if "<" in cls.__qualname__ or _resolve(symbol) is not cls:
            raise GenerateError(
                f"{where} needs the class {cls.__qualname__}, which is local to a function and cannot be imported\n"
                "    → define it at the top of its module"
            )
        return self.symbol(symbol)

    def lines(self, text: str) -> list[str]:
        """Return the import statements that a text needs, sorted as linters expect."""
        plain = [module for module, alias in self.modules.items() if not alias and f"{module}." in text]
        aliased = {module: alias for module, alias in self.modules.items() if alias}
        rows: list[tuple[int, str, str]] = [(_section(module), module, f"import {module}") for module in plain]
        rows += [
            (_section(module), module, f"import {module} as {alias}")
            for module, alias in aliased.items()
            if module != "torch.nn"
        ]
        froms = {"torch": [name for name in ("Tensor", "nn") if name in text]}
        for (module, name), called in self.names.items():
            froms.setdefault(module, []).append(name if name == called else f"{name} as {called}")
        late = [(_section(module), module, _from(module, names)) for module, names in froms.items()]
        lines: list[str] = []
        for section in (0, 1, 2):
            block = [text for at, _, text in sorted(rows) if at == section]
            block += [text for at, _, text in sorted(late) if at == section]
            lines += [*([""] if block and lines else []), *block]
        return lines


def _from(module: str, names: list[str]) -> str:
    ordered = sorted(names, key=_case)
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= 120:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in ordered) + ")"


def _case(name: str) -> tuple[int, str]:
    """Return the sort key of isort: constants, then classes, then the rest."""
    plain = name.partition(" ")[0]
    return (0 if plain.isupper() and len(plain) > 1 else 1 if plain[:1].isupper() else 2), plain


def _section(module: str) -> int:
    head = module.partition(".")[0]
    return 0 if head in sys.stdlib_module_names else 1


def reachable(symbol: Symbol) -> bool:
    """Return whether `import torch` alone makes the name reachable by attributes."""
    import torch

    found: Any = torch
    for part in [*symbol.module.split(".")[1:], *symbol.qualname.split(".")]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return found is _resolve(symbol)


def _resolve(symbol: Symbol) -> Any:
    try:
        return symbol.resolve()
    except (ImportError, AttributeError):
        return None
