"""The command line of `gemini_python`: options of Gemini, flags of the interpreter, the program and its arguments.

    gemini_python --accum-degree 8 -u -W error train.py --epochs 3
                  └──── Gemini ───┘└─ Python ─┘└─ program and its own arguments, untouched

Like `python`, the parser stops at the program. An unknown option before that is an error that names the nearest one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gemini.errors import UsageError
from gemini.launcher.process.program_file import Request

PYTHON_FLAGS = "bBdEiIJOPRsStuvx"
"""Interpreter flags without a value; ``-q`` belongs to Gemini."""

PYTHON_HELP = ("--help-all", "--help-env", "--help-xoptions")


class Option(NamedTuple):
    """An option of `gemini_python`; `value` is the placeholder of its value, "" for a switch."""

    name: str
    value: str
    help: str
    group: str = "configuration"
    repeats: bool = False


OPTIONS = (
    Option("--dump", "DIR", "write the instrumented sources to DIR and do not run them", "instrumentation"),
    Option("--diff", "", "show what the passes change, like a patch, and do not run", "instrumentation"),
    Option("--passes", "NAMES", "run only these passes (comma-separated)", "instrumentation", True),
    Option("--skip-pass", "NAMES", "leave these passes out", "instrumentation", True),
    Option("--instrument", "PACKAGE", "instrument an installed package too", "instrumentation", True),
    Option("--no-gemini", "", "run under plain python", "instrumentation"),
    Option("--config", "FILE", "read the configuration from a JSON file"),
    Option("--version", "", "print the version and exit (also -V)", "information"),
    Option("--help", "", "print this help and exit (also -h)", "information"),
)
"""Options that are no setting. A setting's flag is derived from its field of `GeminiConfig`."""

_FIXED = {option.name: option for option in OPTIONS}


@functools.cache
def setting_options() -> dict[str, Option]:
    """Return the flags of all settings. Loads the configuration, so a run without options does not call it."""
    from dataclasses import fields

    from gemini.config.gemini_config import GeminiConfig

    return {
        (name := "--" + entry.name.replace("_", "-")): Option(name, entry.metadata["value"], entry.metadata["help"])
        for entry in fields(GeminiConfig)
    }


@functools.cache
def setting_aliases() -> dict[str, str]:
    """Return other spellings of flags: those of the configuration."""
    from gemini.config.gemini_config import ALIASES

    return {"--" + alias.replace("_", "-"): "--" + name.replace("_", "-") for alias, name in ALIASES.items()}


def _find_option(name: str) -> Option | None:
    return _FIXED.get(name) or setting_options().get(setting_aliases().get(name, name))


@dataclass
class Invocation(Request):
    """A parsed command line: what `python` runs, and in `given` the values of the options of Gemini."""

    given: dict[str, list[str]] = field(default_factory=dict)

    def has(self, option: str) -> bool:
        """Whether `option` occurs."""
        return option in self.given

    def last(self, option: str) -> str | None:
        """Return the last value of `option`."""
        return self.given[option][-1] if option in self.given else None

    def names(self, option: str) -> list[str]:
        """Return every name of a repeatable, comma-separated option."""
        return [name.strip() for value in self.given.get(option, ()) for name in value.split(",") if name.strip()]

    def settings(self) -> dict[str, str | float | bool]:
        """Return the settings by field name of `GeminiConfig`, which checks their values."""
        return {
            name[2:].replace("-", "_"): read_value(option, self.given[name][-1])
            for name in self.given
            if name not in _FIXED and (option := setting_options()[name])
        }


def read_value(option: Option, text: str) -> str | float | bool:
    """Return the value of a flag; the configuration checks it."""
    kind = option.value
    if not kind:
        return True
    readers: dict[str, Callable[[str], float]] = {"N": int, "SECONDS": float}
    try:
        return readers[kind](text) if kind in readers else text
    except ValueError:
        return text


def parse(argv: Sequence[str]) -> Invocation:
    """Read the arguments of `gemini_python`; raises `UsageError` with every option at fault."""
    found = Invocation()
    faults: list[str] = []
    words = list(argv)
    at = 0
    while at < len(words):
        word: str | None = words[at]
        if word == "--":
            found.typed.append(word)
            at += 1
            word = words[at] if at < len(words) else None
        if word is None:
            break
        if word == "-" or not word.startswith("-") or found.typed[-1:] == ["--"]:
            found.kind, found.target = ("stdin" if word == "-" else "script"), word
            found.typed.append(word)
            found.args = words[at + 1 :]
            break
        at += 1
        if word.startswith("--"):
            at = _long(found, word, words, at, faults)
        else:
            at = _short(found, word, words, at, faults)
            if found.kind != "nothing":
                found.args = words[at:]
                break
    if faults:
        raise UsageError("\n".join(faults))
    return found


def _long(found: Invocation, word: str, words: list[str], at: int, faults: list[str]) -> int:
    name, equals, value = word.partition("=")
    if name == "--check-hash-based-pycs":
        end = at if equals else at + 1
        found.flags += [word, *words[at:end]]
        found.typed += [word, *words[at:end]]
        return end
    if name in PYTHON_HELP:
        found.flags.append(name)
        found.typed.append(name)
        return at
    option = _find_option(name)
    if option is None:
        from gemini.nearest_name import nearest

        close = nearest(name, [*_FIXED, *setting_options(), *setting_aliases()])
        hint = f"did you mean {close}?" if close else "gemini_python --help lists them"
        faults.append(f"unknown option {name}\n    → {hint}")
        return at
    name = option.name
    if not option.value:
        if equals:
            faults.append(f"{name} takes no value, but {value!r} was given\n    → write {name}")
        found.given.setdefault(name, []).append("")
        return at
    if not equals:
        if at >= len(words):
            faults.append(f"{name} needs a value\n    → {name} {option.value}: {option.help}")
            return at
        value = words[at]
        at += 1
    if not value:
        faults.append(f"{name} needs a value, but an empty one was given\n    → {name} {option.value}: {option.help}")
    found.given.setdefault(name, []).append(value)
    return at


def _short(found: Invocation, word: str, words: list[str], at: int, faults: list[str]) -> int:
    """A cluster such as ``-uB``, ``-Werror``, ``-mpkg.module`` or ``-c``."""
    kept = "-"
    for place, letter in enumerate(word[1:], 1):
        rest = word[place + 1 :]
        if letter in "cmWX":
            if not rest and at >= len(words):
                faults.append(f"-{letter} needs a value\n    → gemini_python --help shows how it is used")
                return at
            value = [] if rest else [words[at]]
            found.typed += [kept + letter + rest, *value]
            if letter in "WX":
                found.flags += [kept + letter + rest, *value]
            else:
                found.flags += [kept] if kept != "-" else []
                found.kind = "command" if letter == "c" else "module"
                found.target = rest or words[at]
            return at + len(value)
        if letter in "qVh?":
            name = {"q": "--quiet", "V": "--version"}.get(letter, "--help")
            found.given.setdefault(name, []).append("")
        elif letter in PYTHON_FLAGS:
            kept += letter
            found.letters += letter
        else:
            faults.append(f"unknown option -{letter}\n    → gemini_python --help lists them")
    if kept != "-":
        found.flags.append(kept)
        found.typed.append(kept)
    return at


def usage() -> str:
    """Return the one-line usage."""
    return "usage: gemini_python [gemini options] [python flags] (script.py | -m module | -c code | -) [arguments]"


def help_text() -> str:
    """Return the help text."""
    lines = [
        usage(),
        "",
        "Runs a Python program exactly as `python` would, with its training loop instrumented by Gemini.",
        "Everything after the program belongs to the program.",
    ]
    for group in ("instrumentation", "configuration", "information"):
        lines += ["", f"{group}:"]
        for option in (*OPTIONS, *setting_options().values()):
            if option.group == group:
                spelled = f"{option.name} {option.value}".strip()
                lines.append(f"  {spelled:<22} {option.help}")
    lines += [
        "",
        "python flags:",
        "  -u -O -B -I -E -s -S -P -i -v -b -d -x, -W ACTION, -X OPTION and --check-hash-based-pycs MODE are handed",
        f"  to the interpreter ({sys.executable or 'python'}).",
        "",
        "examples:",
        "  gemini_python train.py --epochs 3",
        "  gemini_python --mode pipeline --pipeline-degree 4 -m project.train",
        "  gemini_python --diff train.py",
    ]
    return "\n".join(lines)
