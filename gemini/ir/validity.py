"""Validity of a graph: the calls and the model state for which it holds, as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemini.ir.autograd_modes import Region

Signature = tuple[tuple[Any, ...], ...]


class Validity:
    """The calls and the model state for which a graph holds.

    `batch`: sample dimension and factor per input; `glue`: the modules and reads of which `fingerprint` is made
    (`gemini.capture.python_state`).
    """

    def __init__(
        self, signature: Signature, batch: dict[str, tuple[int, int]], region: Region, glue: list[str]
    ) -> None:
        self.signature, self.batch, self.region, self.glue = signature, batch, region, glue
        self.fingerprint: tuple[Any, ...] = ()

    def fits(self, signature: Signature) -> bool:
        """Return whether a call signature equals the captured one up to the batch size, which all inputs must share."""
        if len(signature) != len(self.signature):
            return False
        sizes = set()
        for fact, expected in zip(signature, self.signature, strict=True):
            if fact == expected and fact[0] not in self.batch:
                continue
            if fact[0] not in self.batch or fact[:-1] != expected[:-1] or len(fact[-1]) != len(expected[-1]):
                return False
            dim, factor = self.batch[fact[0]]
            shape, wanted = list(fact[-1]), list(expected[-1])
            samples, rest = divmod(shape.pop(dim), factor)
            wanted.pop(dim)
            if rest or shape != wanted:
                return False
            sizes.add(samples)
        return len(sizes) <= 1 and 0 not in sizes


def describe_state(found: tuple[Any, ...]) -> list[str]:
    """Return a fingerprint as texts without object identities, comparable between processes."""
    texts = []
    for fact in found:
        if fact and isinstance(fact[0], str) and ("@" in fact[0] or len(fact) == 2):
            if not fact[0].startswith("_output_capturing"):  # transformers sets it on a first call
                texts.append(f"{fact[0]}: {fact[1]}")
        elif fact and isinstance(fact[0], str):
            name, plain, children, buffers, parameters, forward, *_ = fact
            held = [("children", [key for key, _ in children]), ("buffers", buffers), ("parameters", parameters)]
            texts.append(f"{name or 'model'}: {[*plain, *held, ('own forward', forward is not None)]}")
        else:
            texts.append(f"state: {sorted((key, value) for key, value in fact if key[:1] != '_')!r}")
    return texts


def describe_differences(before: list[str], now: list[str]) -> Iterator[str]:
    """Yield one line per fact in which two fingerprints, as texts, differ."""
    if len(before) != len(now):
        yield "the model has other modules"
        return
    for one, other in zip(before, now, strict=True):
        if one != other:
            name = one.partition(":")[0]
            was, became = (text[len(name) + 2 :].split("), (") for text in (one, other))
            old = [part for part in was if part not in became]
            new = [part for part in became if part not in was]
            yield f"{name}: {_shorten(old)} is now {_shorten(new)}"


def _shorten(parts: list[str]) -> str:
    """Return the first parts and the number of the remaining ones."""
    shown = "; ".join(part.strip("[()]") for part in parts[:2])
    return f"{shown} and {len(parts) - 2} more" if len(parts) > 2 else shown
