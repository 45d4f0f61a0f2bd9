"""Cutting every model: stages by every partitioner, run in one process and compared with the model from outside.

One capture and one analytic profile a model; then each partitioner for each number of parts. The stages run one after
another in one autograd graph, and detached, with copies between them, as workers would, with dropout active.

    float32    state dict, outputs, buffers, inputs and generators equal the model's in every element, and so do the
               gradients: equal, `judged` in float32
    float64    gradients that do not are sums in another order, or they are wrong. Which of the two shows where
               rounding is small: the model and its inputs in float64, the same cut, 1e-9 of the largest gradient

What float64 cannot tell (a model without kernels for it) is compared in float32, to 1e-4 of the largest gradient. A
model that computes differentiable values in a smaller type whatever its own is (`x.float()`) rounds there in float64
too: where 1e-9 is not met and such a value is found, the row says "float32 inside", and 1e-5 counts.
For float64 the weights of linear layers and convolutions are scaled to keep the size of what passes them. Those that
small models begin with let it die away, to 1e-18, and normalizations blow up what is left: rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from conformance.zoo.comparison import (
    Run,
    Seen,
    differences,
    forward_differences,
    gradient_differences,
    objective,
    step,
)
from gemini.capture import Graph, capture
from gemini.codegen import generate_stages
from gemini.errors import MissingEngineError, PartitionError
from gemini.ir.call_binding import ModelCall
from gemini.partition import Options, Partition, partition
from gemini.partition.registry import partitioners
from gemini.pipe import Piped
from gemini.profiling import Profile, profile

PARTS = (2, 4)
LAYERS = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
LIMIT = 1e-9  # of the largest gradient, in float64
LIMIT_INSIDE = 1e-5  # likewise in float64, where a model computes in a smaller type inside
LIMIT_NARROW = 1e-4  # likewise in float32, where a model has no kernels for float64
SEEDS = (11, 12, 13, 14)  # more than one, for models that skip layers at random: another path runs the model itself


@dataclass(frozen=True)
class Cut:
    """What came of one partitioner and one number of parts."""

    status: str  # equal | different | uncut | fell back | failed | no engine
    stages: int = 0
    why: str = ""
    judged: str = ""  # float32 | float64 | float32 inside, to 1e-05 | float32 to 1e-04

    def row(self) -> list[Any]:
        return [self.status, self.stages, self.why, self.judged]


class Judge:
    """A model in one precision, and what its own steps show."""

    def __init__(self, graph: Graph, model: torch.nn.Module, call: ModelCall) -> None:
        self.graph, self.model, self.call = graph, model, call
        args, kwargs = call.arguments(call.tensors)
        self.costs: Profile = profile(graph, args, kwargs, analytic="cpu", cache=False)
        self._expected: dict[int, Seen] = {}

    def expected(self, seed: int) -> Seen:
        """A step of the model itself."""
        if seed not in self._expected:
            self._expected[seed] = step(self.model, self.call, seed, lambda a, k: self.model(*a, **k))
        return self._expected[seed]

    def piped(self, cut: Partition) -> Piped:
        """The stages of a cut."""
        return Piped(self.model, self.graph, self.costs, cut, generate_stages(self.graph, cut))

    def runs(self, piped: Piped) -> tuple[int, list[tuple[str, Seen]]] | None:
        """A seed with which the stages run, and what both ways of running them show; None if none is found."""
        ways: tuple[tuple[str, Run], ...] = (
            ("in sequence", lambda a, k: piped(*a, **k)),
            ("detached", lambda a, k: piped.run_detached(a, k, loss=objective).output),
        )
        for seed in SEEDS:
            before = piped.fallbacks
            seen = [(way, step(self.model, self.call, seed, run, backward=way != "detached")) for way, run in ways]
            if piped.fallbacks == before:
                return seed, seen
        return None


def judge_cuts(graph: Graph, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, list[Any]]:
    """`partitioner/parts` → what came of it. Equal partitions are run once. The model may be float64 afterwards."""
    judge = Judge(graph, model, ModelCall(tuple(args), kwargs))
    found: dict[str, Cut] = {}
    cuts: dict[str, Partition] = {}
    known: dict[Any, Cut] = {}
    for parts in PARTS:
        for name in partitioners():
            key = f"{name}/{parts}"
            try:
                cut = partition(graph, judge.costs, parts, name, Options(time_limit=2.0))
                if cut.stages not in known:
                    known[cut.stages] = _in_float32(judge, judge.piped(cut))
                found[key], cuts[key] = known[cut.stages], cut
            except Exception as error:
                found[key] = _refused(error)
    unsure = {cuts[key].stages: cuts[key] for key, cut in found.items() if cut.status == "unsure"}
    decided = _in_float64(judge, unsure, known) if unsure else {}
    return {key: decided.get(cuts[key].stages, cut).row() if key in cuts else cut.row() for key, cut in found.items()}


def _refused(error: Exception) -> Cut:
    text = str(error)
    if isinstance(error, MissingEngineError):
        return Cut("no engine", 0, text.split("\n")[0])
    if isinstance(error, PartitionError):
        return Cut("uncut" if "the most" in text or "whole" in text else "failed", 0, text.split("\n    →")[0])
    return Cut("failed", 0, f"{type(error).__name__}: {text:.300}")


def _in_float32(judge: Judge, piped: Piped) -> Cut:
    """Equal or different, or "unsure": by no more than gradients in another order of sums might be."""
    count = len(piped.stages)
    lines = state_differences(piped, judge.model)
    ran = judge.runs(piped)
    if ran is None and not lines:
        return Cut("fell back", count, "; ".join(piped.fallback_reasons)[:300])
    seed, ways = ran or (0, [])
    for way, seen in ways:
        lines += [f"{way}: {line}" for line in forward_differences(judge.expected(seed), seen)]
    if lines:
        return Cut("different", count, "; ".join(lines[:4]), "float32")
    if not any(gradient_differences(judge.expected(seed), seen) for _, seen in ways):
        return Cut("equal", count, "", "float32")
    far = [line for _, seen in ways for line in gradient_differences(judge.expected(seed), seen, LIMIT_NARROW)]
    return Cut("unsure", count, "; ".join(far[:4]), f"float32 to {LIMIT_NARROW:.0e}")


def _in_float64(judge: Judge, cuts: dict[Any, Partition], unsure: dict[Any, Cut]) -> dict[Any, Cut]:
    """What float64 says of these cuts; of a model without kernels for it, what float32 said."""
    try:
        wide = _widened(judge)
        wide.expected(SEEDS[0])
    except Exception:
        narrow = {stages: unsure[stages] for stages in cuts}
        return {stages: replace(cut, status="different" if cut.why else "equal") for stages, cut in narrow.items()}
    decided = {}
    for stages, cut in cuts.items():
        try:
            decided[stages] = _decide(wide, wide.piped(_fitted(cut, wide, judge.graph)), unsure[stages])
        except Exception as error:
            decided[stages] = _refused(error)
    return decided


def _decide(wide: Judge, piped: Piped, unsure: Cut) -> Cut:
    state, ran = state_differences(piped, wide.model), wide.runs(piped)
    if ran is None:
        return replace(unsure, status="fell back", why="; ".join(piped.fallback_reasons)[:300], judged="float64")

    def far(limit: float) -> list[str]:
        expected = wide.expected(ran[0])
        return state + [f"{way}: {line}" for way, seen in ran[1] for line in differences(expected, seen, limit)]

    lines, judged = far(LIMIT), "float64"
    inside = smaller_types(wide.model, wide.call) if lines else []
    if inside:
        lines, judged = far(LIMIT_INSIDE), f"{' and '.join(inside)} inside, to {LIMIT_INSIDE:.0e}"
    return replace(unsure, status="different" if lines else "equal", why="; ".join(lines[:4]), judged=judged)


class _Types(TorchFunctionMode):
    """Notes the types of differentiable results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(part, torch.Tensor) and part.requires_grad:
                self.seen.add(part.dtype)
        return made


def smaller_types(model: torch.nn.Module, call: ModelCall) -> list[str]:
    """The types smaller than float64 that a model in float64 computes differentiable values in, inside modules too."""
    types = _Types()

    def run(args: Any, kwargs: Any) -> Any:
        with types:
            return model(*args, **kwargs)

    step(model, call, SEEDS[0], run, backward=False)
    wide = (torch.float64, torch.complex128)
    return sorted(str(dtype).removeprefix("torch.") for dtype in types.seen if dtype not in wide)


def _widened(judge: Judge) -> Judge:
    """The model itself in float64, captured anew."""
    model = judge.model.double()
    call = ModelCall(*judge.call.arguments([_wide(tensor) for tensor in judge.call.tensors]))
    own = keep_sizes(model)
    if not _is_finite(step(model, call, SEEDS[0], lambda a, k: model(*a, **k))):
        with torch.no_grad():
            for weight, value in own.items():
                weight.copy_(value)
    torch.manual_seed(SEEDS[0])
    with torch.no_grad():  # some cast parts of themselves when they first run: routers of experts, to float32
        args, kwargs = call.arguments([tensor.detach().clone() for tensor in call.tensors])
        model(*args, **kwargs)
    torch.manual_seed(SEEDS[0])
    return Judge(capture(model, *call.arguments(call.tensors)), model, call)


def keep_sizes(model: torch.nn.Module) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Scale the weights of linear layers and convolutions to a deviation of 1/√inputs; what they were before."""
    before: dict[torch.nn.Parameter, torch.Tensor] = {}
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, LAYERS) else None
        if weight is None or weight.dim() < 2 or weight in before:
            continue
        deviation = float(weight.detach().std()) if weight.numel() > 1 else 0.0
        if deviation > 0:
            before[weight] = weight.detach().clone()
            with torch.no_grad():
                weight.mul_(1 / (deviation * weight[0].numel() ** 0.5))
    return before


def _is_finite(seen: Seen) -> bool:
    return all(bool(torch.isfinite(g).all()) for g in seen.gradients.values() if g is not None and not g.is_sparse)


def _fitted(cut: Partition, wide: Judge, graph: Graph) -> Partition:
    """The same cut of the graph in float64; found anew where that graph has other nodes."""
    if _outline(wide.graph) == _outline(graph):
        return cut
    return partition(wide.graph, wide.costs, cut.nparts, cut.partitioner, Options(time_limit=2.0))


def _outline(graph: Graph) -> list[tuple[str, str]]:
    return [(node.kind, node.target) for node in graph.nodes]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def state_differences(piped: Piped, model: torch.nn.Module) -> list[str]:
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
        if name in together and isinstance(value, torch.Tensor) and not _is_same(value, together[name])
    ]
    return lines


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
