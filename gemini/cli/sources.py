"""Source files named on a command line: read, checked, and refused with one clear error."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from gemini.errors import InstrumentError, UsageError
from gemini.instrument.parsing import parser_warnings_muted
from gemini.instrument.source import SourceFile


def read_source(path: str, module: str = "__main__") -> SourceFile:
    """The Python file at `path`, which parses."""
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
    """Raise `InstrumentError`, in Python's words, where `source` is not Python."""
    try:
        with parser_warnings_muted():
            _ = source.tree, source.text
    except SyntaxError as error:
        said = "".join(traceback.format_exception_only(error)).rstrip()
        raise InstrumentError(f"{source.path} is not Python\n{said}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InstrumentError(f"{source.path} cannot be parsed: {error}") from error
