"""Repairs: a guess that a model rejects, completed by what its error says is missing.

Readings of an error, none knowing the architecture: an argument of the forward that the message names; an argument
that is None on the line that failed; a width that an input has and the width that was expected; and, where
placeholders and features do not match in number, how many features there are.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Any

import torch

from conformance.zoo.makers import About, make

CANDIDATES = 8


def repaired(model: Any, kwargs: dict[str, Any], error: BaseException, about: About) -> Iterator[dict[str, Any]]:
    """The guess with one thing more (or other), the likeliest first; nothing if the error says nothing useful."""
    accepted = list(inspect.signature(model.forward).parameters)
    text = str(error)
    placed = _placeholders(kwargs, text, about)
    if placed is not None:
        yield placed
        return
    fitted = _fitted(kwargs, text)
    if fitted is not None:
        yield fitted
    named = [name for name in accepted if re.search(rf"(?<!\w){name}(?!\w)", text)]
    if "one of" in text and any(name in kwargs for name in named):
        named = []  # there is one already
    named = [name for name in named if name not in kwargs]
    for name in dict.fromkeys([*named, *_missing_on_the_line(error.__traceback__, accepted, kwargs)]):
        for value in islice(make(name, about), CANDIDATES):
            yield {**kwargs, name: value}


def _missing_on_the_line(trace: TracebackType | None, accepted: list[str], kwargs: dict[str, Any]) -> list[str]:
    """Arguments not given that are None where a frame of the failing call stands, innermost first."""
    found: list[str] = []
    while trace is not None:
        frame, line = trace.tb_frame, linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        words = set(re.findall(r"\w+", line))
        found[:0] = [
            name
            for name in accepted
            if name not in kwargs and name in words and name in frame.f_locals and frame.f_locals[name] is None
        ]
        trace = trace.tb_next
    return list(dict.fromkeys(found))


def _placeholders(kwargs: dict[str, Any], text: str, about: About) -> dict[str, Any] | None:
    """Token ids with as many placeholders as there are features."""
    lacking = re.search(r"at least one (\w+) token", text)
    token = about.get(f"{lacking.group(1)}_token_id") if lacking is not None else None
    if token is not None and "input_ids" in kwargs:
        words = kwargs["input_ids"].clone()
        words[:, 1] = token
        return {**kwargs, "input_ids": words}
    counts = re.search(r"tokens?:?\s*(\d+)[,; ]+.*?features?:?\s*(\d+)", text)
    words = kwargs.get("input_ids")
    if counts is None or not isinstance(words, torch.Tensor):
        return None
    each, rest = divmod(int(counts.group(2)), about.batch)
    kind = "video" if "ideo" in text else "audio" if "udio" in text else "image"
    token = about.get(f"{kind}_token_id", f"{kind}_token_index")
    if rest or token is None or each == 0 or bool((words == token).sum() == each * about.batch):
        return None
    words = torch.cat([words[:, :4], torch.full((about.batch, each), token), words[:, 4:]], dim=1)
    changed = {**kwargs, "input_ids": words}
    for name, value in kwargs.items():
        if name != "input_ids" and isinstance(value, torch.Tensor) and value.shape == kwargs["input_ids"].shape:
            changed[name] = words.clone() if name == "labels" else torch.ones_like(words)
    return changed


def _fitted(kwargs: dict[str, Any], text: str) -> dict[str, Any] | None:
    """The guess with an input as wide as the layer it meets expects."""
    widths = re.search(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x", text) or re.search(
        r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", text
    )
    if widths is None:
        return None
    had, wanted = int(widths.group(1)), int(widths.group(2))
    for name, value in kwargs.items():
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        if floating and value.dim() > 1 and value.shape[-1] == had and wanted > 1:
            return {**kwargs, name: torch.rand(*value.shape[:-1], wanted)}
    return None
