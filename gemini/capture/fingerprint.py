"""Fingerprints: the part of a model's Python state that its glue may branch on.

`self.training`, flags, numbers and names on modules and configurations, the children of containers, replaced
forwards, hooks. A graph is only valid while the fingerprint of the modules it opened is the same. Modules that run
whole are left out: their Python decides anew each time. Of these, and of containers, functions and other objects in
attributes, only what the glue was seen to read counts: `attribute@module`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gemini.capture.hooks import has_hooks

_PLAIN = (bool, int, float, str, type(None))
_DEEP, _MANY = 3, 256  # how far, and how much of, the contents of an object count


def glue_modules(model: nn.Module, whole: Iterable[str]) -> list[str]:
    """The modules that are not inside a leaf or block."""
    kept = set(whole)
    found = []
    for name, _ in model.named_modules():
        parts = name.split(".")
        if not any(".".join(parts[:count]) in kept for count in range(1, len(parts) + 1)) and "" not in kept:
            found.append(name)
    return found


def fingerprint(model: nn.Module, names: Iterable[str]) -> tuple[Any, ...]:
    """A value that differs when the Python of these modules may take another way."""
    facts: list[Any] = []
    configurations: dict[int, Any] = {}
    for name in names:
        if "@" in name:
            facts.append((name, *_read(model, name)))
            continue
        try:
            module = model.get_submodule(name) if name else model
        except AttributeError:
            facts.append((name, "gone"))
            continue
        own = vars(module)
        facts.append(
            (
                name,
                tuple((key, value) for key, value in own.items() if isinstance(value, _PLAIN)),
                tuple((key, id(child)) for key, child in module._modules.items()),
                tuple((key, buffer is None) for key, buffer in module._buffers.items()),
                tuple(key for key, parameter in module._parameters.items() if parameter is not None),
                _forward(own.get("forward")),
                bool(name) and has_hooks(module),  # those on the model itself run around the graph
            )
        )
        config = own.get("config")
        if config is not None and hasattr(config, "__dict__"):
            configurations[id(config)] = config
    facts.append(
        (
            ("default", str(torch.get_default_dtype())),
            *((name, f"{p.dtype} {p.device} {p.requires_grad}") for name, p in model.named_parameters()),
            *((name, f"{b.dtype} {b.device}") for name, b in model.named_buffers()),
        )
    )
    for config in configurations.values():
        facts.append(tuple((key, value) for key, value in vars(config).items() if isinstance(value, _PLAIN)))
    return tuple(facts)


def reads_of(touched: Iterable[tuple[str, str]], model: nn.Module, glue: Iterable[str]) -> list[str]:
    """The attributes that glue has read, as far as the fingerprint of its modules does not hold them anyway."""
    opened = set(glue)
    found = []
    for name, key in touched:
        value = vars(model.get_submodule(name)).get(key)
        if isinstance(value, (torch.Tensor, nn.Module)) or (isinstance(value, _PLAIN) and name in opened):
            continue
        if key not in ("config", "forward") and "@" not in name:
            found.append(f"{key}@{name}")
    return sorted(found)


def _read(model: nn.Module, name: str) -> tuple[str, tuple[int, ...]]:
    """What an attribute holds: as text, and by identity where text does not tell."""
    key, _, owner = name.partition("@")
    try:
        value = vars(model.get_submodule(owner)).get(key, "gone")
    except AttributeError:
        return "gone", ()
    found: list[int] = []
    return repr(_held(value, found, 0)), tuple(found)


def _held(value: Any, found: list[int], depth: int) -> Any:
    if isinstance(value, (*_PLAIN, complex, bytes, torch.dtype, torch.device, torch.Size)):
        return value
    if isinstance(value, (torch.Tensor, nn.Module)):
        found.append(id(value) if isinstance(value, nn.Module) else 0)
        return type(value).__name__
    if isinstance(value, functools.partial):
        return "partial", [_held(part, found, depth + 1) for part in (value.func, value.args, value.keywords)]
    if callable(value):
        found.append(id(value))
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
        if depth > _DEEP or len(value) > _MANY:
            return type(value).__name__, len(value)
        items: Any = value.items() if isinstance(value, dict) else value
        facts = [_held(part, found, depth + 1) for part in items]
        return type(value).__name__, facts if isinstance(value, (list, tuple, dict, deque)) else sorted(facts, key=repr)
    own = getattr(value, "__dict__", None)
    if depth > _DEEP or not isinstance(own, dict) or len(own) > _MANY:
        return type(value).__name__
    return type(value).__name__, [(key, _held(part, found, depth + 1)) for key, part in own.items()]


def _forward(replaced: Any) -> int | None:
    """The identity of a forward set on the instance; the stand-in of a running graph counts as what it replaced."""
    replaced = getattr(replaced, "__gemini_stands_for__", replaced)
    return None if replaced is None else id(replaced)


def readable(found: tuple[Any, ...]) -> list[str]:
    """A fingerprint as texts, without identities: comparable between processes."""
    texts = []
    for fact in found:
        if fact and isinstance(fact[0], str) and "@" in fact[0]:
            texts.append(f"{fact[0]}: {fact[1]}")
        elif fact and isinstance(fact[0], str):
            name, plain, children, *rest = fact
            plain = [(key, value) for key, value in plain if not key.startswith("_output_capturing")]
            texts.append(f"{name or 'model'}: {plain} {[key for key, _ in children]} {rest[:2]} {rest[2] is None}")
        else:
            texts.append(f"state: {sorted((key, value) for key, value in fact if key[:1] != '_')!r}")
    return texts


def differing(before: list[str], now: list[str]) -> Iterator[str]:
    """How two fingerprints, as texts, differ: a line each place, with what is other there and nothing else."""
    if len(before) != len(now):
        yield "the model has other modules"
        return
    for one, other in zip(before, now, strict=True):
        if one != other:
            name = one.partition(":")[0]
            was, became = (text[len(name) + 2 :].split("), (") for text in (one, other))
            old = [part for part in was if part not in became]
            new = [part for part in became if part not in was]
            yield f"{name}: {'; '.join(old)} is now {'; '.join(new)}"
