"""Export the stages of `gemini pipe` or `gemini compile` to another runtime.

gemini export stages --target torch-pipelining -o export
gemini export parallel/stages/MODEL -o export                      with the plan of the folder
gemini export stages --schedule 1f1b --micro-batches 4 -o export
torchrun --nproc-per-node 2 export/run.py my_models.py:make --steps 3

The program runs on torch.distributed.pipelining and needs no Gemini. Stages that its runtime cannot run are refused,
with the reasons.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gemini.errors import UsageError

SUMMARY = "export stages as a program on torch.distributed.pipelining"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini export`."""
    parser.add_argument("stages", type=Path, metavar="DIR", help="folder of stages")
    parser.add_argument("--target", default="torch-pipelining", metavar="NAME", help="runtime (torch-pipelining)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("export"), metavar="DIR", help="target folder (export)"
    )
    parser.add_argument("--schedule", metavar="NAME", help="schedule of the library (default: the plan, else 1f1b)")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches (two per worker)")


def run(args: argparse.Namespace) -> int:
    """Write the program, and print how to run it."""
    import json

    from gemini.parallel_program.torch_export import TARGET, export_stages, is_stage_folder

    if args.target != TARGET:
        raise UsageError(f"unknown target {args.target!r}\n    → {TARGET} is the only one")
    if args.micro_batches is not None and args.micro_batches < 1:
        raise UsageError(f"--micro-batches {args.micro_batches}\n    → give 1 or more")
    inner = args.stages / "stages"
    if not is_stage_folder(args.stages) and inner.is_dir():
        names = ", ".join(str(inner / path.name) for path in sorted(inner.iterdir()))
        raise UsageError(f"{args.stages} is a parallel program\n    → export one of its models: {names}")
    files = export_stages(args.stages, args.output, args.schedule, args.micro_batches)
    facts = json.loads((args.output / "stages.json").read_text(encoding="utf-8"))
    print(f"{args.output}: {len(files)} files, {len(facts['stages'])} stages, {facts['micro_batches']} micro-batches")
    command = f"torchrun --nproc-per-node {facts['ranks']} {args.output / 'run.py'} FILE.py:FUNCTION"
    print(f"run it with: {command}" + ("" if facts["has_loss"] else " --loss FILE.py:FUNCTION"))
    return 0
