"""The partition problem and the partitioners that see only the problem import no deep-learning framework."""

import subprocess
import sys

import pytest

from gemini.partition.registry import BUILT_IN

MODULES = [
    "gemini.partition.partition_problem",
    "gemini.partition.partition_options",
    "gemini.partition.registry",
    "gemini.partition.baseline",
    "gemini.partition.local_search.portfolio",
    *(target.partition(":")[0] for target in BUILT_IN.values()),
]


@pytest.mark.parametrize("module", MODULES)
def test_no_framework(module: str) -> None:
    program = f"import sys, {module}; assert not {{'torch', 'tensorflow', 'jax'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
