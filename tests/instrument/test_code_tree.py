"""The code tree holds what a program imports of the user's own, and agrees with the import hook about it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from gemini.instrument.program.code_tree import CodeTree
from gemini.instrument.program.import_names import absolute, find_imported_names
from gemini.instrument.program.ownership import Ownership
from tests.launcher.process.launching import PYTHON, Case, run

PROJECT: dict[str, str | bytes] = {
    "main.py": "import json, models\nfrom lazy import x\ndef f():\n    import inner.deep\n    from space import part\n",
    "models/__init__.py": "from .net import Net\nfrom . import loss\n",
    "models/net.py": "import numpy as np\nfrom ..nowhere import x\nclass Net: pass\n",
    "models/loss.py": "from models import net\nimport importlib\nimportlib.import_module('.extra', 'models')\n",
    "models/extra.py": "",
    "models/unused.py": "import hidden",
    "hidden.py": "",
    "lazy.py": "import main, lazy\nx = __import__('dynamic')\n",
    "dynamic.py": "",
    "inner/__init__.py": "",
    "inner/deep/__init__.py": "from .. import side\n",
    "inner/side.py": "if 0:\n    import absent\n",
    "space/part.py": "from . import other",
    "space/other.py": "",
    "space/unrelated.py": "",
    "not_imported.py": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    Case("tree", files=PROJECT).write(tmp_path)
    return tmp_path


def test_a_program_is_its_own_files_and_leaves(project: Path) -> None:
    tree = CodeTree.of_script(str(project / "main.py"))
    own = {node.module for node in tree if node.source is not None}
    assert own == {
        *("__main__", "models", "models.net", "models.loss", "models.extra", "models.unused", "hidden", "lazy"),
        *("main", "dynamic", "inner", "inner.deep", "inner.side", "space.part", "space.other"),
    }
    assert tree.leaves() == ["numpy"]
    assert tree.nodes["absent"].problem == "not found"
    assert tree.nodes["space"].is_package
    assert tree.own()[0].path == str(project / "main.py")
    assert "json" not in tree.nodes


def test_the_drawing_shows_each_module_once_in_full(project: Path) -> None:
    drawn = str(CodeTree.of_script(str(project / "main.py")))
    assert drawn.splitlines()[0] == "main.py"
    assert "├── models\n" in drawn
    assert "numpy  (installed)" in drawn
    assert "absent  (not found)" in drawn
    assert drawn.count("models.extra") == 1
    assert "models  …" in drawn  # imported again further down


def test_a_module_as_the_program(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    tree = CodeTree.of_module("models.loss")
    assert tree.root.module == "models.loss"
    assert {"models", "models.net", "models.extra"} <= set(tree.nodes)
    with pytest.raises(ModuleNotFoundError):
        CodeTree.of_module("inner")  # no __main__
    with pytest.raises(ModuleNotFoundError):
        CodeTree.of_module("nope.nope")


def test_broken_modules_are_part_of_the_tree(tmp_path: Path) -> None:
    Case("broken", files={"main.py": "import bad, worse", "bad.py": "x = (", "worse.py": b"\xff\0"}).write(tmp_path)
    tree = CodeTree.of_script(str(tmp_path / "main.py"))
    assert "cannot be parsed" in tree.nodes["bad"].problem
    assert "cannot be parsed" in tree.nodes["worse"].problem


def test_installed_packages_are_read_when_named(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "main.py": "import lib.a",
        "site-packages/lib/__init__.py": "",
        "site-packages/lib/a.py": "import os",
    }
    Case("named", files=files).write(tmp_path)
    search = [str(tmp_path / "site-packages")]
    assert CodeTree.of_script(str(tmp_path / "main.py"), search=search).leaves() == ["lib"]
    tree = CodeTree.of_script(str(tmp_path / "main.py"), ["lib"], search)
    assert {node.module for node in tree if node.source} == {"__main__", "lib", "lib.a"}


def test_the_tree_holds_all_that_is_imported_when_the_program_runs(project: Path, tmp_path: Path) -> None:
    report = (
        "import json, sys\nfrom gemini.instrument.program.ownership import Ownership\no = Ownership()\n"
        "own = [n for n, m in sys.modules.items() if getattr(m, '__file__', None) and o.owns(m.__file__, n)]\n"
        "print(json.dumps([n for n in own if n != '__main__']))\n"
    )
    files = {
        **PROJECT,
        "models/net.py": "Net = 1",
        "main.py": f"{PROJECT['main.py']!s}f()\n{report}",
        "inner/side.py": "",
        "lazy.py": "x = __import__('dynamic')",
    }
    folder = tmp_path / "run"
    done = run(PYTHON, Case("agree", files=files), folder)
    assert done.stderr == ""
    imported = json.loads(done.stdout)
    tree = CodeTree.of_script(str(folder / "main.py"))
    assert set(imported) <= {node.module for node in tree if node.source is not None}
    assert {"models.loss", "inner.deep", "space.part"} <= set(imported)


@pytest.mark.parametrize(
    ("text", "package", "names"),
    [
        ("import a.b, c as d", "", ["a.b", "c"]),
        ("from a import b, c", "", ["a", "a.b", "a.c"]),
        ("from . import b", "p.q", ["p.q", "p.q.b"]),
        ("from ..x import *", "p.q", ["p.x"]),
        ("from ... import b", "p.q", []),
        ("from . import b", "", []),
        ("import importlib; importlib.import_module('m.n')", "", ["importlib", "m.n"]),
        (
            "from importlib import import_module as i; import_module('.m', package='p')",
            "",
            ["importlib", "importlib.import_module", "p.m"],
        ),
        ("import_module(name); import_module('not a name'); __import__('z')", "", ["z"]),
        ("try:\n  import a\nexcept ImportError:\n  import b", "", ["a", "b"]),
    ],
)
def test_imports_as_written(text: str, package: str, names: list[str]) -> None:
    assert list(find_imported_names(ast.parse(text), package)) == names


def test_absolute_names() -> None:
    assert absolute("x", 0, "p") == "x"
    assert absolute("", 1, "p.q") == "p.q"
    assert absolute("x", 2, "p.q") == "p.x"
    assert absolute("x", 3, "p.q") is None


def test_ownership_by_place_and_by_name(tmp_path: Path) -> None:
    import os

    import gemini

    own = Ownership(["lib"], main="/site-packages/tool.py")
    assert own.owns(str(tmp_path / "a.py"), "a")
    assert not own.owns(os.__file__, "os")
    assert not own.owns(str(gemini.__file__), "gemini")
    assert not own.owns("/x/site-packages/other/a.py", "other.a")
    assert not own.owns("/x/dist-packages/other.py", "other")
    assert own.owns("/x/site-packages/lib/a.py", "lib.a")
    assert not own.owns("/x/site-packages/library/a.py", "library.a")
    assert own.owns("/site-packages/tool.py", "__main__")
    link = tmp_path / "linked"
    link.symlink_to(Path(os.__file__).parent)
    assert not own.owns(str(link / "ast.py"), "ast")
