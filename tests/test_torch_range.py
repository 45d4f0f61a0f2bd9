"""A torch that the tests do not cover is refused in one line, wherever a user comes in, before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemini import GeminiCompiler, pipe_model
from gemini.errors import DISTRIBUTION, TorchVersionError
from gemini.torch_range import NEWEST, OLDEST, check_torch, requirement

ROOT = Path(__file__).parents[1]
OUTSIDE = [f"{OLDEST[0]}.{OLDEST[1] - 1}.1+cu126", f"{NEWEST[0]}.{NEWEST[1] + 1}.0a0+git0", "1.13.1", "3.0.0"]
REFUSAL = r"torch {} is installed; Gemini's tests cover \d\.\d+ to \d\.\d+\n    → pip install 'torch>=\d\.\d+,<\d\.\d+'"


@pytest.mark.parametrize("version", OUTSIDE)
def test_others_are_refused_where_users_come_in(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    model, refusal = torch.nn.Linear(2, 2), REFUSAL.format(re.escape(version))
    with pytest.raises(TorchVersionError, match=refusal):
        GeminiCompiler().compiler(model)
    with pytest.raises(TorchVersionError, match=refusal):
        pipe_model(model, (torch.ones(1, 2),))


def test_both_ends_of_the_range_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch()
    for major, minor in (OLDEST, NEWEST):
        monkeypatch.setattr(torch, "__version__", f"{major}.{minor}.3+cpu")
        check_torch()


def test_the_launcher_refuses_before_the_program_starts(tmp_path: Path) -> None:
    old = tmp_path / "site" / "torch"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (old / "version.py").write_text(f"__version__ = '{OUTSIDE[0]}'\ndebug = False\n")
    (tmp_path / "train.py").write_text("print('started')")
    program = (
        f"import sys; sys.path.insert(1, {str(old.parent)!r}); from gemini.cli.python import run; run(['train.py'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert re.search(f"TorchVersionError: {REFUSAL.format(re.escape(OUTSIDE[0]))}", done.stderr)
    assert done.stdout == ""


def test_the_project_and_the_readme_state_the_range_and_the_name_that_messages_do() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"{requirement()}"' in project
    assert f'\nname = "{DISTRIBUTION}"\n' in project
    assert f"{DISTRIBUTION}[" in project
    assert "torch {}.{}–{}.{}".format(*OLDEST, *NEWEST) in (ROOT / "README.md").read_text()
