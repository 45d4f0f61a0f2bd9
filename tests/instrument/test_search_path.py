"""Folders that a script adds to sys.path: computed from the usual expressions, and nothing is ever run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini.instrument.program.search_path import find_added_folders
from gemini.instrument.text.source_file import SourceFile

HEAD = "import os, sys, pathlib, site\nfrom os.path import dirname, join as j\nfrom pathlib import Path\n"


def folders(tmp_path: Path, line: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + line + "\n")
    return [str(Path(one).relative_to(tmp_path)) for one in find_added_folders(SourceFile.read(script, "__main__"))]


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'src'))",
        "sys.path.append(os.path.abspath(j(dirname(os.path.realpath(__file__)), 'src')))",
        "sys.path.append(str(Path(__file__).resolve().parent / 'src'))",
        "sys.path.insert(1, os.path.dirname(__file__) + '/src')",
        "ROOT = pathlib.Path(__file__).parent\nsys.path.append(str(ROOT.joinpath('src')))",
        "sys.path.append(str(Path(__file__).parents[0] / 'src' / 'deep' / '..'))",
        "sys.path.extend([os.path.join(os.path.dirname(__file__), 'src')])",
        "if True:\n    site.addsitedir(os.path.join(os.path.dirname(__file__), 'src', os.pardir, 'src'))",
        "sys.path.append('src')",
        "sys.path.append(os.path.join(os.path.dirname(sys.argv[0]), 'src'))",
        "sys.path.append(sys.path[0] + '/src')",
        "sys.path.append(os.path.join(os.path.split(__file__)[0], 'src'))",
    ],
)
def test_usual_expressions(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert folders(tmp_path, line) == ["src"]


@pytest.mark.parametrize(
    "line",
    [
        "sys.path.append(os.environ['HOME'])",
        "sys.path.append(open('script.py').read())",
        "sys.path.append(config.root)",
        "sys.path.append(os.path.join(1, 2))",
        "sys.path.append(Path(__file__).parents[99])",
        "sys.path.append('nowhere')",
        "sys.path.append()",
        "a = b\nb = a\nsys.path.append(a)",
        "class sys:\n    path = []\nsys.path.append('src')",
    ],
)
def test_the_rest_is_left_out(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    assert folders(tmp_path, line) == []
