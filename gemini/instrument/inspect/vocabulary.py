"""Vocabulary: how the names of one framework map to kinds of findings.

Patterns are shell-like (`torch.nn.*Loss`) and ordered: the first that matches a name decides. A name is
canonicalised first, so that `torch.nn.modules.linear.Linear` and `torch.nn.Linear` are one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True)
class Vocabulary:
    """The names of one framework."""

    framework: str
    roots: frozenset[str]  # top-level packages of the framework and its libraries
    aliases: Sequence[tuple[str, str]]  # (prefix, canonical prefix): the first match is replaced
    calls: Sequence[tuple[str, str]]  # (pattern of a qualified callee, kind)
    bases: Sequence[tuple[str, str]]  # (pattern of a qualified base class, kind of its sub-classes)
    methods: Mapping[str, tuple[str, str]]  # method name → (kind, kind of the receiver)
    no_gradient: frozenset[str] = field(default_factory=frozenset)  # contexts and decorators of evaluation

    def canonical(self, name: str) -> str:
        """Return the canonical form of a name."""
        for spelled, canonical in self.aliases:
            if name.startswith(spelled):
                return canonical + name[len(spelled) :]
        return name

    def knows_name(self, name: str) -> bool:
        """Return whether `name` belongs to this framework or a library on it."""
        return name.partition(".")[0] in self.roots

    def kind_of_call(self, name: str) -> str | None:
        """Return the kind of a call of `name`."""
        return _first(tuple(self.calls), self.canonical(name)) if self.knows_name(name) else None

    def kind_of_subclass(self, base: str) -> str | None:
        """Return the kind of a class derived from `base`."""
        return _first(tuple(self.bases), self.canonical(base)) if self.knows_name(base) else None


@lru_cache(maxsize=4096)
def _first(table: tuple[tuple[str, str], ...], name: str) -> str | None:
    for pattern, kind in table:
        if _compile_pattern(pattern).match(name):
            return kind or None
    return None


@lru_cache(maxsize=1024)
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    # A star stays within one component, as in a path: "torch.nn.*" is not "torch.nn.functional.relu".
    return re.compile(pattern.replace(".", r"\.").replace("*", "[^.]*") + r"\Z")
