"""Print a shell script that completes commands and options of gemini and gemini_python.

gemini completion bash          to be read by the shell: source <(gemini completion bash)
gemini completion zsh
gemini completion fish          gemini completion fish | source

The script names all options itself, so completing starts no process. File names are completed where no option fits.
"""

from __future__ import annotations

import argparse
import importlib

SUMMARY = "print a script that completes commands and options in bash, zsh or fish"
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `gemini completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    words = command_options()
    print(_fish_script(words) if args.shell == "fish" else _bash_script(words, zsh=args.shell == "zsh"))
    return 0


def command_options() -> dict[str, list[str]]:
    """Return the options of every command, and those of gemini_python as the command ''."""
    from gemini.cli.launcher_flags import OPTIONS, setting_options
    from gemini.cli.main import COMMANDS

    found = {"": sorted({*(option.name for option in OPTIONS), *setting_options()})}
    for name, module in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name)
        importlib.import_module(module).add_arguments(parser)
        found[name] = sorted(option for option in parser._option_string_actions if option.startswith("--"))
    return found


def _bash_script(words: dict[str, list[str]], *, zsh: bool) -> str:
    cases = [f'        {name}) words="{" ".join(options)}" ;;' for name, options in words.items() if name]
    lines = [
        "_gemini() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" words=""',
        '    case "${COMP_WORDS[1]}" in',
        *cases,
        "    esac",
        f'    [ "$COMP_CWORD" -eq 1 ] && words="{" ".join(name for name in words if name)} --help --version"',
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "_gemini_python() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" given',
        '    for given in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '        case "$given" in *.py) return ;; esac  # the rest belongs to the script',
        "    done",
        f'    COMPREPLY=($(compgen -W "{" ".join(words[""])}" -- "$word"))',
        "}",
        "complete -o default -F _gemini gemini",
        "complete -o default -F _gemini_python gemini_python",
    ]
    head = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    return "\n".join([*head, *lines])


def _fish_script(words: dict[str, list[str]]) -> str:
    names = " ".join(name for name in words if name)
    lines = [f"complete -c gemini -n __fish_use_subcommand -a '{names}'"]
    for name, options in words.items():
        for option in options:
            target = f"gemini -n '__fish_seen_subcommand_from {name}'" if name else "gemini_python"
            lines.append(f"complete -c {target} -l {option[2:]}")
    return "\n".join(lines)
