"""Layers as functions: norms, attention, pooling, recurrent layers, sampling of images."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.batch_analysis.batch_kinds import Kind, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.rules.pointwise import broadcast_kinds
from gemini.batch_analysis.rules.registry import rule
from gemini.batch_analysis.rules.reshape import resize
from gemini.batch_analysis.rules.shape_ops import move_shard


@rule("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(call: OpCall) -> Kind:
    """Over the last dimensions."""
    value = call.first
    call.only(value)
    kind = call.sample(value)
    shape = call.argument(1, "normalized_shape")
    call.constant(shape)
    if kind.dim >= value.rank - len(shape):
        raise AnalysisRefused(f"{call.name} over the samples of the batch")
    return kind


@rule("group_norm", "instance_norm", "local_response_norm")
def group_norm(call: OpCall) -> Kind:
    """Samples first, then channels; a sample at a time."""
    value = call.first
    call.only(value)
    if call.name == "instance_norm" and call.argument(1, "running_mean") is not None:
        raise AnalysisRefused("instance_norm with running statistics of the batch")
    kind = call.sample(value)
    if kind.dim != 0:
        raise AnalysisRefused(f"{call.name} whose first dimension is not the samples")
    return kind


@rule("batch_norm")
def batch_norm(call: OpCall) -> Kind:
    """By running statistics only; in training those of the batch are used."""
    value = call.first
    call.only(value)
    if call.argument(5, "training", False) is not False:
        raise AnalysisRefused("batch normalization in training takes statistics over the batch")
    kind = call.sample(value)
    if kind.dim == 1:
        raise AnalysisRefused("batch_norm whose channels are the samples")
    return kind


@rule("scaled_dot_product_attention")
def attention(call: OpCall) -> Kind:
    """Queries, keys, values (…, length, width): samples are among the first dimensions of all three."""
    names = ("query", "key", "value")
    three = [call.argument(at, name) for at, name in enumerate(names)]
    mask = call.argument(3, "attn_mask")
    rank = max(one.rank for one in three)
    kind = broadcast_kinds(call, three, rank) if not _all_constant(three) else Replicate()
    if isinstance(mask, TensorValue):
        if isinstance(kind, Replicate):
            return _first_two(call, broadcast_kinds(call, [mask], rank), rank)
        both = broadcast_kinds(call, [_pad_mask(mask), *[_lead(one) for one in three]], rank)
        kind = both
    return _first_two(call, kind, rank)


def _all_constant(values: list[TensorValue]) -> bool:
    return all(value.is_constant for value in values)


def _lead(value: TensorValue) -> TensorValue:
    """A tensor whose last two sizes do not matter for broadcasting."""
    return TensorValue(value.key, value.kind, (*value.shape[:-2], 1, 1), value.dtype, operand=value.operand)


def _pad_mask(mask: TensorValue) -> TensorValue:
    kind = mask.kind
    if isinstance(kind, Shard) and kind.dim >= mask.rank - 2:
        raise AnalysisRefused("an attention mask between samples")
    return _lead(mask) if mask.rank >= 2 else mask


def _first_two(call: OpCall, kind: Kind, rank: int) -> Kind:
    if isinstance(kind, Shard) and kind.dim >= rank - 2:
        raise AnalysisRefused(f"{call.name} between samples of the batch")
    return kind


@rule("multi_head_attention_forward")
def multi_head_attention(call: OpCall) -> Sequence[Kind]:
    """(length, samples, width), as `nn.MultiheadAttention` calls it."""
    query, key, value = (call.argument(at, name) for at, name in enumerate(("query", "key", "value")))
    masks = [call.kwargs.get("key_padding_mask"), call.kwargs.get("attn_mask")]
    kind = Shard(1)
    for one in (query, key, value):
        if one.rank != 3:
            raise AnalysisRefused("attention without a batch dimension")
        call.must_be(one, kind)
    if isinstance(masks[0], TensorValue):
        call.must_be(masks[0], Shard(0))
    if isinstance(masks[1], TensorValue) and not masks[1].is_constant:
        heads = call.argument(4, "num_heads")
        call.must_be(masks[1], Shard(0, heads))
    allowed = [one for one in (query, key, value, *masks) if isinstance(one, TensorValue)]
    call.only(*allowed)
    return [kind, Shard(0)][: len(call.results)]


@rule("linalg_solve_triangular", "linalg_solve", "linalg_lstsq")
def solve(call: OpCall) -> Kind:
    """Matrices (…, n, n) and right sides (…, n, k), each for itself."""
    left, right = call.first, call.argument(1, "B")
    if left.rank != right.rank:
        raise AnalysisRefused(f"{call.name} of different ranks")
    return _first_two(call, broadcast_kinds(call, [_lead(left), _lead(right)], left.rank), left.rank)


_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


@rule(*[f"{kind}{n}" for n in _SPATIAL for kind in (
    "max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool", "max_unpool", "fractional_max_pool",
)], "max_pool1d_with_indices", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_max_pool2d_with_indices",
    "adaptive_max_pool1d_with_indices", "max_pool3d_with_indices")  # fmt: skip
def pool(call: OpCall) -> Kind:
    """Over the last dimensions; everything before is a batch."""
    value = call.first
    call.only(value)
    spatial = next(n for name, n in _SPATIAL.items() if name in call.name)
    kind = call.sample(value)
    if kind.dim >= value.rank - spatial:
        raise AnalysisRefused(f"{call.name} over the samples of the batch")
    return kind


@rule("interpolate", "upsample", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "fold", "upsample_nearest2d",
      "upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest1d", "upsample_linear1d")  # fmt: skip
def images(call: OpCall) -> Kind:
    """Samples first, then channels and places."""
    value = call.first
    call.only(value)
    kind = call.sample(value)
    if kind.dim != 0 or value.rank < 3:
        raise AnalysisRefused(f"{call.name} whose first dimension is not the samples")
    return kind


@rule("grid_sample", "grid_sampler")
def grid_sample(call: OpCall) -> Kind:
    """Handle images and sampling places, both by sample, or one image for all and the places of all samples in it."""
    value, grid = call.first, call.argument(1, "grid")
    places = grid.kind
    if value.is_constant and isinstance(places, Shard) and 0 < places.dim < grid.rank - 1:
        return move_shard(places, places.dim + 1)
    for one, other in ((value, grid), (grid, value)):
        if isinstance(one.kind, Shard):
            if one.kind.dim != 0:
                raise AnalysisRefused("grid_sample whose first dimension is not the samples")
            call.must_be(other, one.kind)
    return value.kind


@rule("affine_grid", "affine_grid_generator", counts=True)
def affine_grid(call: OpCall) -> Kind:
    """Handle `(theta, size)`: places by sample; the size holds the number of samples and the size of their images."""
    theta, size = call.first, call.argument(1, "size")
    kind = call.sample(theta)
    if kind.dim != 0 or not isinstance(size, (tuple, list)):
        raise AnalysisRefused(f"{call.name} whose first dimension is not the samples")
    place = (0, 1) if len(call.args) > 1 else (1, [*call.kwargs].index("size"))
    resize(call, [((*place, at), one) for at, one in enumerate(size)], 0, kind.entries)
    return kind


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: OpCall) -> list[Kind]:
    """`(input, states, weights, bias, layers, dropout, train, bidirectional, batch_first)`.

    States are (layers, samples, width).
    """
    if len(call.args) < 9 or not isinstance(call.args[2], (list, tuple)):
        raise AnalysisRefused(f"{call.name} of packed sequences")
    value, states, batch_first = call.args[0], call.args[1], call.args[8]
    if value.rank != 3:
        raise AnalysisRefused(f"{call.name} without a batch dimension")
    expected = Shard(0 if batch_first else 1)
    call.must_be(value, expected)
    for state in states if isinstance(states, (list, tuple)) else (states,):
        call.must_be(state, Shard(1))
    call.constant(call.args[2])
    return [expected, *[Shard(1)] * (len(call.results) - 1)]


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: OpCall) -> Kind:
    """One step of rows, of which every sample may have several."""
    states = call.args[1] if isinstance(call.args[1], (list, tuple)) else (call.args[1],)
    rows = (call.args[0], *states)
    kind = next((one.kind for one in rows if isinstance(one.kind, Shard)), Shard(0))
    if kind.dim != 0:
        raise AnalysisRefused(f"{call.name} over the samples of the batch")
    for one in rows:
        call.must_be(one, kind)
    call.constant(call.args[2:])
    return kind


@rule("embedding_bag")
def embedding_bag(call: OpCall) -> list[Kind]:
    """Bags as rows of indices."""
    index = call.argument(0, "input")
    if index.rank != 2 or call.argument(2, "offsets") is not None:
        raise AnalysisRefused("embedding_bag by offsets")
    if call.argument(3, "max_norm") is not None:
        raise AnalysisRefused("an embedding that renormalizes its table as it reads")
    if call.argument(5, "scale_grad_by_freq", False) is True:
        raise AnalysisRefused("an embedding whose gradients depend on how often a row occurs in the batch")
    kind, weights = call.sample(index), call.argument(8, "per_sample_weights")
    if kind.dim != 0 or (weights is not None and weights.kind != kind):
        raise AnalysisRefused("embedding_bag over the samples")
    call.only(index, weights)
    return [kind] * len(call.results)


@rule("stft", "istft")
def stft(call: OpCall) -> Kind:
    """Signals (samples, time)."""
    value = call.first
    call.only(value)
    kind = call.sample(value)
    if kind.dim != 0 or value.rank < 2:
        raise AnalysisRefused(f"{call.name} over the samples")
    return kind
