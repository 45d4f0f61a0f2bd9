"""Every ```python block of the README and the docs runs, in order, as one program per file; every command too.

The program has the lines of the document, blank where there is no code, so that an error names the line to correct.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path for path in (ROOT / "docs").glob("**/*.md") if path.parent.name != "generated"
]  # `make docs` writes those
DOCUMENTS = sorted([ROOT / "README.md", *PAGES])
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


def documents_with(language: str, *starts: str) -> pytest.MarkDecorator:
    """The documents that have a line of code in `language` beginning with one of `starts`."""
    found = [
        document
        for document in DOCUMENTS
        if any(
            line.startswith(starts or "") for _, code in blocks(document.read_text("utf-8"), language) for line in code
        )
    ]
    assert found
    return pytest.mark.parametrize("document", found, ids=lambda path: str(path.relative_to(ROOT)))


@documents_with("python")
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    code = program(document.read_text(encoding="utf-8"))
    script = tmp_path / f"{document.stem}_snippets.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{document.name}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


TRAIN = """
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(parser.parse_args().epochs):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,)))
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files that commands of the documents name: a script, a package with one, settings."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "gemini.json").write_text('{"mode": "pipeline"}', encoding="utf-8")
    return tmp_path


@documents_with("sh", "gemini ", "gemini_python ")
def test_commands_run(document: Path, project: Path) -> None:
    text = document.read_text(encoding="utf-8")
    starts = ("gemini ", "gemini_python ", "python parallel/")
    lines = [line for _, code in blocks(text, "sh") for line in code if line.startswith(starts)]
    programs = {"gemini": ["-m", "gemini.cli.main"], "gemini_python": ["-m", "gemini.cli.python"], "python": []}
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        command = [sys.executable, *programs[name], *arguments]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_every_link_between_documents_has_a_target() -> None:
    missing = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if not (document.parent / target).exists():
                missing.append(f"{document.relative_to(ROOT)} → {target}")
    assert not missing
