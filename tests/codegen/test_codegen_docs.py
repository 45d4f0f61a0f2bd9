"""The code generation page shows stages exactly as they are generated.

After a change of the generated text: GEMINI_UPDATE_DOCS=1 python -m pytest tests/codegen/test_codegen_docs.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "codegen.md"
SHOWN = re.compile(r"(?<=Output:\n\n```text\n).*?(?=```\n)", re.DOTALL)


def generated(folder: Path, text: str) -> str:
    """The stages that the program of the document makes."""
    program = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL).group(1)
    path = folder / "shown.py"
    path.write_text(program, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("shown", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["shown"] = module
    try:
        spec.loader.exec_module(module)
        sources = "\n".join(module.piped.sources.values())
        return re.sub(r"torch [\d.]+(\+\w+)?", "torch 2.13.0", sources)
    finally:
        del sys.modules["shown"]


def test_the_stages_shown_are_those_generated(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    made = generated(tmp_path, text)
    if os.environ.get("GEMINI_UPDATE_DOCS"):
        text = SHOWN.sub(lambda _: made, text)
        DOCUMENT.write_text(text, encoding="utf-8")
    assert SHOWN.search(text).group(0) == made
    assert "for index in range(0, 6, 2):" in made
    assert "for _ in range(" in made


def test_the_files_named_exist():
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+\.py)`", text)) - {"stage_0.py", "stage_1.py"}
    assert named
    assert sorted(name for name in named if not (ROOT / "gemini" / "codegen" / name).exists()) == []
