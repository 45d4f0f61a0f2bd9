"""Record loss tapes, and compare a split step with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gemini.batch_analysis.graph_analysis import prove_graph
from gemini.batch_analysis.loss_analysis import prove
from gemini.batch_analysis.loss_tape import Meta, Op, Tape
from gemini.batch_analysis.precompute import Precomputed
from gemini.batch_analysis.reference_run import micro_batch_ranges, run_graph, run_tape, split_operands
from gemini.batch_analysis.split_result import Splitting
from gemini.capture import capture
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import Encoder, tensors
from gemini.ir.pytree import Ref


class Recorder(TorchFunctionMode):
    """Writes down what is done with some tensors, as it is done."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.tape = Tape(len(outputs), [Meta.of(tensor) for tensor in outputs])
        self.kept = list(outputs)
        self.numbers = {id(tensor): number for number, tensor in enumerate(outputs)}
        self.derived = set(self.numbers)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [tensor for _, tensor in tensors((args, kwargs))]
        result = func(*args, **kwargs)
        made = [tensor for _, tensor in tensors(result)] if result is not None else []
        if not any(id(tensor) in self.derived for tensor in given) or not (made or func is torch.Tensor.__setitem__):
            return result
        form = Encoder(self._resolve, lambda _: None)((args, kwargs))
        writes = None
        if func is torch.Tensor.__setitem__ or any(made and made[0] is tensor for tensor in given):
            writes = self.numbers[id(args[0])]
            made = [args[0]]
        self.tape.ops.append(Op(func, form, Region.current(), tuple(self._add(t) for t in made), writes))
        return result

    def _resolve(self, tensor: torch.Tensor) -> Ref:
        if id(tensor) not in self.numbers:
            number = self._add(tensor)
            self.derived.discard(id(tensor))
            self.tape.operands[number] = tensor
        return Ref(self.numbers[id(tensor)])

    def _add(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor)
        self.numbers[id(tensor)] = len(self.tape.metas)
        self.derived.add(id(tensor))
        self.tape.metas.append(Meta.of(tensor))
        return self.numbers[id(tensor)]


class Step:
    """One step of a model and a loss on one batch, whole and split."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], torch.Tensor], **kwargs: Any):
        self.model, self.inputs, self.kwargs = model, inputs, kwargs
        self.graph = capture(model, inputs, kwargs)
        self.forms = prove_graph(self.graph, inputs, kwargs)
        self.bound = bind(model, inputs, kwargs)
        outputs = run_graph(self.graph, self.bound, {})
        made = [outputs[ref] for ref in self.graph.outputs()]
        with Recorder(made) as recorder:
            result = loss(made[0] if len(made) == 1 else made)
        self.tape, self.loss = recorder.tape, result
        self.root = recorder.numbers[id(result)]
        self.splitting: Splitting = prove(self.forms, self.tape, self.root, self.graph.batch_size)

    @property
    def reason(self) -> str:
        return self.splitting.reason

    def whole(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.model.zero_grad()
        self.loss.backward(retain_graph=True)
        return self.loss.detach(), [p.grad for p in self.model.parameters()]

    def split(self, sizes: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        call = ModelCall(self.inputs, self.kwargs)
        node_weights, op_weights = self.splitting.weights(Precomputed(self.graph, self.bound, self.tape), sizes)
        self.model.zero_grad()
        total: Any = 0.0
        for at, (start, length) in enumerate(micro_batch_ranges(sizes)):
            given = [
                tensor if dim is None else tensor.narrow(dim, start, length)
                for tensor, dim in zip(call.tensors, self.splitting.inputs, strict=True)
            ]
            args, kwargs = call.arguments(given)
            bound = bind(self.model, args, kwargs)
            outputs = run_graph(self.graph, bound, {node: w[at] for node, w in node_weights.items()})
            operands = split_operands(self.tape, self.splitting, start, length, sum(sizes))
            weights = {op: w[at] for op, w in op_weights.items()}
            made = [outputs[ref] for ref in self.graph.outputs()]
            value = run_tape(self.tape, made, operands, self.splitting, length, weights)[self.root]
            value.backward(retain_graph=True)
            total = total + value.detach()
        return total, [p.grad for p in self.model.parameters()]

    def difference(self, sizes: list[int]) -> str:
        """Where whole and split differ; '' where they do not."""
        loss, grads = self.whole()
        grads = [None if g is None else g.clone() for g in grads]
        again, others = self.split(sizes)
        if not torch.allclose(loss, again, rtol=1e-9, atol=1e-10, equal_nan=True):
            return f"loss {loss} and {again}"
        for (name, _), a, b in zip(self.model.named_parameters(), grads, others, strict=True):
            if (a is None) != (b is None):
                a, b = (0 * b, b) if a is None else (a, 0 * a)
            if a is not None and not torch.allclose(a, b, rtol=1e-8, atol=1e-9, equal_nan=True):
                return f"gradient of {name} by {float((a - b).abs().max())}"
        return ""
