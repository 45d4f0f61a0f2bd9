"""Shape ops that move, join, repeat or cut dimensions; cutting or joining the batch dimension is refused."""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.batch_invariance import align_invariant
from gemini.batch_analysis.batch_kinds import Kind, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, SampleCount, TensorValue, UnknownNumber, axes, axis
from gemini.batch_analysis.rules.linear_ops import add_kinds
from gemini.batch_analysis.rules.registry import rule
from gemini.batch_analysis.rules.reshape import requested_sizes


def move_shard(kind: Shard, dim: int) -> Shard:
    """Return the same samples in another dimension."""
    return Shard(dim, kind.factor, kind.outer)


def first_or_partial(call: OpCall) -> tuple[TensorValue, Kind | None]:
    """Return the first tensor and, if it is a sum over the batch, its kind, which passes unchanged."""
    value = call.first
    call.only(value)
    return value, value.kind if value.is_sum else None


@rule("transpose", "t", "get_T", "get_mT", "get_H", "get_mH", "adjoint")
def transpose(call: OpCall) -> Kind:
    """Two dimensions are swapped."""
    value, through = first_or_partial(call)
    if through is not None:
        return through
    kind = call.sample(value)
    if call.name in ("t", "get_T", "get_H"):
        if call.name == "get_T" and value.rank != 2:
            return move_shard(kind, value.rank - 1 - kind.dim)
        pair: tuple[Any, ...] = (0, 1) if value.rank > 1 else (0, 0)
    elif call.name != "transpose":
        pair = (-2, -1)
    else:
        pair = (call.argument(1, "dim0", call.kwargs.get("axis0")), call.argument(2, "dim1", call.kwargs.get("axis1")))
    one, two = axis(pair[0], value.rank), axis(pair[1], value.rank)
    return move_shard(kind, {one: two, two: one}.get(kind.dim, kind.dim))


@rule("permute")
def permute(call: OpCall) -> Kind:
    """Dimensions in another order."""
    value, through = first_or_partial(call)
    if through is not None:
        return through
    dims = call.kwargs.get("dims", call.args[1:])
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    kind = call.sample(value)
    return move_shard(kind, [axis(dim, value.rank) for dim in dims].index(kind.dim))


@rule("movedim")
def movedim(call: OpCall) -> Kind:
    """Dimensions move to other positions, the rest stays in order."""
    value, through = first_or_partial(call)
    if through is not None:
        return through
    source, target = axes(call.argument(1, "source"), value.rank), axes(call.argument(2, "destination"), value.rank)
    rest = iter(dim for dim in range(value.rank) if dim not in source)
    order = [source[target.index(at)] if at in target else next(rest) for at in range(value.rank)]
    kind = call.sample(value)
    return move_shard(kind, order.index(kind.dim))


def _shard_outside(call: OpCall, dims: Any) -> Shard:
    """Return the shard, if none of these dimensions is the batch dimension."""
    value = call.first
    call.only(value)
    kind = call.sample(value)
    if kind.dim in axes(dims, value.rank):
        raise AnalysisRefused(f"{call.name} along the samples")
    return kind


@rule("flip", "roll", "rot90", "fliplr", "flipud")
def reorder(call: OpCall) -> Kind:
    """Reorder entries along dimensions that must be named."""
    if call.name == "flip":
        dims = call.kwargs.get("dims", call.args[1:])
        dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    elif call.name in ("fliplr", "flipud"):
        dims = (1,) if call.name == "fliplr" else (0,)
    else:
        call.constant(call.argument(1, "shifts"))
        dims = call.argument(2, "dims", (0, 1) if call.name == "rot90" else None)
    return _shard_outside(call, dims)


@rule("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk", counts=True)
def parts(call: OpCall) -> Kind:
    """Cut along a dimension; along the batch dimension, into groups of samples."""
    if (group := _group(call)) is not None:
        return group
    call.constant((*call.args[1:], *call.kwargs.values()))
    return _shard_outside(call, call.argument(2, "dim", 0))


def _group(call: OpCall) -> Shard | None:
    """Return the kind of a part that is a group of all samples: one of several concatenated batches."""
    value, given = (
        call.first,
        call.argument(1, "split_size" if "split_size" in call.kwargs else "split_size_or_sections"),
    )
    if not isinstance(value.kind, Shard) or axis(call.argument(2, "dim", 0), value.rank) != value.kind.dim:
        return None
    kind = value.kind
    whole = (
        isinstance(given, SampleCount)
        and given == kind.factor * call.samples
        and call.name in ("split", "unsafe_split")
    )
    return Shard(kind.dim, kind.factor) if whole and call.traced and len(call.results) == kind.outer else None


@rule("unbind", "select", "diagonal")
def drop_dim(call: OpCall) -> Kind:
    """A dimension is removed."""
    value, through = first_or_partial(call)
    if through is not None:
        return through
    if call.name == "diagonal":
        one, two = axis(call.argument(2, "dim1", 0), value.rank), axis(call.argument(3, "dim2", 1), value.rank)
        kind = _shard_outside(call, (one, two))
        return move_shard(kind, kind.dim - sum(1 for dim in (one, two) if dim < kind.dim))
    dim = axis(call.argument(1, "dim", 0), value.rank)
    kind = _shard_outside(call, dim)
    return move_shard(kind, kind.dim - (dim < kind.dim))


@rule("diag_embed")
def diag_embed(call: OpCall) -> Kind:
    """The last dimension becomes two at the end."""
    if len(call.args) > 1 or call.kwargs:
        raise AnalysisRefused("diag_embed with options")
    return _shard_outside(call, -1)


@rule("narrow", counts=True)
def narrow(call: OpCall) -> Kind:
    """Some entries of a dimension."""
    call.constant((call.argument(2, "start"), call.argument(3, "length")))
    return _shard_outside(call, call.argument(1, "dim"))


@rule("unfold")
def unfold(call: OpCall) -> Kind:
    """Windows along a dimension (a method of Tensor), or the patches of images (a function)."""
    value = call.first
    kind = call.sample(value)
    if "dimension" not in call.kwargs and (len(call.args) < 4 or isinstance(call.args[1], (tuple, list))):
        if kind.dim == 0 and value.rank == 4:
            return kind
        raise AnalysisRefused("unfold of images whose first dimension is not the samples")
    return _shard_outside(call, call.argument(1, "dimension"))


@rule("tril", "triu")
def triangle(call: OpCall) -> Kind:
    """Of the last two dimensions."""
    call.constant(call.argument(1, "diagonal", 0))
    return _shard_outside(call, (-2, -1))


@rule("pad", "constant_pad_nd")
def pad(call: OpCall) -> Kind:
    """Pairs of sizes for the last dimensions."""
    value, widths = call.first, call.argument(1, "pad")
    call.constant((widths, call.argument(3, "value")))
    touched = [value.rank - 1 - at for at in range(len(widths) // 2) if widths[2 * at] or widths[2 * at + 1]]
    return _shard_outside(call, tuple(touched)) if touched else call.sample(value)


@rule("cat", "stack", "hstack", "vstack", "dstack", "column_stack")
def concatenate(call: OpCall) -> Kind:
    """Tensors side by side, or on top of each other; constants among them have no place for samples."""
    listed = [part for part in call.argument(0, "tensors") if isinstance(part, TensorValue)]
    if any(value.is_sum for value in listed):
        return add_kinds(call, listed)
    if call.name not in ("cat", "stack"):
        raise AnalysisRefused(f"{call.name} of samples")
    real = align_invariant([value for value in listed if call.name == "stack" or value.shape != (0,)])
    kinds = {value.kind for value in real if not value.is_constant}
    if call.name == "cat" and (behind := _one_behind_another(call, real)) is not None:
        return behind
    if len(kinds) != 1:
        raise AnalysisRefused(f"{call.name} of samples in different dimensions")
    kind = call.sample(next(value for value in real if not value.is_constant))
    for value in real:
        if value.is_constant:
            call.must_be(value, kind)
    rank = real[0].rank
    dim = axis(call.argument(1, "dim", call.kwargs.get("axis", 0)), rank + (call.name == "stack"))
    if call.name == "stack":
        return move_shard(kind, kind.dim + (dim <= kind.dim))
    if dim == kind.dim:
        raise AnalysisRefused("cat of one batch after another: their samples would not be contiguous")
    return kind


def _one_behind_another(call: OpCall, parts: list[TensorValue]) -> Kind | None:
    """Handle `cat` along the samples: each batch is a group, if all have equally many entries per sample."""
    if any(not isinstance(part.kind, Shard) for part in parts):
        return None
    kinds = [call.sample(part) for part in parts]
    dim = axis(call.argument(1, "dim", call.kwargs.get("axis", 0)), parts[0].rank)
    if {(kind.dim, kind.factor) for kind in kinds} != {(dim, kinds[0].factor)}:
        return None
    return Shard(dim, kinds[0].factor, sum(kind.outer for kind in kinds))


@rule("repeat", "tile", counts=True)
def repeat(call: OpCall) -> Kind:
    """Repeat all entries along every dimension; a constant may be repeated once per sample."""
    value, given = call.first, [size for _, size in requested_sizes(call)]
    if value.is_sum:
        raise AnalysisRefused(f"{call.name} of a sum over the batch")
    rank = len(call.out().shape)
    times = [1] * (rank - len(given)) + given
    counted = [at for at, size in enumerate(times) if isinstance(size, SampleCount)]
    if any(isinstance(size, UnknownNumber) for size in times):
        raise AnalysisRefused(f"{call.name} by a number that depends on the number of samples")
    if value.is_constant:
        (dim,) = counted
        per = times[dim] // call.samples
        own = dim - (rank - value.rank)
        return Shard(dim, per * (value.shape[own] if own >= 0 else 1))
    kind = move_shard(call.sample(value), call.sample(value).dim + rank - value.rank)
    if counted:
        raise AnalysisRefused(f"{call.name} of samples by their number")
    return Shard(kind.dim, kind.factor, kind.outer * times[kind.dim])


@rule("repeat_interleave", counts=True)
def repeat_interleave(call: OpCall) -> Kind:
    """Repeat every entry several times in a row; a constant of one entry, once per sample."""
    value, times, dim = call.first, call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(times, int) or dim is None:
        raise AnalysisRefused("repeat_interleave by a tensor, or of all entries")
    dim = axis(dim, value.rank)
    if value.is_constant and isinstance(times, SampleCount) and value.shape[dim] == 1:
        return Shard(dim, times // call.samples)
    kind = call.sample(value)
    if isinstance(times, SampleCount):
        raise AnalysisRefused("repeat_interleave of samples by their number")
    return Shard(dim, kind.factor * times, kind.outer) if kind.dim == dim else kind
