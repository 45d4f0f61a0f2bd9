"""Table of a profile: costs per node class, most expensive first, with totals and the check against a whole step."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.profiling.node_costs import NodeCost
    from gemini.profiling.profile_result import Profile

PLAIN_WIDTH = 140
HEADINGS = (
    "forward ms", "backward ms", "± %", "peak f MB", "peak b MB", "params MB", "in MB", "out MB", "saved MB", "% time",
)  # fmt: skip


def profile_text(profile: Profile, most: int = 40) -> str:
    """Return the table, one row per node class, and the totals below it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("node", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    groups = _groups(profile)
    total = profile.forward_ms + profile.backward_ms
    for group in groups[:most]:
        table.add_row(
            *_row(group, total),
            style="yellow" if group[0].source != "measured" and profile.mode == "measured" else None,
        )
    colour = sys.stdout.isatty()
    text = io.StringIO()
    console = Console(file=text, width=None if colour else PLAIN_WIDTH, force_terminal=colour, highlight=False)
    console.print(table)
    shown = "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())
    return "\n".join([shown, *_summary_lines(profile, len(groups) - most)])


def _groups(profile: Profile) -> list[list[NodeCost]]:
    found: dict[str, list[NodeCost]] = {}
    for node in profile:
        found.setdefault(node.node_class, []).append(node)
    return sorted(found.values(), key=lambda group: -sum(node.ms for node in group))


def _row(group: list[NodeCost], total: float) -> list[str]:
    node = group[0]
    name = f"{node.name}  ×{len(group)}" if len(group) > 1 else node.name
    mark = "" if node.source == "measured" else " *"
    sizes = (
        node.forward_peak_mb, node.backward_peak_mb, node.parameter_mb + node.buffer_mb, node.input_mb,
        node.output_mb, node.saved_mb,
    )  # fmt: skip
    share = sum(one.ms for one in group) / total if total else 0.0
    return [
        name + mark, f"{node.forward_ms:.3f}", f"{node.backward_ms:.3f}", f"{100 * node.noise:.1f}",
        *(f"{size:.2f}" for size in sizes), f"{100 * share:.1f}",
    ]  # fmt: skip


def _summary_lines(profile: Profile, hidden: int) -> list[str]:
    lines = [f"… and {hidden} more node classes"] if hidden > 0 else []
    classes = len({node.node_class for node in profile})
    lines.append(
        f"{profile.model} on {profile.device} ({profile.mode}): {len(profile)} nodes in {classes} classes, "
        f"forward {profile.forward_ms:.2f} ms, backward {profile.backward_ms:.2f} ms, noise ±{profile.noise:.1%}"
    )
    lines.append(
        f"parameters and buffers {profile.parameter_mb():.1f} MB, saved for backward {profile.saved_mb():.1f} MB, "
        f"with recomputation {profile.with_recomputation().saved_mb():.1f} MB"
    )
    if profile.limit == "host":
        lines.append("host-bound: the device waits for the calling thread, so times include kernel launches")
    lines.append(str(profile.check) if profile.check else f"not compared with a whole step: {profile.unchecked}")
    estimated = {node.reason for node in profile if node.source != "measured"} if profile.mode == "measured" else set()
    lines += [f"* estimated: {reason}" for reason in sorted(estimated)]
    return [*lines, *profile.notes]
