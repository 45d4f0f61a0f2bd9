"""What `gemini_python` costs before a program's first statement, beyond `python`'s own start.

    python benchmarks/bench_launch.py [--repeat N]

Each program runs under `python` and under `gemini_python` in turn. Both the processor time of the process and the
wall clock are taken, the least of the runs each; the processor time is the figure to trust on a busy machine.
The programs end before they compute anything: what is measured is starting, importing and instrumenting.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 0.3
"""Seconds of start-up beyond `python`'s own that the mnist script may cost."""


def measure(command: list[str], folder: str) -> tuple[float, float]:
    """Processor and wall seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def programs(folder: Path) -> dict[str, list[str]]:
    """Programs by name, each as the arguments of an interpreter."""
    (folder / "empty.py").write_text("")
    for number in range(50):
        (folder / f"module_{number}.py").write_text("".join(f"def f{n}(x):\n    return x\n\n" for n in range(100)))
    (folder / "modules.py").write_text("".join(f"import module_{number}\n" for number in range(50)))
    return {
        "an empty script": ["empty.py"],
        "50 modules of its own": ["modules.py"],
        "the mnist script": [str(ROOT / "samples" / "mnist" / "train.py"), "--help"],
    }


def main() -> int:
    """Print a table; 1 where the limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="runs of each; the least counts (default 7)")
    repeat = parser.parse_args().repeat
    gemini = str(Path(sys.executable).with_name("gemini_python"))
    print(
        f"{'':<24}{'python':>12}{'gemini_python':>16}{'beyond':>12}{'ratio':>8}   (processor seconds; wall in brackets)"
    )
    beyond = 0.0
    with tempfile.TemporaryDirectory() as name:
        for title, words in programs(Path(name)).items():
            runs: dict[str, list[tuple[float, float]]] = {sys.executable: [], gemini: []}
            for _ in range(repeat):
                for command, taken in runs.items():
                    taken.append(measure([command, *words], name))
            plain, launched = (tuple(map(min, zip(*taken))) for taken in runs.values())
            beyond = launched[0] - plain[0]
            cells = [f"{seconds:.3f} ({wall:.2f})" for seconds, wall in (plain, launched)]
            print(f"{title:<24}{cells[0]:>14}{cells[1]:>16}{beyond:>10.3f} s{launched[0] / plain[0]:>7.2f}x")
    print(f"limit for the mnist script: {LIMIT} s beyond python's own; {'kept' if beyond <= LIMIT else 'BROKEN'}")
    return int(beyond > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
