"""The table of the zoo with workers, docs/zoo_workers.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.zoo.results import Row

HEAD = """# The zoo in workers

Written by `python -m tests.zoo.workers`. Every model of the zoo trains three steps twice: on one device, and with its
modules in real worker processes. Compared are the losses and all gradients of every step, and all weights and buffers
at the end: in float64 with AdamW to 1e-9; where a model has no float64 kernels, in float32 with SGD to 1e-4, gradients
of the first step only. Losses are compared relative to themselves, gradients to the largest entry of the tensor (or a
thousandth of the largest of the model), weights and buffers to the largest entry or 1. A weight whose gradient is 0 but
for rounding (below 1e-10 of the largest in every step) is not compared: AdamW divides rounding by its own size.

- **result** — *equal*; *noisy*: it differs no more than on one device from weights
  changed in the last bits; *different*; *failed*.
- **workers**: in how many processes modules really ran; 0: all of it ran in the controller, the reason says why.
- **modules**: how many became units; **elsewhere**: their share of the model's time in the observed first call.
- **refused**: what cannot run elsewhere as it is and was replaced by the modules inside it.
"""
_COLUMNS = ("model", "class", "result", "precision", "difference", "workers", "modules", "elsewhere", "refused")
_TRAINED = ("equal", "noisy", "different", "failed")


def write_table(path: Path, rows: list[Row]) -> None:
    """Write the page."""
    rows = sorted(rows, key=lambda row: (row["workers"], str(row["name"])))
    judged = [row for row in rows if row["status"] in _TRAINED]
    lines = [HEAD, *_versions(judged)]
    for workers in sorted({row["workers"] for row in judged}):
        mine = [row for row in judged if row["workers"] == workers]
        lines += ["", f"## {workers} workers", "", *_summary(mine, workers), "", _row(*_COLUMNS)]
        lines += [_row(*["---"] * len(_COLUMNS)), *(_line(row) for row in mine)]
    rest = [row for row in rows if row["status"] not in _TRAINED and row["workers"] == 2]
    lines += ["", "## Not trained on one device", "", "| model | class | why |", "|---|---|---|"]
    lines += [_row(row["model"], row["cls"], _cell(row["reason"], 120)) for row in rest]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _versions(rows: list[Row]) -> list[str]:
    counts = Counter((row["torch"], row["transformers"]) for row in rows)
    return [
        f"torch {torch}, transformers {transformers}: {count} trainings."
        for (torch, transformers), count in sorted(counts.items())
    ]


def _summary(rows: list[Row], workers: int) -> list[str]:
    counts = Counter(row["status"] for row in rows)
    several = sum(row.get("used", 0) >= 2 for row in rows)
    every = sum(row.get("used", 0) == workers for row in rows)
    doubles = sum(row.get("dtype") == "float64" for row in rows)
    lines = ["| | models |", "|---|---|", *(_row(status, count) for status, count in sorted(counts.items()))]
    lines += [_row("ran in at least two workers", f"{several} ({several / max(len(rows), 1):.1%})")]
    if workers > 2:
        lines += [_row(f"ran in all {workers}", f"{every} ({every / max(len(rows), 1):.1%})")]
    return [*lines, _row("compared in float64", doubles)]


def _line(row: Row) -> str:
    return _row(
        row["model"], row["cls"], row["status"], row.get("dtype", ""), f"{row.get('worst', 0):.0e}",
        row.get("used", 0), row.get("units", 0), f"{min(row.get('elsewhere', 0), 1):.0%}", _cell(row["reason"], 200),
    )  # fmt: skip


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _cell(text: str, size: int) -> str:
    return text[:size].replace("|", "/").replace("\n", " ")
