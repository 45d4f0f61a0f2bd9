"""Sweep the zoo with steps by a plan: every model trains five steps in four micro-batches; docs/zoo_overlap.md.

python -m tests.zoo.overlap                            all models in two workers; continues where it stopped
python -m tests.zoo.overlap --only llama t5 --fresh    these again
python -m tests.zoo.overlap --workers 4 --every 10 --schedule 1f1b
python -m tests.zoo.overlap --shard 3/15 --results DIR/3.jsonl      one of 15 processes
python -m tests.zoo.overlap --merge DIR/*.jsonl        one file of many, and the table
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from gemini.runtime.controller.crew import Crew
from tests.zoo import results, workers
from tests.zoo.overlap_judging import judge
from tests.zoo.run import _quiet

RESULTS, TABLE = Path(".gemini/zoo_overlap.jsonl"), Path("docs/zoo_overlap.md")
_MODELS_A_CREW = 40

HEAD = """# The zoo by plans

Written by `python -m tests.zoo.overlap`. Every model of the zoo trains five SGD steps on one device, and with whole
steps in real worker processes: four micro-batches, dropout on, random numbers as on one device. Losses and gradients
of every step, weights and buffers at the end and the state of the generator must agree, in float64 to 1e-9 (a gradient
relative to its largest entry, or to a millionth of the largest gradient where that is more); models without float64
kernels in float32, losses to 1e-5 and the rest to 1e-4. The loss is the model's own, else the mean square of its
outputs, where those without dimensions are added as they are. A model in float64 that casts differentiable values to
float32, and so rounds sums over micro-batches otherwise, must agree to 1e-5: *equal, float32 inside*. *noise*: the
first loss and the first gradients agree, and what differs later differs no more than ten times what the last bits of
the weights change on one device.

- **path**: *overlapped*: micro-batches overlap under the schedule; *dispatched*: one batch at a time through the
  workers; *local*: in the program's process. **why**: what kept it from the overlapped path.
- **worst**: the largest difference, in units of its limit.
"""


def main() -> None:
    """The command line."""
    options = _options()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _quiet()
    if options.merge:
        rows = results.read(options.results)
        for path in options.merge:
            rows.update(results.read(path))
        results.write(options.results, rows.values())
    elif not options.table:
        _sweep(options)
    if options.merge or options.table:
        TABLE.write_text(table(list(results.read(options.results).values())))


def _sweep(options: argparse.Namespace) -> None:
    done = {} if options.fresh else results.read(options.results)
    sources = (*workers.HINTS, workers.RESULTS, options.results)
    hints = {
        row.get("model", name): row["hint"]
        for path in sources
        for name, row in results.read(path).items()
        if row.get("hint")
    }
    ends = time.monotonic() + options.stop_after
    crew, used = Crew(options.workers, 1), 0
    for animal in workers._chosen(options):
        key = _key(animal.name, options)
        if key in done:
            continue
        if time.monotonic() > ends:
            break
        row = judge(
            animal, crew, build=options.build_seconds, limit=options.seconds, hint=hints.get(animal.name),
            schedule=options.schedule,
        )  # fmt: skip
        row.update(name=key, model=animal.name)
        results.append(options.results, row)
        print(
            f"{row['status']:13s} {row['model']:36s} {row.get('dtype', ''):8s} {row.get('path', ''):10s} "
            f"{row.get('worst', 0):.0e} {row.get('seconds', 0):5.1f} s  "
            f"{row['reason'][:150]} {row.get('why', '')[:150]}",
            flush=True,
        )
        used += 1
        if used % _MODELS_A_CREW == 0 or row["status"] == "failed":
            crew.stop()
            crew = Crew(options.workers, 1)
        gc.collect()
    crew.stop()


def _key(name: str, options: argparse.Namespace) -> str:
    plain = options.workers == 2 and options.schedule == "auto"
    return name if plain else f"{name} in {options.workers} by {options.schedule}"


def table(rows: list[results.Row]) -> str:
    """The page."""
    rows = sorted(rows, key=lambda row: str(row["name"]))
    judged = [row for row in rows if row["status"] in ("equal", "noise", "different", "failed")]
    versions = Counter((row["code"], row["torch"], row["transformers"]) for row in judged)
    lines = [HEAD]
    lines += [
        f"{count} rows by code {code}, torch {one}, transformers {two}." for (code, one, two), count in versions.items()
    ]
    paths, states = Counter(row.get("path", "") for row in judged), Counter(row["status"] for row in judged)
    share = paths["overlapped"] / max(len(judged), 1)
    lines += ["", f"{len(judged)} trained: {dict(states)}; paths {dict(paths)}: {share:.1%} overlapped.", ""]
    lines += ["| model | class | result | worst | path | why not overlapped |", "|---|---|---|---|---|---|"]
    for row in judged:
        why = f"{row['reason']} {row.get('why', '')}".strip().replace("|", "\\|").replace("\n", " ")[:200]
        cells = (row["name"], row["cls"], _status(row), f"{row.get('worst', 0):.0e}", row.get("path", ""), why)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _status(row: results.Row) -> str:
    return f"{row['status']}, float32 inside" if row.get("float32_inside") else str(row["status"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of models; default all")
    parser.add_argument("--known", action="store_true", help="only models that could be made before")
    parser.add_argument("--again", nargs="*", default=[], help="models with these results: failed, different …")
    parser.add_argument("--fresh", action="store_true", help="judge again what was judged before")
    parser.add_argument("--workers", type=int, default=2, help="how many; default 2")
    parser.add_argument("--schedule", default="auto", help="auto, or a schedule of the library")
    parser.add_argument("--every", type=int, default=1, help="every n-th model only")
    parser.add_argument("--seconds", type=int, default=90, help="limit for one judgement of a model")
    parser.add_argument("--build-seconds", type=int, default=45, help="limit for making one model")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="begin no model after so many seconds")
    parser.add_argument("--shard", type=workers._shard, default=(0, 1), help="i/n: every n-th model, from the i-th")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    parser.add_argument("--merge", nargs="*", type=Path, help="add these results to --results, and write the table")
    parser.add_argument("--table", action="store_true", help=f"write {TABLE} from the results and stop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
