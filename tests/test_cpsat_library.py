"""OR-tools' solver works in a process that has loaded TensorFlow, whichever was loaded first."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gemini.cpsat_library import has_cpsat

PROGRAM = """
import sys
if sys.argv[1] == "tensorflow first":
    import tensorflow
from gemini.cpsat_library import import_cpsat
module = import_cpsat()
if sys.argv[1] == "solver first":
    import tensorflow
model = module.CpModel()
values = [model.new_int_var(0, 10, str(at)) for at in range(20)]
model.add(sum(values) >= 30)
model.minimize(sum((at % 5 + 1) * value for at, value in enumerate(values)))
solver = module.CpSolver()
solver.parameters.num_workers = 1
assert solver.solve(model) == module.OPTIMAL
print("optimum", solver.objective_value)
"""


@pytest.mark.skipif(not has_cpsat(), reason="OR-tools is not installed")
@pytest.mark.parametrize("order", ["tensorflow first", "solver first"])
def test_the_solver_works_next_to_tensorflow(order: str) -> None:
    pytest.importorskip("tensorflow")
    done = subprocess.run([sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "optimum 30.0" in done.stdout
