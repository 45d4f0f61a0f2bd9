"""Check the files of a parallel program that `gemini compile` wrote, without workers.

gemini check parallel
gemini check parallel --static        without running the program

Plan and partition are validated and simulated; then the program runs in this process up to the first call of its
models, whose stages are built and run on the saved shapes without memory, and whose state must be that of the stages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.errors import ArtifactError

if TYPE_CHECKING:
    from gemini.parallel_program.program_check import CheckLine
    from gemini.parallel_program.program_files import PlannedStages

SUMMARY = "check every file of a parallel program, without workers"
TAKES_PROGRAM_ARGUMENTS = True
FAULTY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini check`."""
    parser.add_argument("program", type=Path, metavar="DIR", help="folder that gemini compile wrote")
    parser.add_argument("--static", action="store_true", help="do not run the program: leave stages and state out")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print one line per result; exit code 1 if one is a fault."""
    from gemini.parallel_program.program_check import check_planned_files
    from gemini.parallel_program.program_files import read_program

    found = read_program(args.program)
    lines = [line for one in found for line in check_planned_files(one)]
    if not args.static:
        lines += _run_checks(args.program, args.program_arguments, found)
    if args.json:
        print(json.dumps([vars(line) for line in lines], indent=1))
    else:
        print("\n".join(map(str, lines)))
    return FAULTY if any(line.is_fault for line in lines) else 0


def _run_checks(program: Path, given: list[str], found: list[PlannedStages]) -> list[CheckLine]:
    """Run the program up to the first calls of its models, and return the results for these."""
    from gemini.cli.python import SPECIAL_RUN
    from gemini.instrument.output import DUMP_MARKER
    from gemini.parallel_program.program_check import CheckLine, read_lines

    try:
        marker = json.loads((program / DUMP_MARKER).read_text(encoding="utf-8"))
        words = [str(program / marker["start"]), *(given or marker.get("arguments", []))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{program / DUMP_MARKER} cannot be read: {error}\n    → gemini compile writes it"
        ) from error
    with tempfile.TemporaryDirectory(prefix="gemini-check-") as scratch:
        target = Path(scratch) / "lines.json"
        command = [sys.executable, "-c", SPECIAL_RUN, "check", str(target), "0", *words]
        done = subprocess.run(command, check=False, stdout=sys.stderr)
        lines = read_lines(target) if target.is_file() else []
    if done.returncode:
        lines.append(CheckLine("program", f"it ended with exit code {done.returncode}", is_fault=True))
    reached = {line.what.partition(":")[0] for line in lines if line.what.endswith(": state")}
    lines += [
        CheckLine(f"{one.name}: stages", f"no first call of {one.facts.model} before the second step", is_fault=True)
        for one in found
        if one.name not in reached
    ]
    return lines
