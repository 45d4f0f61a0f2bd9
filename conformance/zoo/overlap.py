"""Sweep the zoo with steps by a plan: every model trains five steps in four micro-batches.

Writes build/conformance/zoo_overlap.md.

python -m conformance.zoo.overlap                            all models in two workers; continues where it stopped
python -m conformance.zoo.overlap --only llama t5 --fresh    these again
python -m conformance.zoo.overlap --workers 4 --overlapped --every 6 --schedules gpipe 1f1b interleaved_1f1b
python -m conformance.zoo.overlap --shards 2                 stages on two shards; with --workers 4 two such stages
python -m conformance.zoo.overlap --shard 3/15 --results DIR/3.jsonl      one of 15 processes
python -m conformance.zoo.overlap --merge DIR/*.jsonl        one file of many, and the table
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from pathlib import Path

import torch

from conformance.zoo import results, workers
from conformance.zoo.overlap_table import table
from conformance.zoo.overlap_verdict import judge, sharded_steps
from conformance.zoo.run import _quiet
from conformance.zoo.verdict import Animal
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool

RESULTS, TABLE = Path(".gemini/zoo_overlap.jsonl"), Path("build/conformance/zoo_overlap.md")
_MODELS_A_CREW = 40


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
        TABLE.parent.mkdir(parents=True, exist_ok=True)
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
    pool, used = WorkerPool(options.workers, 1), 0
    for animal, schedule in _chosen(options):
        key = _key(animal.name, schedule, options.workers, options.shards)
        if key in done:
            continue
        if time.monotonic() > ends:
            break
        row = judge(
            animal, pool, build=options.build_seconds, limit=options.seconds, hint=hints.get(animal.name),
            steps=sharded_steps(schedule, options.workers, options.shards),
        )  # fmt: skip
        row.update(name=key, model=animal.name)
        results.append(options.results, row)
        print(_line(row), flush=True)
        used += 1
        if used % _MODELS_A_CREW == 0 or row["status"] == "failed":
            pool.stop()
            pool = WorkerPool(options.workers, 1)
        gc.collect()
    pool.stop()


def _chosen(options: argparse.Namespace) -> list[tuple[Animal, str]]:
    """The models of a sweep, each by every schedule."""
    if options.overlapped:
        known = results.read(RESULTS).items()
        options.only = [name for name, row in known if row["model"] == name and row.get("path") == CallPath.OVERLAPPED]
    return [(animal, schedule) for animal in workers._chosen(options) for schedule in options.schedules]


def _key(name: str, schedule: str, count: int, shards: int) -> str:
    if shards > 1:
        return f"{name} in {count // shards} stages of {shards} shards by {schedule}"
    return name if count == 2 and schedule == "auto" else f"{name} in {count} by {schedule}"


def _line(row: results.Row) -> str:
    return (
        f"{row['status']:13s} {row['model']:36s} {row['schedule']:16s} {row.get('dtype', ''):8s} "
        f"{row.get('path', ''):10s} {row.get('worst', 0):.0e} {row.get('seconds', 0):5.1f} s  "
        f"{row.get('plan', '').partition(' on ')[0]:28s} {row['reason'][:150]} {row.get('why', '')[:150]}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of models; default all")
    parser.add_argument("--known", action="store_true", help="only models that could be made before")
    parser.add_argument("--again", nargs="*", default=[], help="models with these results: failed, different …")
    parser.add_argument("--fresh", action="store_true", help="judge again what was judged before")
    parser.add_argument("--workers", type=int, default=2, help="how many; default 2")
    parser.add_argument("--shards", type=int, default=1, help="how many workers share a stage; default 1")
    parser.add_argument("--schedules", nargs="+", default=["auto"], help="auto, or schedules of the library")
    parser.add_argument("--overlapped", action="store_true", help=f"only models that were overlapped in {RESULTS}")
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
