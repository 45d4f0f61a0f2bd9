"""The command line of `gemini_python`: Gemini's options, the interpreter's flags, the program and its arguments.

    gemini_python --accum-degree 8 -u -W error train.py --epochs 3
                  └──── Gemini ───┘└─ Python ─┘└─ program and its own arguments, untouched

`python` stops reading options at the program, and so does this parser; what it does not know before that is an
error that names the nearest option.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gemini.errors import UsageError
from gemini.launcher.process.program_file import Request

PYTHON_FLAGS = "bBdEiIJOPRsStuvx"
"""The interpreter's own flags without a value; ``-q`` is Gemini's."""

PYTHON_HELP = ("--help-all", "--help-env", "--help-xoptions")


class Option(NamedTuple):
    """An option of Gemini's own."""

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
    Option("--mode", "MODE", "auto, sharding, pipeline or hybrid"),
    Option("--pipeline-degree", "N", "stages the model is cut into (also --stage-cnt)"),
    Option("--sharding-size", "N", "devices that share one operator"),
    Option("--sharding-dim", "N", "tensor dimension to split operators along"),
    Option("--accum-degree", "N", "micro-batches a batch is split into"),
    Option("--partitioner", "NAME", "how the model is cut"),
    Option("--schedule", "NAME", "pipeline schedule: a name, or a plan's file"),
    Option("--rng", "KIND", "exact: random numbers as on one device; fast: each worker its own"),
    Option("--batch-norm", "KIND", "statistics in training: of the batch, or of each micro-batch"),
    Option("--trace", "", "write the timeline of a step to the run folder"),
    Option("--memory-limit", "SIZE", "memory of a device, as 12GB"),
    Option("--workers", "N", "worker processes"),
    Option("--watchdog", "SECONDS", "seconds after which a worker that does not answer hangs"),
    Option("--run-folder", "DIR", "where a run keeps what it writes"),
    Option("--seed", "N", "seed of every search Gemini makes"),
    Option("--strict", "", "raise where Gemini would fall back to a slower path"),
    Option("--dry-run", "", "plan and report; end before the first backward pass"),
    Option("--verify", "", "make the first steps in one process too, and print the largest difference"),
    Option("--quiet", "", "print nothing but the program's own output (also -q)"),
    Option("--version", "", "print the version and exit (also -V)", "information"),
    Option("--help", "", "print this help and exit (also -h)", "information"),
)

ALIASES = {"--stage-cnt": "--pipeline-degree"}
SETTINGS = {option.name for option in OPTIONS if option.group == "configuration"} - {"--config"}
_KNOWN = {option.name: option for option in OPTIONS}


@dataclass
class Invocation(Request):
    """A command line, understood: what `python` is to run, and `given`, the values of Gemini's own options."""

    given: dict[str, list[str]] = field(default_factory=dict)

    def has(self, option: str) -> bool:
        """Whether `option` was given."""
        return option in self.given

    def last(self, option: str) -> str | None:
        """The value `option` was last given."""
        return self.given[option][-1] if option in self.given else None

    def names(self, option: str) -> list[str]:
        """Every name given to a repeatable, comma-separated option."""
        return [name.strip() for value in self.given.get(option, ()) for name in value.split(",") if name.strip()]

    def settings(self) -> dict[str, str | float | bool]:
        """The configuration settings given, by the names `GeminiConfig` has for them; it judges their values."""
        return {
            name[2:].replace("-", "_"): _value(name, self.given[name][-1]) for name in self.given if name in SETTINGS
        }


def _value(name: str, text: str) -> str | float | bool:
    kind = _KNOWN[name].value
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
    name = ALIASES.get(name, name)
    if name == "--check-hash-based-pycs":
        end = at if equals else at + 1
        found.flags += [word, *words[at:end]]
        found.typed += [word, *words[at:end]]
        return end
    if name in PYTHON_HELP:
        found.flags.append(name)
        found.typed.append(name)
        return at
    option = _KNOWN.get(name)
    if option is None:
        from gemini.nearest_name import nearest

        close = nearest(name, [*_KNOWN, *ALIASES])
        hint = f"did you mean {close}?" if close else "gemini_python --help lists them"
        faults.append(f"unknown option {name}\n    → {hint}")
        return at
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
    """The one-line usage."""
    return "usage: gemini_python [gemini options] [python flags] (script.py | -m module | -c code | -) [arguments]"


def help_text() -> str:
    """The whole help."""
    lines = [
        usage(),
        "",
        "Runs a Python program exactly as `python` would, with its training loop instrumented by Gemini.",
        "Everything after the program belongs to the program.",
    ]
    for group in ("instrumentation", "configuration", "information"):
        lines += ["", f"{group}:"]
        for option in OPTIONS:
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
