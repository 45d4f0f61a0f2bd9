"""Nested functions of installed packages have that package's globals in a worker."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini.runtime.transport.serialization import ClassTable, pack, unpack

TEXT = """
def collecting(key, *, times=1):
    def hook(module, args, output, *, scale=times):
        if COLLECTED.get() is not None:
            COLLECTED.get().append((key, output * scale))
    hook.key = key
    return hook

def falling(last):
    def fall(count):
        return [count, *fall(count - 1)] if count > last else []
    return fall

def unfinished():
    def ask():
        return later
    if COLLECTED is None:
        later = 1
    return ask
"""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = types.ModuleType("collecting_package")
    made.__file__ = str(Path(torch.__file__).parent.parent / "collecting_package.py")
    made.COLLECTED = ContextVar("collected", default=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(TEXT, vars(made))
    return made


def sent(value: Any) -> Any:
    body, tensors = pack(value, ClassTable())
    return unpack(body, tensors, ClassTable(1))


def test_they_have_the_globals_of_their_package(package: Any) -> None:
    module = nn.Linear(2, 2)
    module.register_forward_hook(package.collecting("first", times=3))
    found = sent(copy.deepcopy(module))
    (hook,) = found._forward_hooks.values()
    assert hook.__globals__ is vars(package)
    assert (hook.key, hook.__qualname__) == ("first", "collecting.<locals>.hook")
    seen: list[Any] = []
    token = package.COLLECTED.set(seen)
    made = found(torch.ones(1, 2))
    package.COLLECTED.reset(token)
    assert seen[0][0] == "first"
    assert torch.equal(seen[0][1], 3 * made)


def test_they_may_hold_themselves_or_nothing_yet(package: Any) -> None:
    assert sent(package.falling(2))(5) == [5, 4, 3]
    with pytest.raises(NameError):
        sent(package.unfinished())()


def test_two_places_of_one_are_one(package: Any) -> None:
    one = package.falling(2)
    first, second = sent([one, one])
    assert first is second


@pytest.mark.parametrize("has_recorded", [False, True])  # after which its layers have hooks
def test_models_that_record_what_layers_return_do_so_where_none_was_made(
    monkeypatch: pytest.MonkeyPatch, has_recorded: bool
) -> None:
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=4,
                       patch_size=2)  # fmt: skip
    model, x = ViTModel(config).eval(), torch.randn(1, 3, 4, 4)
    expected = copy.deepcopy(model)(x, output_hidden_states=True).hidden_states
    if has_recorded:
        model(x, output_hidden_states=True)
    body, tensors = pack(model, ClassTable())
    empty = type(capturing._CAN_RECORD_REGISTRY)()  # as in a worker
    monkeypatch.setattr(capturing, "_CAN_RECORD_REGISTRY", empty)
    found = unpack(body, tensors, ClassTable(1))(x, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, expected)
