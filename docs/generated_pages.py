"""Pages of the site that are written from the code: commands, public functions, file formats."""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path

FORMATS = {
    "Plans of schedules": "gemini.schedule.plan_files",
    "Placements of schedules": "gemini.schedule.placement_file",
    "Schedules of torch": "gemini.schedule.export.torch_csv",
    "Graphs": "gemini.ir.serialize",
    "Nodes": "gemini.ir.node",
    "Profiles": "gemini.profiling.profile_result",
    "Partitions": "gemini.partition.assignment",
    "Stage folders": "gemini.pipe.manifest",
    "Parallel programs": "gemini.parallel_program.program_files",
    "Cached entries": "gemini.cache_files",
    "Recorded plans": "gemini.runtime.pipelined.plan_record",
    "Journals of runs": "gemini.runtime.run_journal",
}
OBJECTS = (
    "gemini.ir.graph.Graph",
    "gemini.ir.node.Node",
    "gemini.profiling.profile_result.Profile",
    "gemini.partition.partition_options.Options",
    "gemini.partition.assignment.Partition",
    "gemini.schedule.block.Block",
    "gemini.schedule.schedplan.SchedPlan",
    "gemini.schedule.composer.Composer",
    "gemini.pipe.piped_model.Piped",
)
_INCLUDE = "```{{include}} ../../{name}\n:relative-docs: docs\n:relative-images:\n```\n"


def write_pages(docs: Path) -> None:
    """Write all generated pages."""
    folder = docs / "generated"
    folder.mkdir(exist_ok=True)
    pages = {
        "commands.md": commands_page(),
        "api.md": api_page(),
        "formats.md": formats_page(),
        "changelog.md": _INCLUDE.format(name="CHANGELOG.md"),
        "contributing.md": _INCLUDE.format(name="CONTRIBUTING.md"),
    }
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def commands_page() -> str:
    """Return the help texts of all commands."""
    from gemini.cli import launcher_flags
    from gemini.cli.main import COMMANDS

    parts = ["# Help texts", "", "## gemini_python", "", "```text", launcher_flags.help_text(), "```", ""]
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        parser = argparse.ArgumentParser(
            prog=f"gemini {name}", description=module.__doc__, formatter_class=_wide_formatter
        )
        module.add_arguments(parser)
        parts += [f"## gemini {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def _wide_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=110)


def api_page() -> str:
    """Return the page of the public names and the main classes, filled in by autodoc."""
    import gemini

    functions = [name for name in gemini.__all__ if inspect.isfunction(getattr(gemini, name))]
    classes = [name for name in gemini.__all__ if inspect.isclass(getattr(gemini, name))]
    parts = ["# Functions and classes", "", "## Public names", ""]
    parts += [_directive("autofunction", f"gemini.{name}") for name in functions]
    parts += [_directive("autoclass", f"gemini.{name}", ":members:") for name in classes]
    parts += [
        "`gemini.auto`, `pipeline`, `sharding`, `hybrid` and `sharding_and_pipeline` are the members of `Mode`.",
        "",
    ]
    parts += ["## Values of the flow", ""]
    parts += [_directive("autoclass", name, ":members:") for name in OBJECTS]
    return "\n".join(parts)


def _directive(kind: str, name: str, *options: str) -> str:
    body = "\n".join(f"   {option}" for option in options)
    return f"```{{eval-rst}}\n.. {kind}:: {name}\n{body}\n```\n"


def formats_page() -> str:
    """Return the descriptions of all file formats, from the modules that read and write them."""
    parts = ["# File formats", "", "All files are JSON or CSV, without pickles. Each text is that of the module.", ""]
    for title, name in FORMATS.items():
        text = inspect.getdoc(importlib.import_module(name)) or ""
        parts += [f"## {title}", "", f"`{name}`", "", "```text", text, "```", ""]
    return "\n".join(parts)
