"""Learners: tensors that a model holds, that are none of its parameters, and that want gradients all the same.

Weights of an architecture search in a plain attribute, learned prompts in a list: the program gives them to an
optimizer by themselves. Workers give gradients of parameters and inputs only, so a plan would lose theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gemini.ir.graph import Graph
from gemini.ir.interpreter import find_model_tensor
from gemini.planner.step_plan import UnplannableError
from gemini.snapshot.tensor_writes import model_tensors


def check_held(model: nn.Module) -> None:
    """Raises UnplannableError where the model holds such a leaf; what was computed may be left of the last call."""
    parameters = {id(parameter) for parameter in model.parameters()}
    _refuse(
        [
            name
            for name, tensor in model_tensors(model)
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in parameters
        ]
    )


def check_read(graph: Graph) -> None:
    """Raises UnplannableError where a call reads such a tensor, a leaf or computed."""
    names = [node.target for node in graph.nodes if node.kind in ("attribute", "buffer")]
    model = graph.bound_model()  # a kept graph may have been made of another that is alike
    _refuse([name for name in names if find_model_tensor(model, name).requires_grad])


def _refuse(names: Sequence[str]) -> None:
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UnplannableError(f"{names[0].removeprefix('.')}{others} wants a gradient and is no parameter")
