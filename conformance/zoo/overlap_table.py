"""The table of the zoo by plans, build/conformance/zoo_overlap.md."""

from __future__ import annotations

from collections import Counter

from conformance.zoo.results import Row

HEAD = """# The zoo by plans

Written by `python -m conformance.zoo.overlap`. Every model of the zoo trains five SGD steps on one device, and with
whole
steps in real worker processes: four micro-batches, dropout on, random numbers as on one device. Losses and gradients
of every step, weights and buffers at the end and the state of the generator must agree, in float64 to 1e-9 (a gradient
relative to its largest entry, or to a millionth of the largest gradient where that is more); models without float64
kernels in float32, losses to 1e-5 and the rest to 1e-4. The loss is the model's own, else the mean square of its
outputs, where those without dimensions are added as they are. A model in float64 that casts differentiable values to
float32, and so rounds sums over micro-batches otherwise, must agree to 1e-5: *equal, float32 inside*. *noise*: the
first loss and the first gradients agree, and what differs later differs no more than ten times what the last bits of
the weights change on one device.

- **path**: *overlapped*: micro-batches overlap under the schedule; *undivided*: the batch may not be split and is one
  micro-batch of a plan, in which gradients of weights may overlap; *dispatched*: one batch at a time through the
  workers, module by module; *local*: in the program's process. **why**: what kept it from the overlapped path.
- **worst**: the largest difference, in units of its limit.
"""
MANY = """
## {workers} workers

`python -m conformance.zoo.overlap --workers {workers} --overlapped --every N --schedules …`: a sample of the models
that are
overlapped in two workers, each trained by every schedule and judged in the same way. **=** equal, **~** noise, **·**
the schedule does not exist for this model, from which too few stages can be cut, and the program is told so before it
runs, **d** the batch was dispatched as one, **≠** different, **x** failed.
"""
_JUDGED = ("equal", "noise", "different", "failed", "no layout")
_BY_PLAN = (("overlapped",), ("overlapped", "undivided"))
_MARKS = {"equal": "=", "noise": "~", "different": "≠", "failed": "x", "no layout": "·"}


def table(rows: list[Row]) -> str:
    """The page."""
    judged = sorted((row for row in rows if row["status"] in _JUDGED), key=lambda row: str(row["name"]))
    plain = [row for row in judged if row["name"] == row["model"]]
    paths, states = Counter(row.get("path", "") for row in plain), Counter(row["status"] for row in plain)
    share, planned = (sum(paths[one] for one in those) / max(len(plain), 1) for those in _BY_PLAN)
    lines = [HEAD, *_versions(plain)]
    lines += [
        "",
        f"{len(plain)} trained: {dict(states)}; paths {dict(paths)}: {share:.1%} overlapped, {planned:.1%} by a plan.",
        "",
    ]
    lines += [_row("model", "class", "result", "worst", "path", "why not overlapped"), "|---|---|---|---|---|---|"]
    for row in plain:
        worst, path = f"{row.get('worst', 0):.0e}", row.get("path", "")
        lines.append(_row(row["name"], row["cls"], _status(row), worst, path, _why(row)))
    others = [row for row in judged if row["name"] != row["model"]]
    for workers in sorted({row["workers"] for row in others}):
        lines += _section(workers, [row for row in others if row["workers"] == workers])
    return "\n".join(lines) + "\n"


def _section(workers: int, rows: list[Row]) -> list[str]:
    """A sample by several schedules."""
    schedules = list(dict.fromkeys(row["schedule"] for row in rows))
    lines = [MANY.format(workers=workers), *_versions(rows), ""]
    lines += [_row("schedule", "trained", "overlapped", "result"), "|---|---|---|---|"]
    for schedule in schedules:
        own = [row for row in rows if row["schedule"] == schedule]
        states = Counter(row["status"] for row in own)
        overlapped = sum(row.get("path") == "overlapped" for row in own)
        lines.append(_row(schedule, len(own) - states["no layout"], overlapped, _counted(states)))
    lines += ["", _row("model", *schedules), _row(*["---"] * (len(schedules) + 1))]
    marks = {(row["model"], row["schedule"]): _mark(row) for row in rows}
    for model in dict.fromkeys(row["model"] for row in rows):
        lines.append(_row(model, *(marks.get((model, schedule), "") for schedule in schedules)))
    odd = [row for row in rows if row["status"] in ("different", "failed")]
    return [*lines, "", *(f"- {row['name']}: {row['status']}, {_why(row)}" for row in odd)]


def _mark(row: Row) -> str:
    dispatched = row["status"] == "equal" and row.get("path") != "overlapped"
    return "d" if dispatched else _MARKS[row["status"]]


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{states[state]} {state}" for state in _JUDGED if states[state])


def _versions(rows: list[Row]) -> list[str]:
    versions = Counter((row["code"], row["torch"], row["transformers"]) for row in rows)
    return [
        f"{count} rows by code {code}, torch {one}, transformers {two}." for (code, one, two), count in versions.items()
    ]


def _why(row: Row) -> str:
    return f"{row['reason']} {row.get('why', '')}".strip().replace("|", "\\|").replace("\n", " ")[:200]


def _status(row: Row) -> str:
    return f"{row['status']}, float32 inside" if row.get("float32_inside") else str(row["status"])


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
