"""A batch that does not fit its model is one error, which names what was passed and what forward takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from gemini.cli.batch_errors import report_batch_errors
from gemini.cli.main import main

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, tokens, mask=None, *, scale=1.0):
        return self.head(self.table(tokens)) * scale

def wrong_type():
    return Net(), (torch.randn(2, 4),)

def missing():
    return Net(), (), {"labels": {"y": [torch.zeros(2, dtype=torch.long)]}}

def too_large():
    return Net(), (torch.full((2, 4), 30),)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "misfit_models.py").write_text(SOURCE)
    return "misfit_models.py"


@pytest.mark.parametrize(
    "command", [["profile"], ["partition"], ["pipe", "--output", "stages"]], ids=lambda one: one[0]
)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("wrong_type", ("float32 [2, 4]", "RuntimeError: Expected tensor for argument #1 'indices' to have one of")),
        ("missing", ("labels={'y': [int64 [2]]}", "TypeError: Net.forward() got an unexpected keyword argument")),
        ("too_large", ("int64 [2, 4]", "IndexError: index out of range in self, at ")),
    ],
)
def test_one_error(
    source: str, command: list[str], function: str, expected: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    passed, error = expected
    assert main([*command, f"{source}:{function}"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines[-5] == f"gemini {command[0]}: the model of {source}:{function} fails on its batch"
    assert lines[-4] == f"  passed   {passed}"
    assert lines[-3] == "  forward  Net.forward(tokens, mask=None, *, scale=1.0)"
    assert lines[-2].startswith(f"  error    {error}")
    assert ("self.head(self.table(tokens))" in lines[-2]) == (function != "missing")
    assert not any("Traceback" in line for line in lines)


def test_a_fault_of_gemini_keeps_its_traceback() -> None:
    with pytest.raises(KeyError, match="own"), report_batch_errors("m.py:make", nn.Identity(), (1,), {}):
        raise KeyError("own")
