"""Sweep the zoo with workers: every model trains three steps on one device and in real workers.

Writes build/conformance/zoo_workers.md.

python -m conformance.zoo.workers                            all models in two workers; continues where it stopped
python -m conformance.zoo.workers --only llama t5 --fresh    these again
python -m conformance.zoo.workers --workers 4 --every 10     every tenth model, in four
python -m conformance.zoo.workers --shard 3/15 --results DIR/3.jsonl      one of 15 processes
python -m conformance.zoo.workers --merge DIR/*.jsonl        one file of many, and the table
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from conformance.zoo import results
from conformance.zoo.run import _quiet, _shard
from conformance.zoo.verdict import Animal, zoo
from conformance.zoo.workers_table import write_table
from conformance.zoo.workers_verdict import judge
from gemini.runtime.pool.worker_pool import WorkerPool

RESULTS = Path(".gemini/zoo_workers.jsonl")
HINTS = (Path(".gemini/zoo.jsonl"), Path(".gemini/hints.jsonl"))
TABLE = Path("build/conformance/zoo_workers.md")
_NOT_MADE = ("not buildable", "not trainable")
_UNKNOWN: results.Row = {"status": _NOT_MADE[0]}
_MODELS_A_CREW = 40  # then new processes: what one model leaves behind in a worker is not to hide in a sweep


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
        write_table(TABLE, list(results.read(options.results).values()))


def _sweep(options: argparse.Namespace) -> None:
    done = {} if options.fresh else results.read(options.results)
    hints = {name: row.get("hint") for path in HINTS for name, row in results.read(path).items() if row.get("hint")}
    hints.update({row["model"]: row["hint"] for row in results.read(options.results).values() if row.get("hint")})
    ends = time.monotonic() + options.stop_after
    pool, used = WorkerPool(options.workers, 1), 0
    for animal in _chosen(options):
        if _key(animal, options.workers) in done:
            continue
        if time.monotonic() > ends:
            break
        row = judge(animal, pool, build=options.build_seconds, limit=options.seconds, hint=hints.get(animal.name))
        row.update(name=_key(animal, options.workers), model=animal.name)
        results.append(options.results, row)
        print(_line(row), flush=True)
        used += 1
        if used % _MODELS_A_CREW == 0 or row["status"] == "failed":
            pool.stop()
            pool = WorkerPool(options.workers, 1)
        gc.collect()
    pool.stop()


def _key(animal: Animal, workers: int) -> str:
    return animal.name if workers == 2 else f"{animal.name} in {workers}"


def _chosen(options: argparse.Namespace) -> list[Animal]:
    """The models of a sweep, the slowest first."""
    animals = list(zoo())
    known = {name: row for path in (*HINTS, options.results) for name, row in results.read(path).items()}
    if options.only:
        animals = [animal for animal in animals if animal.name in options.only]
    if options.known:
        animals = [one for one in animals if known.get(one.name, _UNKNOWN).get("status", "") not in _NOT_MADE]
    if options.again:
        rows = results.read(options.results)
        return [one for one in animals if rows.get(_key(one, options.workers), {}).get("status") in options.again]
    at, of = options.shard
    cost = {name: row.get("building", 0.0) + row.get("seconds", 0.0) for name, row in known.items()}
    return sorted(animals[:: options.every], key=lambda one: -cost.get(one.name, 0.0))[at::of]


def _line(row: results.Row) -> str:
    return (
        f"{row['status']:13s} {row['model']:36s} {row.get('dtype', ''):8s} workers {row.get('used', 0)} "
        f"units {row.get('units', 0):3d} elsewhere {row.get('elsewhere', 0):4.0%} "
        f"differences {row.get('worst', 0):.0e} {row.get('worst_sgd', 0):.0e} "
        f"order {row.get('order', '-')!s:.60} {row.get('order_sgd', '-')!s:.60} "
        f"noise {row.get('noise', 0)}/{row.get('noise_sgd', 0)} "
        f"{row.get('building', 0):5.1f}+{row.get('seconds', 0):4.1f} s  {row.get('reason', '')[:200]}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of models; default all")
    parser.add_argument("--known", action="store_true", help="only models that could be made before")
    parser.add_argument("--again", nargs="*", default=[], help="models with these results: failed, different …")
    parser.add_argument("--fresh", action="store_true", help="judge again what was judged before")
    parser.add_argument("--workers", type=int, default=2, help="how many; default 2")
    parser.add_argument("--every", type=int, default=1, help="every n-th model only")
    parser.add_argument("--seconds", type=int, default=90, help="limit for one judgement of a model")
    parser.add_argument("--build-seconds", type=int, default=45, help="limit for making one model")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="begin no model after so many seconds")
    parser.add_argument("--shard", type=_shard, default=(0, 1), help="i/n: every n-th model, from the i-th")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    parser.add_argument("--merge", nargs="*", type=Path, help="add these results to --results, and write the table")
    parser.add_argument("--table", action="store_true", help=f"write {TABLE} from the results and stop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
