"""Every ```python block of the README and the docs runs, in order, as one program per file; every command too.

The program has the lines of the document, blank where there is no code, so that an error names the line to correct.
"""

from __future__ import annotations

import os
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
SECONDS = 240  # also on a busy machine


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


WITH_CODE = [document for document in DOCUMENTS if blocks(document.read_text("utf-8"), "python")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("document", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
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


MODELS = """
import torch
from torch import nn


class BertLayer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.attention, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x + self.attention(x)))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = nn.Embedding(100, 32), nn.Module()
        self.encoder.layer = nn.ModuleList(BertLayer() for _ in range(4))
        self.pooler = nn.Linear(32, 32)

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.encoder.layer:
            x = layer(x)
        return self.pooler(x)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert, self.cls = Bert(), nn.Linear(32, 100)

    def forward(self, ids):
        return self.cls(self.bert(ids)).square().mean()


def make_bert():
    torch.manual_seed(0)
    return Classifier(), (torch.randint(100, (8, 16)),)


make = make_bert
"""
PROGRAMS = {  # of a shell block, and what each runs
    "gemini": "-m gemini.cli.main",
    "gemini_python": "-m gemini.cli.python",
    "python": "",
    "torchrun": "-m torch.distributed.run",
}
ELSEWHERE = ("make", "git", "cd", "pip")  # commands of shell blocks that other tests, or the reader's hands, run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files and programs that commands of the documents name."""
    files = {"train.py": TRAIN, "package/__init__.py": "", "package/train.py": TRAIN, "my_models.py": MODELS}
    programs = {
        f"programs/{name}": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {what} "$@"\n'
        for name, what in PROGRAMS.items()
    }
    for name, text in (files | programs | {"gemini.json": '{"mode": "pipeline"}'}).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in programs:
        (tmp_path / name).chmod(0o755)
    return tmp_path


def shell_lines(document: Path) -> list[str]:
    """The commands of the shell blocks of a document."""
    lines = [line for _, code in blocks(document.read_text("utf-8"), "sh") for line in code]
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_run_by_a_test(document: Path) -> None:
    strange = [line for line in shell_lines(document) if line.split()[0] not in (*PROGRAMS, *ELSEWHERE)]
    assert strange == [], "commands that no test runs: add their program, or use a text block"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if shell_lines(path)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_commands_run(document: Path, project: Path) -> None:
    path = f"{project / 'programs'}{os.pathsep}{os.environ['PATH']}"
    for line in shell_lines(document):
        if line.split()[0] in ELSEWHERE:
            continue
        done = subprocess.run(
            ["bash", "-c", line], cwd=project, env={**os.environ, "PATH": path}, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_every_link_between_documents_has_a_target() -> None:
    missing = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if not (document.parent / target).exists():
                missing.append(f"{document.relative_to(ROOT)} → {target}")
    assert not missing
