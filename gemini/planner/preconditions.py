"""Preconditions of a plan: properties of a model that rule out plans, checked before it is captured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from gemini.ir.graph import Graph
from gemini.ir.hook_tables import has_hooks, hook_tables
from gemini.ir.interpreter import find_model_tensor
from gemini.planner.step_plan import UnplannableError
from gemini.snapshot.tensor_writes import model_tensors

_WEIGHT_HOOKS = "torch.nn.utils."


def check_model(model: nn.Module) -> None:
    """Raise UnplannableError where no plan of the model can be right."""
    check_hooks(model)
    check_scripted(model)
    check_gradient_attributes(model)


# ── hooks ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A hook of user code collects values in lists and dicts of the script, or changes values: it must run in the
# script's process, once per call. Hooks of torch that compute a weight (old weight and spectral normalization, pruning)
# store it in an attribute, which the script may read after the call. Parametrizations, their successor, have no hooks.
def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on modules inside the model; those on the model itself run around its call."""
    if found := describe_inner_hooks(model):
        raise UnplannableError(found)


def describe_inner_hooks(model: nn.Module) -> str:
    """Return which inner modules have hooks, as a reason; '' if none has."""
    hooked = {name: _hooks_of(module) for name, module in model.named_modules() if name and has_hooks(module)}
    names = [name for name, hooks in hooked.items() if not all(map(_computes_weight, hooks))]
    if names:
        return f"the script has hooks on {_first_of(names)}"
    names = [name for name, hooks in hooked.items() if hooks]
    return f"a hook of torch.nn.utils computes a weight in every call of {_first_of(names)}" if names else ""


def _hooks_of(module: nn.Module) -> list[Any]:
    return [hook for table in hook_tables(module) for hook in (table or {}).values()]


def _computes_weight(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    classes = type(hook).__mro__[:-1]  # pruning methods may be derived from torch's
    return getattr(function, "__module__", "").startswith(_WEIGHT_HOOKS) or any(
        cls.__module__.startswith(_WEIGHT_HOOKS) for cls in classes
    )


# ── compiled modules ───────────────────────────────────────────────────────────────────────────────────────────────
def check_scripted(model: nn.Module) -> None:
    """Refuse modules compiled by `torch.jit`: they cannot be sent to a worker."""
    name = next((name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None)
    if name is not None:
        raise UnplannableError(f"{name or 'it'} is compiled by torch.jit, and cannot be sent to a worker")


# ── trained tensors that are not parameters ────────────────────────────────────────────────────────────────────────
# Weights of an architecture search in a plain attribute, learned prompts in a list: the script passes them to an
# optimizer itself. Workers return gradients of parameters and inputs only.
def check_gradient_attributes(model: nn.Module) -> None:
    """Refuse leaf tensors in attributes that require a gradient; a computed one may be a result of an earlier call."""
    parameters = {id(parameter) for parameter in model.parameters()}
    _refuse_gradients(
        [
            name
            for name, tensor in model_tensors(model)
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in parameters
        ]
    )


def check_graph_attributes(graph: Graph) -> None:
    """Refuse tensors in attributes that the graph reads and that require a gradient, leaves or computed."""
    names = [node.target for node in graph.nodes if node.kind in ("attribute", "buffer")]
    model = graph.bound_model()  # a cached graph may come from an equivalent model
    _refuse_gradients([name for name in names if find_model_tensor(model, name).requires_grad])


def _refuse_gradients(names: Sequence[str]) -> None:
    if names:
        raise UnplannableError(
            f"{_first_of([names[0].removeprefix('.'), *names[1:]])} requires a gradient and is no parameter"
        )


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_reassigned(names: Collection[str]) -> None:
    """Refuse a forward that assigns new memory to tensors of the model: in a worker they would leave shared memory."""
    if names:
        raise UnplannableError(f"its forward assigns new memory to {min(names)}")


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
