"""Write the parallel program of a script: its instrumented sources, stages, plans and settings.

gemini compile train.py -o parallel --pipeline-degree 2 -- --epochs 3
gemini compile -m tool.train -o parallel
python parallel/train.py --epochs 3          runs exactly these files, in workers

The program is run up to its first steps, as under `gemini_python`: only then it is known what its models receive, and
how its loss splits. What follows `--` are its arguments. Stage files may be edited; what they say runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from gemini.config.gemini_config import GeminiConfig

SUMMARY = "write the parallel program of a script as source"
TAKES_PROGRAM_ARGUMENTS = True
_OWN = ("--program", "--dry-run")  # settings that contradict the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini compile`: its own, and the settings of a run."""
    from gemini.cli.launcher_flags import setting_options
    from gemini.cli.source_arguments import add_program_arguments

    add_program_arguments(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder of the parallel program"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a program whose stages were edited")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="optimizer steps to run before writing (4)")
    parser.add_argument("--config", metavar="FILE", help="read the configuration from a JSON file")
    settings = parser.add_argument_group("settings, as of gemini_python")
    for name, option in setting_options().items():
        if name in _OWN:
            continue
        kind: dict[str, Any] = {"metavar": option.value} if option.value else {"action": "store_true", "default": None}
        settings.add_argument(name, dest=f"setting_{name[2:].replace('-', '_')}", help=option.help, **kind)


def run(args: argparse.Namespace) -> int:
    """Run the program up to its first steps, and write the folder."""
    from gemini.cli.source_arguments import read_program
    from gemini.parallel_program.program_writer import ProgramSource, check_target, write_program

    if args.steps < 1:
        raise UsageError(f"--steps {args.steps}: the program makes at least one step\n    → --steps 4")
    check_target(args.output, overwrite=args.overwrite)
    source = ProgramSource(args.script, args.module, tuple(args.instrument), tuple(args.program_arguments))
    dump = source.dump(read_program(args.script, args.module, args.instrument), _notice)
    config = _config(args)
    with tempfile.TemporaryDirectory(prefix="gemini-compile-") as scratch:
        recorded = Path(scratch) / "recorded"
        _record_run(source.words(), config, recorded, Path(scratch), args.steps)
        files = write_program(args.output, dump, recorded, config, source)
    print(f"{args.output}: {files}")
    print(f"run it with: {source.command(args.output)}")
    return 0


def _config(args: argparse.Namespace) -> GeminiConfig:
    """Return the settings of the program: those that are given, with workers."""
    from gemini.cli.launcher_flags import read_value, setting_options
    from gemini.config.gemini_config import GeminiConfig
    from gemini.launcher.defaults import fill_defaults
    from gemini.planner.config_planner import check_config

    given = {name: vars(args).get(f"setting_{name[2:].replace('-', '_')}") for name in setting_options()}
    flags = {
        name[2:].replace("-", "_"): value if value is True else read_value(setting_options()[name], value)
        for name, value in given.items()
        if value is not None
    }
    config = GeminiConfig.load(args.config, flags=flags)
    values = config.to_dict() | ({} if config.asks_for_workers else {"mode": "pipeline"})
    config = fill_defaults(GeminiConfig(**values | {"program": None, "dry_run": False}))
    check_config(config)
    return config


def _record_run(words: list[str], config: GeminiConfig, recorded: Path, scratch: Path, steps: int) -> None:
    """Run the program under `gemini_python`, which records its plans and stages."""
    from gemini.cli.python import SPECIAL_RUN

    settings = scratch / "settings.json"
    settings.write_text(config.to_json(), encoding="utf-8")
    command = [
        sys.executable,
        "-c",
        SPECIAL_RUN,
        "record",
        str(recorded),
        str(steps),
        "--config",
        str(settings),
        *words,
    ]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise ArtifactError(f"the program ended with exit code {code}\n    → {' '.join(['python', *words])} must work")
    from gemini.parallel_program.program_files import REASONS, STAGES

    if not (recorded / STAGES).is_dir():
        found = json.loads((recorded / REASONS).read_text()) if (recorded / REASONS).is_file() else {}
        reasons = "".join(f"\n  - {model}: {reason}" for model, reason in found.items()) or ": it trains no model"
        raise ArtifactError(
            f"no model of {words[-1] if words else 'the program'} has run by a plan{reasons}\n"
            "    → plans run from the third training step on; gemini explain shows the paths of all calls"
        )


def _notice(line: str) -> None:
    print(f"gemini compile: {line}", file=sys.stderr)
