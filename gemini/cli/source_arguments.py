"""Source arguments: reads and checks the files and programs named on a command line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from gemini.errors import InstrumentError, UsageError
from gemini.instrument.program.code_tree import CodeTree
from gemini.instrument.program.search_path import find_added_folders
from gemini.instrument.text.parser import mute_parser_warnings
from gemini.instrument.text.source_file import SourceFile


def read_source(path: str, module: str = "__main__") -> SourceFile:
    """Read the Python file at `path` and check its syntax."""
    file = Path(path)
    if file.is_dir():
        main = file / "__main__.py"
        if not main.is_file():
            raise UsageError(f"{path} is a folder without a __main__.py\n    → name a Python file")
        file = main
    try:
        source = SourceFile(os.fspath(file), file.read_bytes(), module)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}\n    → name a Python file") from error
    check_syntax(source)
    return source


def check_syntax(source: SourceFile) -> None:
    """Raise `InstrumentError`, with Python's message, if `source` is not Python."""
    try:
        with mute_parser_warnings():
            _ = source.tree, source.text
    except SyntaxError as error:
        message = "".join(traceback.format_exception_only(error)).rstrip()
        raise InstrumentError(f"{source.path} is not Python\n{message}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InstrumentError(f"{source.path} cannot be parsed: {error}") from error


def add_program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a program: a script or a module, and packages to instrument."""
    program = parser.add_mutually_exclusive_group(required=True)
    program.add_argument("script", nargs="?", help="the script")
    program.add_argument("-m", dest="module", metavar="MODULE", help="a module, as for python -m")
    parser.add_argument(
        "--instrument", action="append", default=[], metavar="PACKAGE", help="an installed package to include"
    )


def read_program(script: str | None, module: str | None, packages: Sequence[str] = ()) -> CodeTree:
    """Return the code tree of `python script` or `python -m module`."""
    if module is not None:
        return _read_module(module, packages)
    root = read_source(script or "")
    folder = os.path.dirname(os.path.realpath(root.path))
    return CodeTree(root, [folder, *find_added_folders(root), *sys.path], packages)


def _read_module(module: str, packages: Sequence[str]) -> CodeTree:
    try:
        tree = CodeTree.of_module(module, packages)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}\n    → name a module that can be imported from this folder") from error
    except OSError as error:
        raise UsageError(f"cannot read module {module}: {error.strerror or error}") from error
    assert tree.root.source is not None
    check_syntax(tree.root.source)
    return tree
