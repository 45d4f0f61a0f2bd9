"""Cutting every model: stages by every partitioner, run in one process and compared with the model from outside.

One capture and one analytic profile a model; then each partitioner for each number of parts. The stages run one after
another in one autograd graph, and detached, with copies between them, as workers would. Outputs, gradients, buffers
and the state dicts of the stages must be the model's, with dropout active.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gemini.capture import Graph
from gemini.capture.binding import Call
from gemini.capture.observation import tensor_difference
from gemini.capture.sketch import sketch
from gemini.capture.state import Saved
from gemini.capture.values import tensors
from gemini.codegen import generate
from gemini.errors import MissingEngineError, PartitionError
from gemini.partition import Options, partition
from gemini.partition.registry import partitioners
from gemini.pipe import Piped
from gemini.profiling import profile

PARTS = (2, 4)
NOISE = 1e-7  # of the largest gradient: biases before a softmax or a norm have none but rounding
LAST_PLACE = 2.0**-23
SEEDS = (11, 12, 13, 14)  # more than one, for models that skip layers at random: another path runs the model itself


@dataclass(frozen=True)
class Cut:
    """What came of one partitioner and one number of parts."""

    status: str  # equal | different | uncut | fell back | failed | no engine
    stages: int = 0
    why: str = ""

    def row(self) -> list[Any]:
        return [self.status, self.stages, self.why]


@dataclass
class _Seen:
    structure: str
    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def judge_cuts(graph: Graph, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, list[Any]]:
    """`partitioner/parts` → what came of it. Equal partitions are run once."""
    call, known, found = Call(tuple(args), kwargs), {}, {}
    costs = profile(graph, tuple(args), kwargs, analytic="cpu", cache=False)
    expected = {seed: _step(model, call, seed, lambda a, k: model(*a, **k)) for seed in SEEDS[:1]}
    for parts in PARTS:
        for name in partitioners():
            try:
                cut = partition(graph, costs, parts, name, Options(time_limit=2.0))
                if cut.stages not in known:
                    piped = Piped(model, graph, costs, cut, generate(graph, cut))
                    known[cut.stages] = _compared(piped, model, call, expected)
                found[f"{name}/{parts}"] = known[cut.stages]
            except PartitionError as error:
                text = str(error)
                status = "uncut" if "the most" in text or "whole" in text else "failed"
                found[f"{name}/{parts}"] = Cut(status, 0, text.split("\n    →")[0])
            except MissingEngineError as error:
                found[f"{name}/{parts}"] = Cut("no engine", 0, str(error).split("\n")[0])
            except Exception as error:
                found[f"{name}/{parts}"] = Cut("failed", 0, f"{type(error).__name__}: {error!s:.300}")
    return {key: cut.row() for key, cut in found.items()}


def _compared(piped: Piped, model: torch.nn.Module, call: Call, expected: dict[int, _Seen]) -> Cut:
    count = len(piped.stages)
    lines = _state_differences(piped, model)
    # Autocast casts a weight once, and once in every stage that uses it: its gradient is then summed in full precision.
    coarse = any(node.region is not None and node.region.autocast for node in piped.graph.nodes)
    for seed in SEEDS:
        if seed not in expected:
            expected[seed] = _step(model, call, seed, lambda a, k: model(*a, **k))
        before = piped.fallbacks
        runs: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
            ("in sequence", lambda a, k: piped(*a, **k)),
            ("detached", lambda a, k: piped.run_detached(a, k, loss=_objective).output),
        )
        for way, run in runs:
            seen = _step(model, call, seed, run, backward=way != "detached")
            lines += [f"{way}: {line}" for line in _differences(expected[seed], seen, coarse=coarse)]
        if lines and all(": gradient " in line for line in lines):
            lines = _beyond_rounding(lines, piped, model, call, expected[seed], seed=seed)
        if lines:
            return Cut("different", count, "; ".join(lines[:4]))
        if piped.fallbacks == before:
            return Cut("equal", count)
    return Cut("fell back", count, "; ".join(piped.fallback_reasons)[:300])


def _beyond_rounding(
    lines: list[str], piped: Piped, model: torch.nn.Module, call: Call, expected: _Seen, *, seed: int
) -> list[str]:
    """The lines about gradients that differ by more than rounding does to the model itself.

    Stages that run nodes in another order sum gradients in another order. What that may do shows in the model: its
    gradients with every parameter changed in the last place. Some are nothing but noise, however large.
    """
    order = [node for nodes in piped.partition.stages for node in nodes]
    if order == sorted(order):
        return lines
    originals = [p.detach().clone() for p in model.parameters()]
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1 + LAST_PLACE)
        shaken = _step(model, call, seed, lambda a, k: model(*a, **k))
    finally:
        with torch.no_grad():
            for parameter, original in zip(model.parameters(), originals, strict=True):
                parameter.copy_(original)
    kept = []
    for line in lines:
        name = line.split(": gradient ", 1)[1].rpartition(": off by ")[0]
        off = float(line.rpartition("off by ")[2]) if "off by " in line else float("inf")
        one, other = expected.gradients.get(name), shaken.gradients.get(name)
        noise = float((one - other).abs().max()) if one is not None and other is not None else 0.0
        if off > 4 * noise:
            kept.append(line)
    return kept


def _step(
    model: torch.nn.Module, call: Call, seed: int, run: Callable[[Any, Any], Any], *, backward: bool = True
) -> _Seen:
    """One training step from the same state; everything is as before afterwards."""
    saved = Saved(model)
    torch.manual_seed(seed)
    args, kwargs = call.arguments(call.tensors)
    model.zero_grad(set_to_none=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = run(args, kwargs)
        loss = _objective(output) if backward else None
        if loss is not None:
            loss.backward()
        inputs = {f"input {path}": t for path, t in tensors((args, kwargs))}
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients |= {name: t.grad for name, t in inputs.items() if t.is_leaf and t.requires_grad}
        buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        buffers |= {name: t.detach().clone() for name, t in inputs.items()}
        outputs = {str(path): t.detach().clone() for path, t in tensors(output)}
        return _Seen(sketch(output), outputs, gradients, buffers)
    finally:
        saved.restore()
        model.zero_grad(set_to_none=True)


def _objective(output: Any) -> torch.Tensor | None:
    """A scalar that every differentiable output takes part in, with fixed weights."""
    generator, total = torch.Generator().manual_seed(1), None
    for _, tensor in tensors(output):
        if tensor.requires_grad:
            value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.rand(value.shape, generator=generator).to(value.device, value.dtype) + 0.5
            part = ((value * weights).sum() / max(1, value.numel()) ** 0.5).float()
            total = part if total is None else total + part
    return total


def _differences(expected: _Seen, found: _Seen, *, coarse: bool) -> list[str]:
    lines = [] if expected.structure == found.structure else [f"the output is {found.structure:.120}"]
    for kind in ("outputs", "gradients", "buffers"):
        one, other = getattr(expected, kind), getattr(found, kind)
        noise = NOISE * max((float(g.abs().max()) for g in one.values() if _is_float(g)), default=0.0)
        for name in dict.fromkeys((*one, *other)):
            left, right = _dense(one.get(name)), _dense(other.get(name))
            if kind == "gradients" and coarse and _is_float(left) and _is_float(right):
                left, right = left.bfloat16(), right.bfloat16()  # type: ignore[union-attr]
            difference = tensor_difference(left, right)
            if difference and not (kind == "gradients" and _within(left, right, noise)):
                lines.append(f"{kind[:-1]} {name}: {difference}")
    return lines


def _within(one: torch.Tensor | None, other: torch.Tensor | None, noise: float) -> bool:
    """Whether two tensors differ by noise only: a bias before a softmax or a norm has no gradient but rounding."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return _is_float(one) and float((one - other).abs().max()) <= noise


def _is_float(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in (torch.float32, torch.float64) and tensor.numel() > 0


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor


def _state_differences(piped: Piped, model: torch.nn.Module) -> list[str]:
    """Whether the stages together save what the model saves: the same names, the same values."""
    original: dict[str, Any] = dict(model.state_dict())
    together: dict[str, Any] = {}
    for stage in piped.stages:
        together.update(stage.state_dict())
    lines = [f"no stage saves {name}" for name in original if name not in together]
    lines += [f"a stage saves {name}, the model does not" for name in together if name not in original]
    lines += [
        f"a stage saves other values of {name}"
        for name, value in original.items()
        if name in together and isinstance(value, torch.Tensor) and tensor_difference(value, together[name])
    ]
    return lines
