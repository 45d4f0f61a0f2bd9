"""The cost of instrumentation, relative to Python's own parsing and compiling.

    python benchmarks/bench_instrument.py [--lines 80000]

The corpus is torch's own Python files: all of them mention torch, so the prefilter skips none. Both sides run in this
process, file by file, on the same bytes: `ast.parse` + `compile` on one side, all registered passes
and the code object of the result on the other. The ratio must stay below 2.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.registry import select
from gemini.instrument.text.source_file import SourceFile

LIMIT = 2.0


def corpus(lines: int) -> list[SourceFile]:
    """Files of the installed torch, every n-th of them, up to so many lines."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed\n    → make init")
    root = Path(spec.origin).parent
    paths = sorted(root.rglob("*.py"))
    chosen: list[SourceFile] = []
    total = 0
    for path in paths[::3] + paths[1::3] + paths[2::3]:
        data = path.read_bytes()
        if b"torch" not in data:
            continue
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        chosen.append(SourceFile(str(path), data, module))
        total += data.count(b"\n")
        if total >= lines:
            break
    return chosen


def plain(files: list[SourceFile]) -> None:
    """What Python itself would do: parse, and compile the tree."""
    for file in files:
        tree = ast.parse(file.data, file.path)
        compile(tree, file.path, "exec", dont_inherit=True)


def instrumented(files: list[SourceFile]) -> list[Instrumented]:
    """All registered passes over every file, and the code to run."""
    manager = PassManager(select())
    done = []
    for file in files:
        fresh = SourceFile(file.path, file.data, file.module)  # nothing parsed yet
        one = manager.run(fresh)
        one.code()
        done.append(Instrumented(file, "", one.results, one.positions))  # the verdicts, without the trees
    return done


def timed(work: Callable[[], object], rounds: int) -> float:
    """The median processor time of `work` in seconds."""
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def measure_instrumenting(options: argparse.Namespace) -> bool:
    """Print the ratio of instrumenting to parsing and compiling; whether it is within its limit."""
    files = corpus(options.lines)
    lines = sum(file.data.count(b"\n") for file in files)
    done = instrumented(files)
    changed = sum(bool(one.changes) for one in done)
    failed = [one for file in done for one in file.failures]
    base = timed(lambda: plain(files), options.rounds)
    ours = timed(lambda: instrumented(files), options.rounds)
    ratio = ours / base
    print(f"corpus             {len(files)} files of torch, {lines:,} lines; {changed} changed, {len(failed)} failures")
    print(f"parse + compile    {base:.2f} s")
    print(f"instrumented       {ours:.2f} s")
    print(f"ratio              {ratio:.2f}   (at most {LIMIT:g})")
    return ratio <= LIMIT and not failed


MEASUREMENTS: list[Callable[[argparse.Namespace], bool]] = [measure_instrumenting]
"""What `main` measures, in order; each prints its lines and says whether it kept its limit."""


def main() -> int:
    """Measure, print, and fail where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=80_000, help="how much source to instrument")
    parser.add_argument("--rounds", type=int, default=3, help="how often to measure; the median counts")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    kept = [measure(options) for measure in MEASUREMENTS]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
