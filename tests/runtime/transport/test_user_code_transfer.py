"""Code of the user's other files reaches workers without executing those files."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from gemini.runtime.transport.serialization import _copy_code, _load_code
from gemini.user_code import is_user_module

TEXT = """
import threading

open({log!r}, "a").write("x")  # what a file does when it is run
FACTOR = 3
BUSY = threading.local()  # cannot be copied


def scaled(value):
    return FACTOR * value


def held(value):
    return value, BUSY
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    log = tmp_path / "log"
    (tmp_path / "a_file_of_the_users.py").write_text(TEXT.format(log=str(log)), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    is_user_module.cache_clear()
    yield importlib.import_module("a_file_of_the_users")
    sys.modules.pop("a_file_of_the_users", None)
    is_user_module.cache_clear()


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "log").read_text(encoding="utf-8"))


def test_a_function_arrives_though_its_file_is_not_run(module: ModuleType, tmp_path: Path) -> None:
    body = _copy_code(module.scaled)
    sys.modules.pop(module.__name__)  # as in a worker
    assert _load_code(body)(2) == 6
    assert runs(tmp_path) == 1
    assert not cloudpickle.list_registry_pickle_by_value()


def test_what_cannot_be_copied_is_imported(module: ModuleType, tmp_path: Path) -> None:
    body = _copy_code(module.held)
    sys.modules.pop(module.__name__)
    assert _load_code(body)(2)[0] == 2
    assert runs(tmp_path) == 2


def test_classes_stay_apart_where_a_script_replaces_uuid4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=7))
    one, other = type("One", (), {}), type("Other", (), {})
    names = {cloudpickle.cloudpickle._get_or_create_tracker_id(kind) for kind in (one, other)}
    assert len(names) == 2
