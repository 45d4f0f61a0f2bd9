"""Examination: one untimed forward and backward of an isolated node, for its memory and its work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gemini.profiling.device import MemoryWatch
from gemini.profiling.flow import tensor_inputs
from gemini.profiling.held import HELD
from gemini.profiling.isolation import Isolation
from gemini.profiling.measurement import Memory
from gemini.profiling.saved import SavedTensors
from gemini.profiling.work import Work, WorkCounter


def examine(isolation: Isolation, watch: MemoryWatch, held: list[torch.Tensor]) -> tuple[Memory, Work, Work]:
    """(memory, forward work, backward work) of a node that uses the `held` tensors of the model."""
    saved = SavedTensors()
    with WorkCounter() as counter:
        with saved.recording():
            result = isolation.forward()
        forward_work, forward_peak = counter.take(), watch.peak_mb()
        memory = saved.summarize(_given(isolation), isolation.outputs(result), held)
        watch.restart()
        backward = isolation.prepare(result)
        counter.take()
        if backward is None:
            return replace(memory, forward_peak=forward_peak), forward_work, Work()
        gradients = backward()
        memory = replace(memory, forward_peak=forward_peak, backward_peak=watch.peak_mb())
        del gradients
        return memory, forward_work, counter.take()


def _given(isolation: Isolation) -> list[Any]:
    """The inputs by position; None for tensors of the model."""
    nodes = isolation.walk.graph.nodes
    refs = tensor_inputs(isolation.node)
    return [None if nodes[ref.node].kind in HELD else isolation.leaves.get(ref) for ref in refs]
