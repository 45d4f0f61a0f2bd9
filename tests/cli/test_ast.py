"""`gemini ast`: the files it writes, and its errors."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path

import pytest

from gemini.cli.main import main

MNIST = Path(__file__).parents[2] / "samples" / "mnist" / "train.py"


@pytest.mark.parametrize("suffix", [".svg", ".png", ".dot", ".SVG"])
def test_writes(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    if suffix != ".dot":
        pytest.importorskip("pygraphviz")
    out = tmp_path / f"ast{suffix}"
    assert main(["ast", str(MNIST), "-o", str(out)]) == 0
    assert "boxes for" in capsys.readouterr().out
    begin = {".svg": b"<?xml", ".png": b"\x89PNG", ".dot": b"digraph"}[suffix.lower()]
    assert out.read_bytes().startswith(begin)
    assert list(tmp_path.iterdir()) == [out]


def test_after_shows_the_changes(tmp_path: Path) -> None:
    before, after, one = (tmp_path / f"{name}.dot" for name in ("before", "after", "one"))
    assert main(["ast", str(MNIST), "-o", str(before)]) == 0
    assert main(["ast", str(MNIST), "--after", "-o", str(after)]) == 0
    assert main(["ast", str(MNIST), "-o", str(one), "--after", "training-sites"]) == 0
    assert "__gemini__" not in before.read_text()
    assert "__gemini__.on(images)" in after.read_text()
    assert "__gemini__.on(images)" not in one.read_text()
    assert "__gemini__.loss(loss)" in one.read_text()


def test_dot_text_needs_no_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "pygraphviz":
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["ast", str(MNIST), "-o", str(tmp_path / "a.dot")]) == 0
    assert main(["ast", str(MNIST), "-o", str(tmp_path / "a.svg")]) == 2
    assert "pip install 'gemini-instrumenter[viz]'" in capsys.readouterr().err
    assert not (tmp_path / "a.svg").exists()


def test_bad_input_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\ndef f(:\n")
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\xff\xfe\x00")
    cases = {
        ("nowhere.py", "a.svg"): "cannot read nowhere.py: No such file",
        (str(tmp_path), "a.svg"): "is a folder without a __main__.py",
        (str(bad), "a.svg"): "SyntaxError",
        (str(binary), "a.svg"): "is not Python",
        (str(MNIST), "a.gif"): "it ends in '.gif'\n    → name a file ending in .svg, .png, .dot",
        (str(MNIST), "a"): "it has no suffix",
        (str(MNIST), "none/a.dot"): "cannot write",
    }
    for (script, out), said in cases.items():
        assert main(["ast", script, "-o", str(tmp_path / out)]) == 2
        assert said in capsys.readouterr().err
    assert main(["ast", str(MNIST), "-o", str(tmp_path / "a.svg"), "--after", "no-such"]) == 2
    assert "unknown pass 'no-such'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.py", "binary.py"]


def test_nothing_but_the_result_is_said(tmp_path: Path) -> None:
    pytest.importorskip("pygraphviz")
    command = [sys.executable, "-m", "gemini.cli.main", "ast", str(MNIST), "-o", str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
