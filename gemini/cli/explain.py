"""Say which path each model of the last run took, and what kept it from a faster one.

gemini explain                          the last run in .gemini
gemini explain --run-folder DIR         of another folder
gemini explain --json                   for programs
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

SUMMARY = "say which path each model of the last run took, and why not a faster one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gemini explain`."""
    parser.add_argument("--run-folder", type=Path, default=Path(".gemini"), metavar="DIR", help="default .gemini")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the stories of the last run."""
    from gemini.report.run_journal import read_newest

    stories = read_newest(args.run_folder)
    if args.json:
        print(json.dumps([asdict(story) for story in stories], indent=1))
    else:
        print("\n".join(str(story) for story in stories))
    return 0
