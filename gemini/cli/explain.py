"""Show which path each model of the last run took, and what prevented a faster one.

gemini explain                          the last run in .gemini
gemini explain --run-folder DIR         the last run in another run folder
gemini explain --json                   the same as JSON
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SUMMARY = "show which path each model of the last run took, and what prevented a faster one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini explain`."""
    parser.add_argument("--run-folder", type=Path, default=Path(".gemini"), metavar="DIR", help="run folder (.gemini)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the journal of the last run."""
    from gemini.report.journal_reader import read_newest

    models = read_newest(args.run_folder)
    if args.json:
        print(json.dumps([model.to_json() for model in models], indent=1))
    elif models:
        print("\n".join(str(model) for model in models))
    else:
        print("the last run trained no model with workers: it ran as under python")
    return 0
