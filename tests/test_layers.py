"""The layers of the package: a module imports only its own layer's unit and the layers above it in the list.

Imports are read from the syntax tree, so lazy imports and those for type checking count as well.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemini

PACKAGE = Path(gemini.__file__).parent

LAYERS = (
    ("errors", "log", "atomic_files", "quiet_warnings", "autograd_engine", "cache_files", "cpsat_library", "malloc",
     "nearest_name", "entry_points", "progress_line", "dot_render", "user_code", "torch_range"),
    ("schedule",),
    ("cluster",),
    ("config",),
    ("ir",),
    ("instrument",),
    ("snapshot",),
    ("purity",),
    ("capture",),
    ("profiling",),
    ("partition",),
    ("batch_analysis",),
    ("tensor_parallel",),
    ("collectives",),
    ("random_numbers",),
    ("codegen",),
    ("step",),
    ("cache",),
    ("pipe",),
    ("parallel_program",),
    ("planner",),
    ("guards",),
    ("runtime",),
    ("tensorflow",),
    ("report",),
    ("tune",),
    ("launcher",),
    ("compiler", "managed"),
    ("cli",),
)  # fmt: skip
"""From the lowest layer to the highest. Units of one layer do not import each other, except leaves."""

RUNTIME_LAYERS = (
    ("local_mode", "tracebacks", "retained_inputs", "call_outcome", "rerun"),
    ("step_history",),
    ("devices", "run_journal"),
    ("graph_token",),
    ("transport",),
    ("exception_transfer", "argument_mutations"),
    ("protocol", "placeholder_tensors", "failure_replay"),
    ("step_messages",),
    ("memory",),
    ("worker",),
    ("hosts",),
    ("pool",),
    ("eager", "deferred"),
    ("pipelined",),
    ("interception",),
    ("session",),
)
"""The same inside `gemini.runtime`, for the units that are named here."""

CONTROLLER = ("pool", "eager", "deferred", "pipelined", "interception", "session")
NO_FRAMEWORK = (
    "schedule",
    "cluster",
    "config",
    "instrument",
    "partition/partition_problem",
    "partition/partition_options",
)
FRAMEWORKS = ("torch", "tensorflow", "jax", "transformers")


def imports_of(path: Path) -> Iterator[str]:
    """The dotted names of all `gemini` modules that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("gemini."))
        elif isinstance(node, ast.ImportFrom) and node.module == "gemini":
            yield from (f"gemini.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gemini."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if (PACKAGE.parent / name.replace(".", "/")).is_dir() else node.module for name in names)


def edges(folder: Path, prefix: str) -> Iterator[tuple[str, str, Path, str]]:
    """Every import between units of a folder: importing unit, imported unit, file, module."""
    for path in sorted(folder.rglob("*.py")):
        unit = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in imports_of(path):
            if name.startswith(prefix + "."):
                target = name[len(prefix) + 1 :].split(".")[0]
                if target != unit:
                    yield unit, target, path, name


def violations(folder: Path, prefix: str, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    rank = {unit: place for place, layer in enumerate(layers) for unit in layer}
    return [
        f"{path.relative_to(PACKAGE.parent)} imports {name}: {target} is above {unit}"
        for unit, target, path, name in edges(folder, prefix)
        if unit in rank
        and target in rank
        and (rank[target] > rank[unit] or (rank[target] == rank[unit] and rank[unit]))
    ]


def test_packages_import_lower_layers_only():
    found = violations(PACKAGE, "gemini", LAYERS)
    assert not found, "\n".join(["imports against the order of LAYERS:", *found])


def test_every_unit_has_a_layer():
    units = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert units - {"__init__", "__pycache__", "py.typed"} == {unit for layer in LAYERS for unit in layer}


def test_parts_of_the_runtime_import_lower_layers_only():
    found = violations(PACKAGE / "runtime", "gemini.runtime", RUNTIME_LAYERS)
    assert not found, "\n".join(["imports against the order of RUNTIME_LAYERS:", *found])


def test_workers_import_no_controller_code():
    found = [
        f"{path.name} imports {name}"
        for path in (PACKAGE / "runtime" / "worker").glob("*.py")
        for name in imports_of(path)
        if name.startswith(tuple(f"gemini.runtime.{unit}" for unit in CONTROLLER))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("unit", NO_FRAMEWORK)
def test_importing_it_imports_no_framework(unit):
    root = PACKAGE / unit
    paths = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_file_stems_are_unique():
    allowed = {"__init__", "entry", "registry", "base"}
    seen: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in allowed:
            seen.setdefault(path.stem, []).append(str(path.relative_to(PACKAGE)))
    assert {stem: paths for stem, paths in seen.items() if len(paths) > 1} == {}
