"""Packages that work on source, configurations and schedules load no framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gemini

PACKAGES = ("cluster", "config", "instrument", "schedule", "tensorflow")
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = {"jax", "keras", "tensorflow", "torch"} & sys.modules.keys()
    assert not loaded, f"{name} imports {loaded}"
"""


def test_no_module_imports_a_framework() -> None:
    folder = Path(gemini.__file__).parent
    files = sorted(file for package in PACKAGES for file in (folder / package).rglob("*.py"))
    names = [".".join(("gemini", *file.relative_to(folder).with_suffix("").parts)) for file in files]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
