"""The documentation shows a stage exactly as it is generated.

After a change of the generated text: GEMINI_UPDATE_DOCS=1 python -m pytest tests/pipe/test_pipe_docs.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "pipe.md"
SHOWN = re.compile(r"(?<=repeated layers are a\nloop.\n\n```text\n).*?(?=```\n)", re.DOTALL)


def generated(folder: Path, text: str) -> str:
    """The stage that the first program of the document makes."""
    program = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL).group(1)
    path = folder / "tour.py"
    path.write_text(program, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("tour", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tour"] = module
    try:
        spec.loader.exec_module(module)
        return re.sub(r"torch [\d.]+(\+\w+)?", "torch 2.13.0", module.piped.sources["stage_1.py"])
    finally:
        del sys.modules["tour"]


def test_the_stage_shown_is_the_one_generated(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    made = generated(tmp_path, text)
    if os.environ.get("GEMINI_UPDATE_DOCS"):
        text = SHOWN.sub(lambda _: made, text)
        DOCUMENT.write_text(text, encoding="utf-8")
    assert SHOWN.search(text).group(0) == made
