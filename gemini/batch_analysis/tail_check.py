"""Checking a step that ends in a tail: a proof held against numbers.

What the tail reads, made by micro-batches, must be what the whole batch makes of it. And the graph, captured on
a micro-batch, must do on the whole batch what the model does: the tail runs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from gemini.batch_analysis.graph_analysis import GraphForms
from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.batch_analysis.numeric_check import check, near
from gemini.batch_analysis.split_result import Splitting
from gemini.batch_analysis.whole_batch_tail import border, settled
from gemini.ir.call_binding import ModelCall
from gemini.ir.encode import tensors
from gemini.ir.interpreter import GuardBroken, NodeFailed
from gemini.ir.pytree import SequenceForm
from gemini.snapshot.model_state import ModelSnapshot
from gemini.snapshot.rng_snapshot import preserve_rng_state

_CLOSE = 2e-3  # of the model's own type


def check_tail(
    forms: GraphForms, nodes: tuple[int, ...], splitting: Splitting, call: ModelCall, given: Mapping[int, Any] | None
) -> str:
    """Why a splitting is to be refused after all; '' if nothing speaks against it."""
    graph, (args, kwargs) = forms.graph, call.arguments()
    inside = set(nodes)
    read = list(dict.fromkeys([*border(graph, inside), *(ref for ref in graph.outputs() if ref.node not in inside)]))
    values = settled(forms, border(graph, inside)).values
    read = [ref for ref in read if not graph.nodes[ref.node].is_source and ref in values]
    seen = replace(graph, result=SequenceForm(tuple, tuple(read)))
    metas = [Meta((), torch.float32, torch.device("cpu"), False)] * len(read)
    kinds = tuple(values[ref].kind for ref in read)
    found = check(
        replace(forms, graph=seen), Tape(len(read), metas), 0, replace(splitting, outputs=kinds), args, kwargs, given,
        inside,
    )  # fmt: skip
    return found or ("" if given else _differs(forms, call))


def _differs(forms: GraphForms, call: ModelCall) -> str:
    """Whether the graph does on all samples what the model does."""
    model, outputs = forms.graph.bound_model(), []
    saved = ModelSnapshot(model)
    args, kwargs = call.arguments()
    try:
        for is_model in (True, False):
            with preserve_rng_state(), torch.no_grad():
                torch.manual_seed(0)
                made = model(*args, **kwargs) if is_model else forms.graph.execute(args, kwargs)
            outputs.append([tensor for _, tensor in tensors(made)])
            saved.restore()
    except (GuardBroken, NodeFailed, RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"the whole batch fails: {type(error).__name__}: {error!s:.120}"
    finally:
        saved.restore()
    own, found = outputs  # the graph may return more: what the model leaves in attributes
    if len(own) <= len(found) and all(near(a, b, _CLOSE) for a, b in zip(own, found, strict=False)):
        return ""
    return "its graph gives something else on the whole batch than the model"
