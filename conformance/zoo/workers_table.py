"""The table of the zoo with workers, build/conformance/zoo_workers.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from conformance.zoo.results import Row

HEAD = """# The zoo in workers

Written by `python -m conformance.zoo.workers`. Every model of the zoo trains on one device and with its modules in real
worker processes, twice:

- in float64 with AdamW, three steps: all losses, all gradients of every step, all weights and buffers at the end must
  agree to 1e-9 (a model without float64 kernels takes these steps in float32, within the tolerances below);
- in float32 with SGD, three steps: losses must agree to 1e-5; gradients of the first step, weights and buffers at the
  end to 1e-4.

A difference is relative to the largest entry of its own tensor, whatever that is. Workers run the very ops of one
process on tensors of the same memory layout, so most models agree in every **bit**. Where they do not, the reason is
the order of sums: a tensor that is used several times inside a unit and once more outside gets the gradient
(a + b) + c, and (c + b) + a where autograd knows no units. That is checked: one process in which the same modules are
functions of their own (`conformance/zoo/workers_order.py`) sums in the order of workers, and must equal them in every
bit: **order**.

Last bits can grow: a bias whose gradient is 0 but for rounding is moved by ± the learning rate, because AdamW divides
its gradient by its own size, and some models amplify whatever changes. Tensors that differ by more than the limits are
called **noise** where that check holds; where it does not, where one device, from weights changed at random in their
last bits, changes that very tensor at least a quarter as much. Everything else is *different*.

- **result**: *equal*; *noise*: equal but for tensors that are noise, counted; *different*; *failed*.
- **float64** (or float32, if it says so) and **float32, SGD**: *bits*, or the largest difference that is not noise.
- **workers**: in how many processes modules really ran; 0: all of it ran in the controller, the reason says why.
- **modules**: how many became units; **elsewhere**: their share of the model's time in the observed first call.
- **refused**: what cannot run elsewhere as it is and was replaced by the modules inside it.
"""
_COLUMNS = ("model", "class", "result", "AdamW", "SGD, float32", "workers", "modules", "elsewhere", "refused")
_TRAINED = ("equal", "noise", "different", "failed")


def write_table(path: Path, rows: list[Row]) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sorted(rows, key=lambda row: (row["workers"], str(row["name"])))
    judged = [row for row in rows if row["status"] in _TRAINED]
    lines = [HEAD, *_versions(judged)]
    for workers in sorted({row["workers"] for row in judged}):
        mine = [row for row in judged if row["workers"] == workers]
        lines += ["", f"## {workers} workers", "", *_summary(mine, workers), "", *_noise(mine)]
        lines += [_row(*_COLUMNS), _row(*["---"] * len(_COLUMNS)), *(_line(row) for row in mine)]
    rest = [row for row in rows if row["status"] not in _TRAINED and row["workers"] == 2]
    lines += ["", "## Not trained on one device", "", "| model | class | why |", "|---|---|---|"]
    lines += [_row(row["model"], row["cls"], _cell(row["reason"], 120)) for row in rest]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _versions(rows: list[Row]) -> list[str]:
    """Which software the rows are of; the code of runtime and capture by a digest, so that one version shows as one."""
    counts = Counter((row["code"], row["torch"], row["transformers"]) for row in rows)
    codes = len({row["code"] for row in rows})
    said = "All rows are of one version of the code." if codes == 1 else f"Rows are of {codes} versions of the code."
    older = sum("bits" not in row for row in rows)
    if older:
        said += (
            f" {older} of them are older and were judged by a looser rule: without SGD, weights relative to at least 1,"
            " gradients to at least a thousandth of the model's largest."
        )
    return [
        said,
        *(
            f"- code {code}, torch {torch}, transformers {transformers}: {count} rows"
            for (code, torch, transformers), count in sorted(counts.items(), key=lambda one: -one[1])
        ),
    ]


def _summary(rows: list[Row], workers: int) -> list[str]:
    counts = Counter(row["status"] for row in rows)
    lines = ["| | models |", "|---|---|", *(_row(status, count) for status, count in sorted(counts.items()))]
    for text, key in (("AdamW", ""), ("SGD in float32", "_sgd")):
        bits = sum(row.get(f"bits{key}") is True for row in rows)
        order = sum(row.get(f"order{key}") is True for row in rows)
        lines += [
            _row(f"{text}: equal in every bit", bits),
            _row(f"{text}: in every bit to one process with sums in that order", order),
        ]
    several = sum(row.get("used", 0) >= 2 for row in rows)
    lines += [_row("ran in at least two workers", f"{several} ({several / max(len(rows), 1):.1%})")]
    if workers > 2:
        every = sum(row.get("used", 0) == workers for row in rows)
        lines += [_row(f"ran in all {workers}", f"{every} ({every / max(len(rows), 1):.1%})")]
    return [*lines, _row("compared in float64", sum(row.get("dtype") == "float64" for row in rows))]


def _noise(rows: list[Row]) -> list[str]:
    """Models with tensors that are noise, how many, and the largest of them."""
    found = [
        _row(
            row["model"], row.get("noise", 0), row.get("noise_sgd", 0), _cell(row.get("noisy") or row["noisy_sgd"], 150)
        )
        for row in rows
        if row.get("noise") or row.get("noise_sgd")
    ]
    if not found:
        return []
    head = [f"Models with tensors that are noise: {len(found)}.", ""]
    return [*head, _row("model", "AdamW", "SGD", "the largest"), "|---|---|---|---|", *found, ""]


def _line(row: Row) -> str:
    main = _size(row, "") + ("" if row.get("dtype", "float64") == "float64" else ", float32")
    return _row(
        row["model"], row["cls"], row["status"], main, _size(row, "_sgd"), row.get("used", 0), row.get("units", 0),
        f"{min(row.get('elsewhere', 0), 1):.0%}", _cell(row["reason"], 200),
    )  # fmt: skip


def _size(row: Row, key: str) -> str:
    if f"bits{key}" not in row:
        return "–" if key else f"{row.get('worst', 0):.0e}, an older row"
    if f"worst{key}" not in row:
        return "not judged to the end"
    noise = f", {row[f'noise{key}']} noise" if row.get(f"noise{key}") else ""
    order = ", order" if row.get(f"order{key}") is True else ""
    return "bits" if row[f"bits{key}"] else f"{row[f'worst{key}']:.0e}{order}{noise}"


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _cell(text: str, size: int) -> str:
    return text[:size].replace("|", "/").replace("\n", " ")
