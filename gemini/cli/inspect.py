"""List the recognised parts of a program: models, layers, losses, optimizers, loops and their sites.

gemini inspect train.py                    a table with file:line, of the script and its modules
gemini inspect -m tool.train               the same for a module
gemini inspect train.py --kind step,backward
gemini inspect train.py --json             the same as JSON
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.errors import UsageError

if TYPE_CHECKING:
    from gemini.instrument.inspect import Finding

SUMMARY = "list the models, layers, losses, optimizers, loops and devices in a script"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini inspect`."""
    from gemini.cli.source_arguments import add_program_arguments

    add_program_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--kind", action="append", default=[], metavar="KINDS", help="only these kinds (comma-separated)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    from gemini.cli.source_arguments import read_program
    from gemini.instrument.inspect import recognise

    kinds = _kinds(args.kind)
    tree = read_program(args.script, args.module, args.instrument)
    sources = [node.source for node in tree if node.source is not None and not node.problem]
    findings = [one for one in recognise(sources) if not kinds or one.kind in kinds]
    for node in tree:
        if node.problem and node.source is not None:
            print(f"gemini inspect: {node.path} {node.problem}; it is skipped", file=sys.stderr)
    _show(findings, [source.path for source in sources], as_json=args.json)
    return 0


def _show(findings: Sequence[Finding], paths: Sequence[str], *, as_json: bool) -> None:
    from gemini.instrument.inspect import findings_table

    if as_json:
        print(findings_table.to_json(findings, paths))
        return
    from rich.console import Console

    # A pipe has no width: rows are not cut, for grep.
    wide = None if sys.stdout.isatty() else 10_000
    console = Console(highlight=False, width=wide)
    with console.capture() as captured:
        console.print(findings_table.table(findings))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    print()
    print(findings_table.summary(findings, len(paths)))


def _kinds(texts: Sequence[str]) -> set[str]:
    from gemini.instrument.inspect import KINDS
    from gemini.nearest_name import remedy

    wanted = {name.strip().replace("-", " ") for text in texts for name in text.split(",") if name.strip()}
    unknown = sorted(wanted - set(KINDS))
    if unknown:
        raise UsageError("\n".join(f"unknown kind {name!r}\n    → {remedy(name, KINDS)}" for name in unknown))
    return wanted
