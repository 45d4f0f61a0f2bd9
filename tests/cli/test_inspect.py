"""`gemini inspect`: the table, the JSON, and its errors."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from gemini.cli.main import main

FILES = {
    "train.py": """
        import torch
        from engine import train_one_epoch
        from models import Net
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train_one_epoch(net, optimizer, [])
    """,
    "engine.py": """
        def train_one_epoch(model, optimizer, batches):
            for x in batches:
                model(x).sum().backward()
                optimizer.step()
    """,
    "models/__init__.py": "from .net import Net\n",
    "models/base.py": "from torch import nn\nclass Base(nn.Module): ...\n",
    "models/net.py": "from .base import Base\nclass Net(Base): ...\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table_has_file_and_line_over_the_whole_tree(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "train.py"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["train.py:4", "model", "models.net.Net"] in rows
    assert ["train.py:5", "optimizer", "torch.optim.SGD"] in rows
    assert ["engine.py:3", "backward", "model(…).sum(…).backward"] in rows
    assert ["engine.py:4", "step", "optimizer.step"] in rows
    assert ["models/net.py:2", "model", "models.net.Net"] in rows
    assert any(row[:3] == ["engine.py:2", "train", "loop"] for row in rows)


def test_json_is_for_programs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "-m", "train", "--json", "--kind", "step,train-loop"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(one["kind"], one["line"]) for one in said["findings"]] == [("train loop", 2), ("step", 4)]
    assert set(said["findings"][0]) == {
        "file", "line", "column", "end_line", "end_column", "kind", "name", "text", "is_statement",
    }  # fmt: skip
    assert [Path(path).name for path in said["files"]][:1] == ["train.py"]


def test_a_script_without_anything_is_no_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.py").write_text("print(1)\n")
    assert main(["inspect", "plain.py"]) == 0
    assert "0 findings in 1 file" in capsys.readouterr().out


def test_a_broken_module_is_left_out_with_a_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("engine.py").write_text("def f(:\n")
    assert main(["inspect", "train.py"]) == 0
    said = capsys.readouterr()
    assert "train.py:5" in said.out
    assert said.err.count("\n") == 1
    assert "engine.py cannot be parsed: SyntaxError; it is skipped" in said.err


def test_errors(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text("x = (\n")
    for arguments, said in {
        ("nowhere.py",): "cannot read nowhere.py: No such file or directory",
        ("bad.py",): "bad.py is not Python",
        ("models",): "models is a folder without a __main__.py",
        ("-m", "no_such"): "No module named no_such",
        ("train.py", "--kind", "layr"): "unknown kind 'layr'\n    → did you mean 'layer'?",
        (): "one of the arguments script -m is required",
        ("train.py", "-m", "train"): "not allowed with argument",
    }.items():
        assert main(["inspect", *arguments]) == 2
        assert said in capsys.readouterr().err
