"""Write the instrumented sources of a program, which plain python runs, without running it.

gemini dump train.py -o dumped          then: python dumped/train.py …
gemini dump -m tool.train -o dumped     then: python dumped …
gemini dump train.py --diff             show the changes as a patch
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gemini.errors import UsageError

if TYPE_CHECKING:
    from gemini.instrument.output.dump_writer import Dump

SUMMARY = "write a program's instrumented sources, or show the changes as a patch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini dump`."""
    from gemini.cli.source_arguments import add_program_arguments

    add_program_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="target folder: new, empty, or an earlier dump"
    )
    parser.add_argument("--diff", action="store_true", help="show the changes as a patch")
    parser.add_argument("--passes", action="append", default=[], metavar="NAMES", help="only these passes")
    parser.add_argument("--skip-pass", action="append", default=[], metavar="NAMES", help="skip these passes")


def run(args: argparse.Namespace) -> int:
    """Write the dump, or show the patch, or both."""
    if args.output is None and not args.diff:
        raise UsageError("the dump has no target folder\n    → name one with -o DIR, or use --diff to show the changes")
    return show(
        args.script,
        args.module,
        output=args.output,
        diff=args.diff,
        passes=_names(args.passes),
        skip=_names(args.skip_pass),
        packages=args.instrument,
    )


def show(
    script: str | None,
    module: str | None,
    *,
    output: Path | None,
    diff: bool,
    passes: Sequence[str] = (),
    skip: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> int:
    """Write the dump of a program to `output`, print the patch with `diff`; return the exit code."""
    from gemini.cli.source_arguments import read_program
    from gemini.instrument.output import dump_writer
    from gemini.instrument.pass_manager.manager import PassManager
    from gemini.instrument.pass_manager.registry import select

    if output is not None:
        dump_writer.check_folder(output)  # before any work
    manager = PassManager(select(passes, skip, notice=_notice), notice=_notice)
    manager.schedule()
    tree = read_program(script, module, packages)
    made = dump_writer.build_dump(tree.own(), manager, module=module or "", argv0=script or "")
    if output is not None:
        dump_writer.write_dump(made, output)
        _print_summary(made, output, to=sys.stderr if diff else sys.stdout)
    if diff:
        _print_patch(made)
    return 0


def _print_patch(made: Dump) -> None:
    from gemini.instrument.output.source_diff import unified_diff

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for line in unified_diff(made.patches(), colour=colour):
            print(line.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_summary(made: Dump, output: Path, to: TextIO) -> None:
    files = len(made.files)
    print(f"{output}: {files} file{'s' if files != 1 else ''}, {made.changed} changed by passes", file=to)
    print(f"run it with: python {output / made.start if made.start else output}", file=to)


def _notice(line: str) -> None:
    print(f"gemini dump: {line}", file=sys.stderr)


def _names(texts: Sequence[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
