"""Every ```python block of the README and the docs runs, in order, one program for each file.

The program has the lines of the document, blank where there is no code, so that an error names the line to mend.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
SECONDS = 120


def blocks(text: str, language: str) -> list[tuple[int, list[str]]]:
    """The code blocks in one language, each with the number of lines before it."""
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.append((text[: match.start(1)].count("\n"), match.group(1).splitlines()))
    return found


def program(text: str) -> str:
    lines: list[str] = []
    for before, code in blocks(text, "python"):
        lines += [""] * (before - len(lines)) + code
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    code = program(document.read_text(encoding="utf-8"))
    if not code.strip():
        pytest.skip("no python in it")
    script = tmp_path / f"{document.stem}_snippets.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{document.name}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_gemini_schedule_lines_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gemini.cli.main import main

    monkeypatch.chdir(tmp_path)
    text = document.read_text(encoding="utf-8")
    lines = [line for _, code in blocks(text, "sh") for line in code if line.startswith("gemini schedule ")]
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, f"{line}\n{capsys.readouterr().err}"


def test_every_link_between_documents_leads_somewhere() -> None:
    missing = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if not (document.parent / target).exists():
                missing.append(f"{document.relative_to(ROOT)} → {target}")
    assert not missing
