"""The table of the zoo, build/conformance/zoo.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from conformance.zoo.graph_checks import BALANCE
from conformance.zoo.results import Row

HEAD = """# The zoo: what becomes of every model

Written by `python -m conformance.zoo.run --pipe`. Every architecture of the installed transformers that a generic
recipe can build small and train two steps eagerly (one model a model type), and classic models written for the purpose.

- **result** of capture — *equal*: forward, gradients and buffers of the graph equal the model's, in training mode,
  checked from outside on fresh seeds; *whole*: the model runs as one block and cannot be cut, the reason says why.
- **balance**: heaviest of four contiguous pieces over the ideal, counted in layers with parameters.
- **in 2**, **in 4**: the model cut for 2 and 4 workers: stages by the exact partitioner, and how many of the
  partitioners gave stages equal to the model, run one after another and with copies in between, dropout active.
  Reasons for anything else are listed below the table.
- **judged in**: state dict, outputs, buffers, inputs and the states of the generators must equal the model's in every
  element, in float32. So must the gradients, or they are sums in another order: that is judged in *float64*, where
  model, capture and stages run again, with weights scaled so that values neither vanish nor grow from layer to layer,
  and every gradient must be within 1e-9 of the model's largest. Where that is not met and the model itself casts
  differentiable values to float32 whatever its type is, it rounds as in float32, and 1e-5 counts: *float32 inside, to
  1e-05*. A model without float64 kernels is judged in *float32 to 1e-04* of the largest.
"""
_COLUMNS = (
    "model", "class", "result", "nodes", "blocks", "balance", "batch size", "in 2", "in 4", "judged in",
    "why it is coarse",
)  # fmt: skip


def write_table(path: Path, rows: list[Row], limit: float = BALANCE) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sorted(rows, key=lambda row: str(row["name"]))
    judged = [row for row in rows if row["status"] != "not buildable"]
    lines = [HEAD, *_summary(judged, len(rows), limit), "", _row(*_COLUMNS), _row(*["---"] * len(_COLUMNS))]
    for row in judged:
        lines.append(
            _row(
                row["name"], row["cls"], row["status"], row["nodes"], row["blocks"], row["balance"], row["batch"],
                _cut(row, 2), _cut(row, 4), _judged(row), _cell(row["reason"]),
            )
        )  # fmt: skip
    lines += _exceptions(judged)
    lines += ["", "## Not built", "", "| model | class | why |", "|---|---|---|"]
    lines += [
        _row(row["name"], row["cls"], _cell(row["reason"], 160)) for row in rows if row["status"] == "not buildable"
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def _summary(judged: list[Row], total: int, limit: float) -> list[str]:
    counts = Counter(row["status"] for row in judged)
    good = sum(row["status"] == "equal" and row["balance"] <= limit for row in judged)
    lines = [
        f"{_versions(judged)} {len(judged)} models trained eagerly; {total - len(judged)} model types could not be "
        f"built by the recipes (listed last). {sum('cuts' not in row for row in judged)} models were not cut yet.",
        "",
        "| | models |",
        "|---|---|",
        *(_row(f"capture: {status}", count) for status, count in sorted(counts.items())),
        _row(f"can be cut in four pieces, balance ≤ {limit}", _share(good, len(judged))),
    ]
    tried = [row for row in judged if "cuts" in row]
    for parts in (2, 4):
        ends = [_outcomes(row, parts) for row in tried]
        every = sum(bool(found) and all(cut[0] == "equal" for cut in found) for found in ends)
        some = sum(any(cut[0] == "equal" for cut in found) for found in ends)
        uncut = sum(bool(found) and all(cut[0] == "uncut" for cut in found) for found in ends)
        differ = sum(any(cut[0] == "different" for cut in found) for found in ends)
        lines.append(
            _row(f"cut for {parts} workers by every partitioner, equal to the model", _share(every, len(tried)))
        )
        lines.append(_row("… by some partitioner, equal; uncuttable; differing by some", f"{some}; {uncut}; {differ}"))
    judged_in = Counter(str(cut[3]) for row in tried for cut in row["cuts"].values() if cut[0] == "equal" and cut[3:])
    lines += [_row(f"equal cuts judged in {name}", count) for name, count in sorted(judged_in.items())]
    names = dict.fromkeys(key.partition("/")[0] for row in tried for key in row["cuts"])
    missing = {
        name: sum(f"{name}/2" in row["cuts"] and row["cuts"][f"{name}/2"][0] == "no engine" for row in tried)
        for name in names
    }
    told = [
        f"{name} (not installed for {missing[name]} models)" if missing[name] else name
        for name in names
        if name != "all"
    ]
    return [*lines, "", f"Partitioners: {', '.join(told)}."]


def _versions(judged: list[Row]) -> str:
    """Which libraries and which state of the code the rows are of."""
    libraries = Counter(f"torch {row.get('torch', '?')}, transformers {row.get('transformers', '?')}" for row in judged)
    codes = Counter((row.get("code", "?"), row.get("cut_code", "")) for row in judged)
    told = "; ".join(f"{count} models with {name}" for name, count in libraries.most_common())
    commits = {str(row.get("commit", "")) for row in judged}
    if len(codes) == 1:
        commit = commits.pop() if len(commits) == 1 else ""
        return f"{told}; all rows by one version of the code{f', commit {commit}' if commit else ''}."
    version, largest = codes.most_common(1)[0]
    of = {str(row.get("commit", "")) for row in judged if (row.get("code", "?"), row.get("cut_code", "")) == version}
    commit = f", commit {of.pop()}" if len(of) == 1 and "" not in of else ""
    return f"{told}; rows by {len(codes)} versions of the code, {largest} of them by one{commit}."


def _outcomes(row: Row, parts: int) -> list[list[object]]:
    """What came of all partitioners that could be tried."""
    cuts = row.get("cuts", {})
    return [cut for key, cut in cuts.items() if key.endswith((f"/{parts}", "all")) and cut[0] != "no engine"]


def _cut(row: Row, parts: int) -> str:
    found = _outcomes(row, parts)
    if not found:
        return ""
    good = sum(cut[0] == "equal" for cut in found)
    if not good:
        return str(found[0][0])
    stages = row["cuts"].get(f"exact/{parts}", ["", 0])[1] or max(cut[1] for cut in found)  # type: ignore[type-var]
    return f"{stages} · {good}/{len(found)}"


def _judged(row: Row) -> str:
    """The precisions that a model's cuts were judged in."""
    return ", ".join(sorted({str(cut[3]) for cut in row.get("cuts", {}).values() if len(cut) > 3 and cut[3]}))


def _exceptions(judged: list[Row]) -> list[str]:
    lines = []
    for row in judged:
        why: dict[tuple[str, str], list[str]] = {}
        for key, (status, _, reason, *_) in row.get("cuts", {}).items():
            if status not in ("equal", "no engine"):
                why.setdefault((status, reason), []).append(key)
        lines += [
            _row(row["name"], ", ".join(keys), status, _cell(reason, 300)) for (status, reason), keys in why.items()
        ]
    if not lines:
        return []
    head = ["", "## Not cut, or not by all", "", "| model | partitioner/parts | result | why |", "|---|---|---|---|"]
    return [*head, *lines]


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({100 * count / max(1, total):.1f} %)"


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _cell(text: str, length: int = 220) -> str:
    return text[:length].replace("|", "/").replace("\n", " ").replace("<", "‹")
