"""The `gemini` command: dispatches to its sub-commands.

A sub-command is a module with

    SUMMARY: str                                            one line for `gemini --help`
    def add_arguments(parser: argparse.ArgumentParser)      its options
    def run(args: argparse.Namespace) -> int                the command; returns the exit code
    TAKES_PROGRAM_ARGUMENTS                                 optional: words after `--` are args.program_arguments

Only the module of the chosen command is imported. A `GeminiError` is printed as one message without a
traceback, with exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from gemini.errors import GeminiError
from gemini.nearest_name import nearest

COMMANDS = {
    "compile": "gemini.cli.compile",
    "check": "gemini.cli.check",
    "export": "gemini.cli.export",
    "profile": "gemini.cli.profile",
    "partition": "gemini.cli.partition",
    "pipe": "gemini.cli.pipe",
    "shard": "gemini.cli.shard",
    "schedule": "gemini.cli.schedule",
    "simulate": "gemini.cli.simulate_step",
    "tune": "gemini.cli.tune",
    "inspect": "gemini.cli.inspect",
    "passes": "gemini.cli.passes",
    "dump": "gemini.cli.dump",
    "ast": "gemini.cli.ast",
    "explain": "gemini.cli.explain",
    "report": "gemini.cli.report",
    "cache": "gemini.cli.cache",
    "doctor": "gemini.cli.doctor",
    "completion": "gemini.cli.completion",
    "cluster": "gemini.cli.cluster",
}

SUCCESS, USAGE, INTERRUPTED = 0, 2, 130
_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gemini` with these arguments (default: the process's); return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except KeyboardInterrupt:
        print("gemini: interrupted", file=sys.stderr)
        return INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_help(), file=sys.stderr)
        return USAGE
    name, rest = arguments[0], arguments[1:]
    if name in _HELP:
        if not rest or rest[0].startswith("-"):
            print(_help())
            return SUCCESS
        name, rest = rest[0], ["--help"]
    if name in _VERSION:
        from gemini import __version__

        print(f"gemini {__version__}")
        return SUCCESS
    if name not in COMMANDS:
        return _fail(f"gemini: {_unknown(name)}")
    if not _exists(name):
        return _fail(f"gemini {name}: not in this installation\n    → {_choices()}")
    return _run(name, importlib.import_module(COMMANDS[name]), rest)


def _run(name: str, module: ModuleType, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"gemini {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    given: list[str] = []
    if getattr(module, "TAKES_PROGRAM_ARGUMENTS", False) and "--" in arguments:
        at = arguments.index("--")
        arguments, given = arguments[:at], arguments[at + 1 :]
    parser.set_defaults(program_arguments=given)
    try:
        return int(module.run(parser.parse_args(arguments)))
    except GeminiError as error:
        return _fail(f"gemini {name}: {error}")
    except SystemExit as stop:  # argparse has printed an error or its help
        return stop.code if isinstance(stop.code, int) else SUCCESS if stop.code is None else _fail(str(stop.code))


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return USAGE


def _exists(name: str) -> bool:
    return importlib.util.find_spec(COMMANDS[name]) is not None


def _choices() -> str:
    return f"commands are {', '.join(name for name in COMMANDS if _exists(name))}; see gemini --help"


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"unknown option {name!r}\n    → options of a command come after its name; {_choices()}"
    close = nearest(name, COMMANDS)
    return f"unknown command {name!r}" + (f"; did you mean {close!r}?" if close else "") + f"\n    → {_choices()}"


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: gemini COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}{_summary(name)}" for name in COMMANDS if _exists(name)]
    lines += [
        "",
        "gemini COMMAND --help describes a command; gemini --version prints the version.",
        "gemini_python runs a training script: gemini_python train.py",
    ]
    return "\n".join(lines)


def _summary(name: str) -> str:
    try:
        return str(importlib.import_module(COMMANDS[name]).SUMMARY)
    except Exception as error:  # one broken command must not hide the help of the rest
        return f"(cannot be loaded: {error})"


if __name__ == "__main__":
    raise SystemExit(main())
