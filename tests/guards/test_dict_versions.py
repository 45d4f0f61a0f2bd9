"""Every write to a dictionary or class changes its version; replaced functions are detected with and without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch.nn import functional as F

from gemini.guards import monkeypatches
from gemini.guards.monkeypatches import _Names, version_of

counted = pytest.mark.skipif(sys.version_info >= (3, 13), reason="CPython counts no writes from 3.13 on")

WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another value": lambda space: space.update(one=2),
    "an equal value": lambda space: space.update(one=True),
    "a new key": lambda space: space.setdefault("more", 0),
    "a key less": lambda space: space.pop("one"),
    "all keys less": lambda space: space.clear(),
    "a union": lambda space: space.__ior__({"one": 3}),
}


@counted
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_gives_a_dictionary_another_number(write: Callable[[dict[str, Any]], object]) -> None:
    space: dict[str, Any] = {"one": 1, "two": 2}
    writes = version_of(space)
    assert writes is not None
    before = writes.number()
    assert space["one"] == 1
    assert [*space.values()] == [1, 2]
    assert writes.number() == before
    write(space)
    assert writes.number() != before


@counted
def test_a_class_has_a_number_too() -> None:
    class Kind:
        value = 1

        def method(self) -> int:
            return 1

    writes = version_of(vars(Kind))
    assert writes is not None
    seen = [writes.number()]
    for name, value in (("method", lambda self: 2), ("value", 2), ("more", 3)):
        setattr(Kind, name, value)
        seen.append(writes.number())
    assert len({*seen}) == 4


def test_what_is_no_dictionary_has_none() -> None:
    class Table(dict[str, Any]):
        pass

    assert version_of(Table()) is None


@pytest.mark.parametrize("are_counted", [True, False])
def test_a_function_in_another_s_place_is_seen(monkeypatch: pytest.MonkeyPatch, are_counted: bool) -> None:
    if not are_counted:
        monkeypatch.setattr(monkeypatches, "_ARE_COUNTED", False)
    names = _Names("torch.nn.functional", vars(F))
    assert names.find_replaced() == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "relu", lambda x: x)
        assert names.find_replaced() == "torch.nn.functional.relu"
        assert names.find_replaced() == "torch.nn.functional.relu"
    assert names.find_replaced() == ""
