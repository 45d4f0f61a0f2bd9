"""Sweep the zoo: capture every model, cut it, compare with eager from outside, and write build/conformance/zoo.md.

python -m conformance.zoo.run --pipe                       all models; continues where it stopped
python -m conformance.zoo.run --only llama t5 --fresh      these again
python -m conformance.zoo.run --pipe --shard 3/14 --claims DIR --results DIR/3.jsonl      one of 14 that share the work
python -m conformance.zoo.run --fresh --merge DIR/*.jsonl  one file of many, and the table; no older rows
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
from conformance.zoo.table import write_table
from conformance.zoo.verdict import Animal, judge, zoo

RESULTS = Path(".gemini/zoo.jsonl")
TABLE = Path("build/conformance/zoo.md")


def main() -> None:
    """The command line."""
    options = _options()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _quiet()
    if options.merge:
        rows = {} if options.fresh else results.read(options.results)
        for path in options.merge:
            rows.update(results.read(path))
        results.write(options.results, rows.values())
    elif not options.table:
        _sweep(options)
    if options.merge or options.table or options.shard == (0, 1):
        write_table(TABLE, list(results.read(options.results).values()))


def _sweep(options: argparse.Namespace) -> None:
    done = {} if options.fresh else results.read(options.results)
    hints = results.read(options.hints or options.results)
    ends = time.monotonic() + options.stop_after
    for animal in sorted(_chosen(options), key=lambda animal: _turn(hints.get(animal.name, {}))):
        known = done.get(animal.name)
        finished = known is not None and ("cuts" in known or not options.pipe or known["status"] == "not buildable")
        if finished or time.monotonic() > ends or not _claimed(animal, options.claims):
            continue
        hint = hints.get(animal.name, {}).get("hint")
        row = judge(animal, build=options.build_seconds, limit=options.seconds, cuts=options.pipe, hint=hint)
        results.append(options.results, row)
        print(_line(row), flush=True)
        gc.collect()


def _turn(hint: results.Row) -> tuple[bool, float]:
    """When a model's turn comes: the longest first, so that processes end together; what could not be built last."""
    seconds = sum(hint.get(key, 0.0) for key in ("building", "seconds", "cut_seconds"))
    return hint.get("status") == "not buildable", -seconds


def _chosen(options: argparse.Namespace) -> list[Animal]:
    animals = list(zoo())
    if options.only:
        return [animal for animal in animals if animal.name in options.only]
    if options.again:
        rows = results.read(options.results)
        return [animal for animal in animals if rows.get(animal.name, {}).get("status") in options.again]
    at, of = options.shard
    return animals if options.claims is not None else animals[at::of]


def _claimed(animal: Animal, claims: Path | None) -> bool:
    """Whether this process may take a model: the first to make its file does."""
    if claims is None:
        return True
    claims.mkdir(parents=True, exist_ok=True)
    try:
        (claims / animal.name.replace("/", "+")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _line(row: results.Row) -> str:
    cuts = row.get("cuts", {})
    good = sum(cut[0] == "equal" for cut in cuts.values())
    faults = [f"{key} {cut[0]}: {cut[2][:120]}" for key, cut in cuts.items() if cut[0] != "equal"]
    return (
        f"{row['status']:14s} {row['name']:34s} {row['nodes']:5d} nodes {row['blocks']:3d} blocks "
        f"balance {row['balance']:5.2f} {row['seconds']:6.2f} s  cuts {good}/{len(cuts)}  {row['reason'][:160]}"
        + "".join(f"\n    {fault}" for fault in faults[:3])
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of models; default all")
    parser.add_argument("--again", nargs="*", default=[], help="models with these results: failed, different …")
    parser.add_argument("--fresh", action="store_true", help="judge again what was judged before; keep no older rows")
    parser.add_argument("--pipe", action="store_true", help="also cut every model by every partitioner")
    parser.add_argument("--seconds", type=int, default=90, help="limit for one judgement of a model")
    parser.add_argument("--build-seconds", type=int, default=45, help="limit for making one model")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="begin no model after so many seconds")
    parser.add_argument("--shard", type=_shard, default=(0, 1), help="i/n: every n-th model, from the i-th")
    parser.add_argument(
        "--claims", type=Path, help="a folder that shards share: each takes the next model that none has"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    parser.add_argument("--hints", type=Path, help="results whose recipes are tried first; default those of --results")
    parser.add_argument("--merge", nargs="*", type=Path, help="add these results to --results, and write the table")
    parser.add_argument("--table", action="store_true", help=f"write {TABLE} from the results and stop")
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    at, _, of = text.partition("/")
    if not (at.isdigit() and of.isdigit() and int(at) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: write i/n, with i from 0 to n-1")
    return int(at), int(of)


def _quiet() -> None:
    try:
        import transformers
    except ImportError:
        return
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    main()
