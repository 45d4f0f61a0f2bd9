"""Sweep the zoo with shard plans: every model is planned for shards, which are simulated in one process.

python -m conformance.zoo.shards                             all models on two shards; continues where it stopped
python -m conformance.zoo.shards --only llama t5 --size 4    some of them on four shards
python -m conformance.zoo.shards --table               the share of each model so far, and how many reach 90 %
python -m conformance.zoo.shards --part 3/14 --results DIR/3.jsonl     one of 14 processes

Loss and gradients of one forward and backward, dropout on, must be those of one device: in float64 to 1e-9, relative to
the largest entry of a gradient, or a millionth of the largest of the model; with float32 inside to 1e-5. Costs are such
that even tiny models are worth dividing. The share of parameter bytes that is sharded is listed for each.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.zoo import discovery, results
from conformance.zoo.overlap_verdict import _casts
from conformance.zoo.run import _quiet, _shard
from conformance.zoo.verdict import Animal, TimeOut, at_most, zoo
from conformance.zoo.workers_verdict import _again, _prepared
from gemini.capture.entry import capture
from gemini.capture.options import CaptureOptions
from gemini.ir.encode import tensors
from gemini.tensor_parallel.layouts import Shard
from gemini.tensor_parallel.shard_costs import ShardCosts
from gemini.tensor_parallel.shard_planner import plan_shards
from tests.tensor_parallel.simulated_shards import SimulatedShards
from tests.training import difference

RESULTS = Path(".gemini/zoo_shards.jsonl")
SMALL = ShardCosts(latency_us=0.1, gflops=0.5)
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOST = 0.9
INSIDE = 1e-5  # of a model in float64 that computes parts in float32


def main() -> None:
    """The command line."""
    options = _options()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _quiet()
    if options.table:
        print(table(list(results.read(options.results).values()), options.size))
        return
    done = {} if options.fresh else results.read(options.results)
    at, of = options.part
    animals = list(zoo())
    chosen = [one for one in animals if one.name in options.only] if options.only else animals[at::of]
    ends = time.monotonic() + options.stop_after
    for animal in chosen:
        key = f"{animal.name} on {options.size}"
        if key in done and not options.only:
            continue
        if time.monotonic() > ends:
            break
        row = judge(animal, options.size, build=options.build_seconds, limit=options.seconds)
        row.update(name=key, model=animal.name, size=options.size)
        results.append(options.results, row)
        print(_line(row), flush=True)
        gc.collect()


def table(rows: list[results.Row], size: int) -> str:
    """Return the share of parameter bytes that is divided, by model, and how many models have most of it divided."""
    planned = [one for one in rows if one.get("size", 2) == size and "nodes" in one]
    found = sorted(planned, key=lambda one: str(one["model"]))
    lines = ["| model | result | share divided | planned in | whole because |", "|---|---|---|---|---|"]
    for one in found:
        whole = "; ".join(one.get("replicated", ())).replace("|", "/")
        lines.append(
            f"| {one['model']} | {one['status']} | {one['share']:.1%} | {one['planning']:.2f} s | {whole[:120]} |"
        )
    shares = [one["share"] for one in found if not one["model"].startswith("classic/")]
    if shares:
        most = sum(share >= _MOST for share in shares) / len(shares)
        lines.append(f"\n{len(shares)} models of the library: {most:.0%} have {_MOST:.0%} or more divided")
    return "\n".join(lines)


def judge(animal: Animal, size: int, *, build: int, limit: int) -> results.Row:
    """The row of one model."""
    row: results.Row = {"cls": animal.cls, "status": "not buildable", "reason": "", "share": 0.0, "worst": 0.0}
    try:
        with at_most(build):
            made, row["hint"] = animal.make(None)
    except (TimeOut, discovery.NotBuildable) as error:
        row["reason"] = str(error) or f"no recipe worked within {build} s"
        return row
    started = time.process_time()
    try:
        with at_most(limit):
            _compare(row, lambda: _again(animal, made, row["hint"]), size)
    except TimeOut:
        row.update(status="failed", reason=f"more than {limit} s")
    except Exception as error:
        row.update(status="failed", reason=f"{type(error).__name__}: {error!s:.300}")
    row["seconds"] = round(time.process_time() - started, 2)
    return row


def _compare(row: results.Row, fresh: Any, size: int) -> None:
    for dtype in LIMITS:
        model, args, kwargs = _prepared(fresh, dtype)
        model._forward_hooks.clear()  # those of the root run outside of a graph
        model._forward_pre_hooks.clear()
        try:
            expected = _step(lambda model=model, args=args, kwargs=kwargs: [model(*args, **kwargs)])
            grads = {name: one.grad for name, one in model.named_parameters()}
            break
        except Exception as error:
            row.update(status="not trainable", reason=f"{type(error).__name__}: {error!s:.100}")
    else:
        return
    model, args, kwargs = _prepared(fresh, dtype)
    _seed()
    graph = capture(model, args, kwargs, options=CaptureOptions(opens_leaves=True))
    started = time.process_time()
    plan = plan_shards(graph, size, costs=SMALL)
    row.update(planning=round(time.process_time() - started, 3), share=round(plan.sharded_share, 4),
               nodes=len(graph.nodes), replicated=_replicated(plan))  # fmt: skip
    shards = SimulatedShards(graph, plan)
    found = _step(lambda: shards.run(*args, **kwargs))
    row["worst"], place = _worst(expected, grads, found, shards.gradients())
    limit = LIMITS[dtype]
    if dtype == torch.float64 and row["worst"] > limit and _casts(*copy.deepcopy(_prepared(fresh, dtype))):
        row["float32_inside"], limit = True, INSIDE
    row["status"] = "equal" if row["worst"] <= limit else "different"
    row["reason"] = place if row["status"] == "different" else ""


def _replicated(plan: Any) -> list[str]:
    """Return the reasons why weights are whole, the largest first."""
    reasons = {one.node: one.reason for one in plan.replicated}
    whole = [one for one in plan.tensors if one.is_read and not isinstance(one.layout, Shard)]
    whole = sorted(whole, key=lambda one: -one.bytes)[:3]
    found = []
    for one in whole:
        if one.bytes * 50 > sum(tensor.bytes for tensor in plan.tensors):
            readers = [node.node for node in plan.nodes if any(name in one.names for name, _ in node.parameters)]
            why = next((reasons[node] for node in readers if node in reasons), "?")
            found.append(f"{one.name} {list(one.shape)}: {why}")
    return found


def _step(run: Any) -> list[torch.Tensor]:
    _seed()
    losses = [objective(output) for output in run()]
    torch.autograd.backward(losses)
    return [loss.detach() for loss in losses]


def objective(output: Any) -> torch.Tensor:
    """The model's own loss, else a weighted mean of its results: that of squares has no gradient behind a norm."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad and named.dim() == 0:
        return named
    parts = [part for _, part in tensors(output) if part.requires_grad and part.is_floating_point()]
    return torch.stack([(part * torch.linspace(0.5, 1.5, part.numel()).reshape(part.shape)).mean()
                        if part.dim() else part for part in parts]).sum()  # fmt: skip


def _seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def _worst(expected: Any, grads: Any, found: Any, parts: Any) -> tuple[float, str]:
    """The largest difference of the loss or a gradient, and where it is."""
    sizes = {f"loss of shard {at}": difference(expected[0], loss) for at, loss in enumerate(found)}
    largest = max((float(grad.to_dense().abs().max()) for grad in grads.values()
                   if grad is not None and grad.numel()), default=0.0)  # fmt: skip
    for name, grad in grads.items():
        whole = torch.zeros(()) if grad is None else grad.to_dense()
        for at, own in enumerate(parts[name]):
            whole = whole.expand_as(own) if grad is None else whole
            sizes[f"{name} on shard {at}"] = difference(whole.to(own.dtype), own.to_dense(), 1e-6 * largest)
    place = max(sizes, key=sizes.__getitem__)
    return sizes[place], place


def _line(row: results.Row) -> str:
    return (
        f"{row['status']:13s} {row['name']:34s} share {row['share']:6.1%} worst {row['worst']:.0e} "
        f"{row.get('nodes', 0):5d} nodes {row.get('planning', 0.0):6.2f} s of {row.get('seconds', 0.0):6.2f} s  "
        f"{row['reason'][:200]}" + "".join(f"\n      {one[:150]}" for one in row.get("replicated", ()))
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of models; default all")
    parser.add_argument("--table", action="store_true", help="print the results so far as a table, and stop")
    parser.add_argument("--size", type=int, default=2, help="number of shards")
    parser.add_argument("--fresh", action="store_true", help="judge again what was judged before")
    parser.add_argument("--seconds", type=int, default=60, help="limit for one judgement of a model")
    parser.add_argument("--build-seconds", type=int, default=30, help="limit for making one model")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="begin no model after so many seconds")
    parser.add_argument("--part", type=_shard, default=(0, 1), help="i/n: every n-th model, from the i-th")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
