"""Build a step request from a recorded call, its loss tape and the proof that it splits.

call ──► inputs by port          tape ──► ops that root and kept values need, operands, shares
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gemini.batch_analysis.batch_kinds import SampleIndices, Shard
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.precompute import Precomputed
from gemini.batch_analysis.split_result import Splitting
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.pytree import Ref, leaves
from gemini.pipe.value_routes import CallerSide
from gemini.runtime.pipelined.step_request import StepRequest, WholeTensor, bind_inputs
from gemini.runtime.pool.worker_handle import InternalFault
from gemini.step.worker_program import Loss

if TYPE_CHECKING:
    from gemini.ir.autograd_modes import Region
    from gemini.pipe.piped_model import Piped


def step_of(  # noqa: PLR0917
    piped: Piped,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    tape: Tape,
    root: int | None,
    splitting: Splitting,
    sizes: Sequence[int],
    *,
    region: Region,
    keep: Iterable[int] = (),
    generator: bytes = b"",
) -> tuple[StepRequest, dict[int, str]]:
    """The request, and the names of kept values in `StepResult.outputs`, by their number on the tape.

    Without a root the step is an evaluation: only outputs of the model can be kept.
    """
    args, kwargs = call
    bound = bind(piped.model, args, kwargs)
    dims = {id(one): dim for one, dim in zip(ModelCall(args, kwargs).tensors, splitting.inputs, strict=True)}
    ports, operands = _values(piped, bound, tape, splitting)
    of_nodes, of_ops = splitting.weights(Precomputed(piped.graph, bound, tape, piped.model), sizes)
    kept = tuple(dict.fromkeys(keep))
    names = {number: ports.get(number, f"#{number}") for number in kept}
    request = StepRequest(
        bind_inputs(piped.routes, piped.model, bound, dims, sizes), tuple(sizes), region,
        keep=tuple(ports[number] for number in kept if number in ports), generator=generator,
    )  # fmt: skip
    if of_nodes:
        request.shares = [[of_nodes[node][mid] for node in sorted(of_nodes)] for mid in range(len(sizes))]
    if root is not None:
        inner = tuple(number for number in kept if number not in ports)
        needed = sorted({at for value in (root, *inner) for at in tape.ops_needed_for(value)})
        place = {at: index for index, at in enumerate(needed)}
        ops = tuple(tape.ops[at] for at in needed)
        read = {root, *inner, *(one for op in ops for one in op.reads())}
        given = tuple(number for number in operands if number in read)
        counted = {place[at]: found for at, found in splitting.sizes.items() if at in place}
        request.loss = Loss(ops, {n: p for n, p in ports.items() if n in read}, given, root, inner, counted)
        request.operands = {number: operands[number] for number in given}
        request.op_shares = {place[at]: each for at, each in of_ops.items() if at in place}
    return request, names


def _values(
    piped: Piped, bound: dict[str, Any], tape: Tape, splitting: Splitting
) -> tuple[dict[int, str], dict[int, WholeTensor]]:
    """The outputs of stages by number, and all other values that the tape begins with: arguments that the model
    returns as they are, tensors that it holds, operands."""
    caller = CallerSide(piped.routes, piped.model, bound)
    ports: dict[int, str] = {}
    operands: dict[int, WholeTensor] = {}
    for number, ref in enumerate(_outputs(piped, tape)):
        port = piped.routes.results.get(ref)
        if port is not None:
            ports[number] = port.name
        else:
            operands[number] = WholeTensor(caller.read(ref), _layout(splitting, number))
    operands.update(
        {number: WholeTensor(tensor, _layout(splitting, number)) for number, tensor in tape.operands.items()}
    )
    return ports, operands


def _outputs(piped: Piped, tape: Tape) -> list[Ref]:
    """The values of the graph that the tape begins with: each once, or as often as the output has them."""
    once = piped.graph.outputs()
    every = [leaf for leaf in leaves(piped.graph.result) if isinstance(leaf, Ref)]
    for found in (once, every):
        if len(found) == tape.outputs:
            return found
    raise InternalFault(f"the model returned {tape.outputs} tensors, its graph has {len(once)}")


def _layout(splitting: Splitting, number: int) -> Shard | SampleIndices | None:
    kind = splitting.outputs[number] if number < len(splitting.outputs) else None
    return kind if isinstance(kind, (Shard, SampleIndices)) else None
