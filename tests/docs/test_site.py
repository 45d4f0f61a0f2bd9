"""The documentation site is built without a warning, with a page for every document and every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemini.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path / "site")]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "cache")],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    documents = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert {path.as_posix() for path in documents} <= pages
    commands = (tmp_path / "site/generated/commands.html").read_text(encoding="utf-8")
    assert all(f"gemini {name}" in commands for name in COMMANDS)
    functions = (tmp_path / "site/generated/api.html").read_text(encoding="utf-8")
    assert 'id="gemini.pipe_model"' in functions
    assert 'id="gemini.schedule.schedplan.SchedPlan.validate"' in functions
