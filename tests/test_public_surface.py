"""What the package offers, and what importing it must not drag in."""

import subprocess
import sys
from pathlib import Path

import gemini


def test_public_names():
    assert sorted(gemini.__all__) == [
        "GeminiCompiler",
        "GeminiConfig",
        "Mode",
        "auto",
        "compile",
        "hybrid",
        "pipe_model",
        "pipeline",
        "sharding",
        "sharding_and_pipeline",
    ]
    assert all(hasattr(gemini, name) for name in gemini.__all__)


def test_no_subpackage_has_a_public_name():
    """Importing `gemini.x` binds `x` in the package, and would replace the public object of that name."""
    units = {path.name.removesuffix(".py") for path in Path(gemini.__file__).parent.iterdir()}
    assert not units & set(gemini.__all__)


def test_importing_the_package_loads_no_framework_and_no_engine():
    heavy = ("torch", "ortools", "rich", "numpy")
    program = f"import gemini, gemini.schedule, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
