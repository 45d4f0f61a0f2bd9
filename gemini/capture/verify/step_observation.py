"""Step observations: the results of one training step, and the comparison of two of them.

The outputs, the gradients of all parameters and inputs of a fixed random combination of the outputs, the tensors of
the model that it wrote, and the inputs afterwards. Two runs from the same generator states must agree in all of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini.capture.verify.gradient_record import Grads, Sink, autograd_graph_text, backward, digest, keep_gradient
from gemini.ir.call_binding import ModelCall
from gemini.ir.encode import LITERALS, tensors, walk
from gemini.ir.out_spec import structure_of
from gemini.ir.symint import to_plain
from gemini.snapshot.model_state import ModelSnapshot

_SMALL = 1 << 16  # elements
_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "complex64": 1e-5, "complex128": 1e-9}


@dataclass
class StepObservation:
    """The results of one step; `grads` is None where only the forward ran."""

    structure: str
    outputs: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]
    plain_arguments: dict[str, str] = field(default_factory=dict)  # the non-tensor arguments afterwards, by path
    grads: Grads | None = None
    autograd_text: str = ""
    finite: bool = True


@dataclass
class Differences:
    """Where two observations disagree: readable lines, and the parameters whose gradients differ."""

    lines: list[str] = field(default_factory=list)
    forward: bool = False
    parameters: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lines)


def observe(
    run: Callable[[Any, Any], Any],
    model: nn.Module,
    call: ModelCall,
    inputs: Sequence[torch.Tensor],
    *,
    gradients: bool,
    keep: Sink = keep_gradient,
    saved: ModelSnapshot | None = None,
) -> StepObservation:
    """Run one step and observe it. The caller sets the generators before and restores the model after.

    `keep` retains a part of each gradient; `saved` lists the tensors that runs write (default: all buffers).
    """
    args, kwargs = call.arguments(inputs)
    return observe_finished(model, run(args, kwargs), (args, kwargs), gradients=gradients, keep=keep, saved=saved)


def observe_finished(
    model: nn.Module,
    output: Any,
    arguments: Any,
    *,
    gradients: bool,
    keep: Sink = keep_gradient,
    saved: ModelSnapshot | None = None,
) -> StepObservation:
    """Return the observation of a step that has run."""
    inputs = [tensor for _, tensor in tensors(arguments)]
    made = [tensor for _, tensor in tensors(output)]
    if saved is None:
        state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    else:
        state = {copy.name: contents(copy.tensor) for copy in saved.written_tensors()} | _attributes(saved)
    detached = [tensor.detach().clone() for tensor in made], state, [tensor.detach() for tensor in inputs]
    seen = StepObservation(structure_of(output), *detached, _plain_parts(arguments))
    seen.finite = all(bool(torch.isfinite(t).all()) for t in made if _is_real(t))
    if gradients:
        seen.grads = backward(model, made, inputs, keep)
    else:
        seen.autograd_text = autograd_graph_text(model, made, inputs)
    return seen


def _plain_parts(arguments: Any) -> dict[str, str]:
    """Return the non-tensor arguments: a model may count calls in a dictionary, or append names to a list."""
    found = {}
    for path, leaf in walk(arguments):
        if not isinstance(leaf, torch.Tensor):
            where = ".".join(str(step[1]) for step in path[1:])  # without the step into args or kwargs
            found[where] = repr(to_plain(leaf)) if isinstance(leaf, LITERALS) else type(leaf).__name__
    return found


def argument_difference(expected: StepObservation, found: StepObservation) -> str:
    """Return the first difference of the non-tensor arguments after two runs; '' if there is none."""
    for where in dict.fromkeys([*expected.plain_arguments, *found.plain_arguments]):
        one, two = expected.plain_arguments.get(where, "nothing"), found.plain_arguments.get(where, "nothing")
        if one != two:
            return f"input {where}: {two:.80}, not {one:.80}"
    return ""


def _attributes(saved: ModelSnapshot) -> dict[str, torch.Tensor]:
    """Return the tensors in attributes that have changed."""
    found = {}
    for name, keys in saved.attributes.find_changes().items():
        own = vars(saved.model.get_submodule(name))
        found.update({f"{name}.{key}": contents(own[key]) for key in keys if isinstance(own.get(key), torch.Tensor)})
    return found


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a small tensor, a digest of a large one."""
    return tensor.detach().clone() if tensor.numel() <= _SMALL else digest("", tensor)


def _is_real(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() and not tensor.is_meta and tensor.layout == torch.strided)


def compare(expected: StepObservation, found: StepObservation) -> Differences:
    """Return where `found` differs from `expected`."""
    differences = Differences()
    if expected.structure != found.structure:
        differences.lines.append(f"the output is {found.structure:.200}, not {expected.structure:.200}")
    pairs = [
        *_pairs("output", dict(enumerate(expected.outputs)), dict(enumerate(found.outputs))),
        *_pairs("buffer", expected.buffers, found.buffers),
        *_pairs("input", dict(enumerate(expected.inputs)), dict(enumerate(found.inputs))),
    ]
    differences.lines += [line for _, line in pairs]
    differences.lines += filter(None, [argument_difference(expected, found)])
    differences.forward = bool(differences.lines)
    if expected.grads is not None and found.grads is not None:
        for name, line in _pairs("gradient of", expected.grads, found.grads):
            differences.lines.append(line)
            differences.parameters.append(str(name))
    return differences


def _pairs(what: str, expected: dict[Any, Any], found: dict[Any, Any]) -> list[tuple[Any, str]]:
    lines = []
    for name in dict.fromkeys([*expected, *found]):
        difference = tensor_difference(expected.get(name), found.get(name))
        if difference:
            lines.append((name, f"{what} {name}: {difference}"))
    return lines


def tensor_difference(expected: torch.Tensor | None, found: torch.Tensor | None) -> str:
    """Return how two tensors differ; '' if they are equal up to rounding."""
    if expected is None or found is None:
        return "" if expected is found else f"{'missing' if found is None else 'unexpected'}"
    if expected.layout != torch.strided or found.layout != torch.strided:
        if expected.layout != found.layout:
            return f"{found.layout}, not {expected.layout}"
        return tensor_difference(dense(expected), dense(found))
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    if expected.device.type == "meta" or expected.numel() == 0 or torch.equal(expected, found):
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return "other values"
    expected, found = expected.detach(), found.detach()
    relative, scale = tolerance(expected), scale_of(expected)
    if torch.allclose(expected, found, rtol=10 * relative, atol=relative * (scale + 1e-6), equal_nan=True):
        return ""
    return f"off by {distance(expected, found):.2g}"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in strided layout."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def tolerance(tensor: torch.Tensor) -> float:
    """Return the accepted rounding of a dtype, relative to the largest element."""
    return _TOLERANCE.get(str(tensor.dtype).removeprefix("torch."), 2e-2)


def scale_of(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    largest = float(tensor.abs().max())  # the common case first: selecting finite elements is several times slower
    if math.isfinite(largest):
        return largest
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest difference of two elements."""
    return float((expected - found).abs().nan_to_num().max()) if expected.numel() else 0.0
