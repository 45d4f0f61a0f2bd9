"""Examination: one untimed forward and backward of an isolated node, for its memory and its work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gemini.profiling.class_measurement import Memory
from gemini.profiling.flop_count import Work, WorkCounter
from gemini.profiling.measured_device import MemoryWatch
from gemini.profiling.node_runner import Isolation
from gemini.profiling.node_tensors import HELD
from gemini.profiling.saved_tensors import SavedTensors


def examine(isolation: Isolation, watch: MemoryWatch, held: list[torch.Tensor]) -> tuple[Memory, Work, Work]:
    """(memory, forward work, backward work) of a node that uses the `held` tensors of the model."""
    saved = SavedTensors()
    with WorkCounter() as counter:
        with saved.recording():
            result = isolation.forward()
        forward_work, forward_peak = counter.take(), watch.peak_mb()
        memory = saved.summarize(_given(isolation), isolation.outputs(result), held)
        watch.restart()
        backward = isolation.backward(result)
        if backward is None:
            return replace(memory, forward_peak=forward_peak), forward_work, Work()
        gradients, sums = backward.ones(), given_already(isolation)
        counter.take()
        found = backward.call(gradients, sums)()
        memory = replace(memory, forward_peak=forward_peak, backward_peak=watch.peak_mb())
        del found, gradients, sums
        return memory, forward_work, counter.take()


def given_already(isolation: Isolation) -> dict[int, torch.Tensor]:
    """Gradients of parameters that a later node has given before this one adds its own."""
    shared = isolation.flow.shared.get(isolation.node.id, ())
    tensors = [isolation.walk.stand_in_for(tensor) for tensor in shared]
    return {id(tensor): torch.zeros_like(tensor) for tensor in tensors}


def _given(isolation: Isolation) -> list[Any]:
    """The inputs by position; None for tensors of the model."""
    nodes = isolation.walk.graph.nodes
    refs = isolation.flow.inputs[isolation.node.id]
    return [None if nodes[ref.node].kind in HELD else isolation.given.get(ref) for ref in refs]
