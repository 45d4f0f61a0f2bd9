"""Fingerprints: the part of a model's Python state that its glue may branch on.

`self.training`, flags, numbers and names on modules and configurations, the children of containers, replaced
forwards, hooks. A graph is only valid while the fingerprint of the modules it opened is the same. Modules that run
whole are left out: their Python decides anew each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gemini.capture.hooks import has_hooks

_PLAIN = (bool, int, float, str, type(None))


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


def _forward(replaced: Any) -> int | None:
    """The identity of a forward set on the instance; the stand-in of a running graph counts as what it replaced."""
    replaced = getattr(replaced, "__gemini_stands_for__", replaced)
    return None if replaced is None else id(replaced)


def readable(found: tuple[Any, ...]) -> list[str]:
    """A fingerprint as texts, without identities: comparable between processes."""
    texts = []
    for fact in found:
        if fact and isinstance(fact[0], str):
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
