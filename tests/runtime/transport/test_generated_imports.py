"""A worker executes generated source that imports user modules without running the user's script."""

from __future__ import annotations

import sys
from types import ModuleType

from gemini.pipe.live_stages import load_module
from gemini.runtime.transport.code_dependencies import collect_user_objects, stub_modules

TEXT = "from odd_user_module import double\nimport odd_user_module\n\nRESULT = double(odd_user_module.THREE)\n"


def _user_module(tmp_path) -> ModuleType:
    made = ModuleType("odd_user_module")
    made.__file__ = str(tmp_path / "odd_user_module.py")
    vars(made).update(double=lambda x: 2 * x, THREE=3, SECRET=object())
    return made


def test_what_is_imported_is_lent_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "odd_user_module", _user_module(tmp_path))
    lent = collect_user_objects([TEXT, "import torch\nfrom math import pi\n"])
    assert {module: sorted(names) for module, names in lent.items()} == {"odd_user_module": ["THREE", "double"]}
    monkeypatch.delitem(sys.modules, "odd_user_module")
    with stub_modules(lent):
        assert vars(load_module(TEXT, "<stages>/odd.py"))["RESULT"] == 6
    assert "odd_user_module" not in sys.modules


def test_a_module_that_is_there_comes_back():
    main = sys.modules["__main__"]
    with stub_modules({"__main__": {"lent_name": 1}}):
        assert sys.modules["__main__"].lent_name == 1
    assert sys.modules["__main__"] is main
    assert not hasattr(main, "lent_name")
