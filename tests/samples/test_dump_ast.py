"""The dump_ast sample runs and writes all of its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[2] / "samples" / "dump_ast"


@pytest.mark.slow
def test_everything_is_there(tmp_path: Path) -> None:
    pytest.importorskip("pygraphviz")
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent), "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [SAMPLE / "run.sh"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "both print the same" in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"dump", "before.svg", "after.svg", "before.png", "after.png", "before.dot", "after.dot"} <= names
