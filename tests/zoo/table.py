"""The table of the zoo, docs/zoo.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

HEAD = """# The zoo: what capture makes of every model

Written by `python -m tests.zoo.run`. Every architecture of the installed transformers that a generic recipe can
build small and train one step (one model a model type), and classic models written for the purpose. *equal*: forward,
gradients and buffers of the graph equal the model's, checked from outside on fresh seeds. *whole*: the model runs
as one block and cannot be cut; the reason says why. *balance*: heaviest of four contiguous pieces over the ideal,
counted in layers with parameters.
"""


def write_table(path: Path, rows: list[dict[str, Any]], limit: float) -> None:
    """Write the page."""
    judged = [row for row in rows if row["status"] != "not buildable"]
    counts = Counter(row["status"] for row in judged)
    cut = sum(row["status"] == "equal" and row["balance"] <= limit for row in judged)
    lines = [
        HEAD,
        f"torch {torch.__version__}{_transformers()}: {len(judged)} models trained a step eagerly; "
        f"{len(rows) - len(judged)} model types could not be built by the recipes (listed last).",
        "",
        "| | models |",
        "|---|---|",
        *(f"| {status} | {count} |" for status, count in sorted(counts.items())),
        f"| can be cut in four pieces, balance ≤ {limit} | {cut} ({100 * cut / max(1, len(judged)):.1f} %) |",
        "",
        "| model | class | result | nodes | blocks | balance | batch size | reason where coarse |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(judged, key=lambda row: row["name"]):
        lines.append(
            f"| {row['name']} | {row['cls']} | {row['status']} | {row['nodes']} | {row['blocks']} | {row['balance']} "
            f"| {row['batch']} | {_cell(row['reason'])} |"
        )
    lines += ["", "## Not built", "", "| model | class | why |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: row["name"]):
        if row["status"] == "not buildable":
            lines.append(f"| {row['name']} | {row['cls']} | {_cell(row['reason'], 120)} |")
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _cell(text: str, length: int = 220) -> str:
    return text[:length].replace("|", "/").replace("\n", " ").replace("<", "‹")


def _transformers() -> str:
    try:
        import transformers
    except ImportError:
        return ""
    return f", transformers {transformers.__version__}"
