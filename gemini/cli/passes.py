"""List the installed passes over source: their distribution, needs and description."""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from gemini.errors import PassError
from gemini.instrument.pass_manager.registry import Registered, available

SUMMARY = "list the passes over source, with their distribution and description"


class PassRow(NamedTuple):
    """One row of the list; `fault` is the error of a pass that cannot be loaded."""

    name: str
    origin: str
    description: str
    needs: tuple[str, ...]
    fault: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini passes`."""
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    """List the passes; a broken one is shown with its fault."""
    rows = [row_of(one) for one in available()]
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        _show(rows)
    return 0


def row_of(registered: Registered) -> PassRow:
    """Return the row of one registered pass."""
    try:
        one = registered.load()
    except PassError as error:
        return PassRow(registered.name, registered.origin, "", (), str(error).partition("\n")[0])
    return PassRow(registered.name, registered.origin, one.description, tuple(one.needs))


def _show(rows: list[PassRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("pass", "origin", "needs", "description"):
        table.add_column(heading, no_wrap=heading == "pass")
    for row in rows:
        what = Text(f"cannot be loaded: {row.fault}", style="red") if row.fault else Text(row.description)
        table.add_row(Text(row.name, style="cyan"), Text(row.origin), Text(", ".join(row.needs) or "–"), what)
    Console().print(table if rows else Text("no passes are registered"))
