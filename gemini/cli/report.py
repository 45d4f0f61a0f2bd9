"""Write a page about the last run: its source, graph, schedule, timeline, memory, losses and environment.

gemini report                            .gemini/report.html, one file without network or further files
gemini report -o page.html --run-folder DIR
gemini report --perfetto steps.json      the measured steps, for ui.perfetto.dev
gemini report --tensorboard DIR          time per step and loss as TensorBoard scalars
"""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "write a page about the last run, its steps for Perfetto, or its scalars for TensorBoard"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini report`."""
    parser.add_argument("--run-folder", type=Path, default=Path(".gemini"), metavar="DIR", help="run folder (.gemini)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (RUN_FOLDER/report.html)")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write a trace of the measured steps instead")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write TensorBoard scalars instead")


def run(args: argparse.Namespace) -> int:
    """Write what is requested, and print where it is."""
    if args.perfetto is not None:
        from gemini.report.step_traces import write_step_traces

        count = write_step_traces(args.run_folder, args.perfetto)
        print(f"{args.perfetto}: {count} step{'s' if count != 1 else ''}; open it in https://ui.perfetto.dev")
    if args.tensorboard is not None:
        from gemini.report.tensorboard_scalars import write_scalars

        print(f"{args.tensorboard}: {write_scalars(args.run_folder, args.tensorboard)} scalars")
    if args.output is not None or (args.perfetto is None and args.tensorboard is None):
        from gemini.report.report_page import write_report

        target = args.output or args.run_folder / "report.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        print(write_report(args.run_folder, target))
    return 0
