"""The rule of every op, with samples in each dimension, agrees with computed values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gemini.batch_analysis.batch_kinds import Partial, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.loss_analysis import _op_step, _source_step
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.batch_analysis.reference_run import micro_batch_ranges, run_tape
from gemini.batch_analysis.split_result import Splitting
from tests.batch_analysis.recorder import Recorder

N, A, B = 5, 4, 6
W = torch.randn(B, B, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OPS = """
x.abs() | x + 1 | 2 - x | x * x | x / 3 | -x | x ** 2 | x.clamp(0) | x.relu() | F.gelu(x) | x > 0 | x.float()
x.long() | x.sum() | x.mean() | x.sum(0) | x.sum(1) | x.sum(-1) | x.mean(0) | x.mean((0, 1))
x.mean(1, keepdim=True) | x.sum((1, 2)) | x.max() | x.amax(0) | x.amax(1) | x.max(-1).values | x.max(0).indices
x.argmax(1) | x.logsumexp(2) | x.logsumexp(0) | x.var(0) | x.var(1) | x.std() | x.norm() | x.norm(dim=1)
x.norm(p=1, dim=(0, 2)) | x.prod(1) | (x > 0).any(0) | (x > 0).all(2) | torch.linalg.vector_norm(x, dim=0)
torch.linalg.norm(x, dim=-1) | x.median(1).values | x.count_nonzero() | x.nansum(0)
x.t() if x.dim() == 2 else x.mT | x.transpose(0, 1) | x.transpose(1, -1) | x.permute(2, 0, 1) | x.movedim(0, -1)
x.movedim((0, 1), (1, 2)) | x.flip(0) | x.flip(2) | x.roll(1, 1) | x.roll(1) | x.flatten() | x.flatten(1)
x.flatten(0, 1) | x.reshape(-1) | x.reshape(x.shape[0], -1) | x.reshape(-1, x.shape[2])
x.view(x.shape[0] * x.shape[1], x.shape[2]) | x.reshape(x.shape[0], x.shape[1] * x.shape[2])
x.permute(1, 0, 2).reshape(-1, x.shape[2]) | x.permute(2, 1, 0).reshape(-1)
x.reshape(x.shape[1], x.shape[0], x.shape[2]) | x.reshape(-1, 2) if x.numel() % 2 == 0 else x
x.unflatten(-1, (2, -1)) if x.shape[-1] % 2 == 0 else x | x.unsqueeze(0) | x.unsqueeze(-1)
x.unsqueeze(1).squeeze(1) | x[None] | x[..., None] | x[:, None] | x[0] | x[:, 0] | x[..., 0] | x[:, 1:] | x[1:]
x[..., :-1] | x[:, [0, 2]] | x[[0, 1]] | x[..., [1]] | x[::2] | x[:, ::2] | x[:, torch.tensor([0, 1])]
x[torch.tensor([1, 0])] | x[:, :, torch.tensor([[0, 1], [1, 2]])] | x[:, torch.tensor([0, 1]), torch.tensor([1, 1])]
x[0, torch.tensor([0, 1])] | x.select(1, 0) | x.narrow(2, 0, 2) | x.narrow(0, 1, 2) | x.chunk(2, 1)[0]
x.chunk(2, 2)[1] | x.split(2, 0)[0] | x.unbind(1)[0] | x.unbind(0)[0] | torch.cat([x, x], 0) | torch.cat([x, x], 1)
torch.cat([x, 2 * x], -1) | torch.stack([x, x]) | torch.stack([x, x], 2) | torch.stack([x, x], -1)
x.repeat(2, 1, 1) | x.repeat(1, 2, 1) | x.repeat(1, 1, 1, 2) | x.repeat_interleave(2, 0) | x.repeat_interleave(3, 2)
x.expand(2, *x.shape) | x[:, :1].expand(-1, 3, -1) | x[:, :1].expand(x.shape[0], 3, x.shape[2]) | F.pad(x, (1, 0))
F.pad(x, (0, 0, 1, 1)) | F.pad(x, (0, 0, 0, 0, 1, 0)) | x.softmax(0) | x.softmax(1) | x.softmax(-1)
x.log_softmax(2) | x.cumsum(0) | x.cumsum(1) | x.cumsum(2) | x.sort(0).values | x.sort(-1).values | x.argsort(1)
x.topk(2).values | x.topk(2, 0).values | x.diff() | F.normalize(x) | F.normalize(x, dim=-1) | x.tril() | x.triu(1)
F.glu(x) if x.shape[-1] % 2 == 0 else x | x @ x.mT | x.mT @ x | torch.bmm(x, x.transpose(1, 2))
torch.einsum("abc,abd->acd", x, x) | torch.einsum("abc,abc->b", x, x) | torch.einsum("abc,dbc->ad", x, x)
torch.einsum("...c,...c->...", x, x) | torch.einsum("abc->cab", x) | torch.einsum("abc->a", x)
torch.baddbmm(x @ x.mT, x, x.mT) | x @ x[0].T | F.linear(x, W[:, : x.shape[-1]]) | x @ W[: x.shape[-1]]
torch.cdist(x, x) | F.layer_norm(x, x.shape[-1:]) | F.layer_norm(x, x.shape[1:]) | F.rms_norm(x, x.shape[-1:])
F.group_norm(x, 1) | F.instance_norm(x) | F.batch_norm(x, None, None, training=True)
F.conv1d(x, W[None, : x.shape[1], :2].mT.reshape(2, 1, -1).transpose(1, 2).reshape(2, -1, 1)) | F.max_pool1d(x, 2)
F.avg_pool1d(x, 2) | F.adaptive_avg_pool1d(x, 2) | F.interpolate(x, scale_factor=2.0) | F.unfold(x[:, None], 2)
F.scaled_dot_product_attention(x, x, x)
F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1]).tril().bool())
x.unfold(1, 2, 1) | x.unfold(0, 2, 1) | torch.where(x > 0, x, -x) | torch.maximum(x, x.flip(1))
x.masked_fill(x > 0, 1.0) | x.gather(1, (x > 0).long()) | x.gather(0, (x > 0).long())
W.flatten().gather(-1, (x[:, 0, 0] > 0).long()) | W.gather(0, (x[:, 0, :2] > 0).long())
x.scatter(1, (x > 0).long(), 0.5) | x.scatter_add(2, (x > 0).long(), x) | x.index_select(1, torch.tensor([0, 1]))
x.index_select(0, torch.tensor([0])) | torch.take_along_dim(x, x.argsort(1), 1) | F.one_hot((x > 0).long(), 2)
F.grid_sample(W[None, None], x[None, ..., :2].tanh(), align_corners=False)
F.embedding((x > 0).long(), W) | W[(x > 0).long()] | x.diagonal(dim1=1, dim2=2)
F.cosine_similarity(x, 2 * x + 1, dim=-1) | F.cosine_similarity(x, x, dim=0) | F.pairwise_distance(x, x + 1)
x.clone().fill_(2.0) | torch.zeros_like(x) | torch.fft.rfft(x).real | torch.fft.fft(x, dim=0).real
torch.fft.fft2(x).real | x.mT.contiguous().view(-1) | x.type_as(W) | x.double().detach()
torch.linalg.matrix_norm(x) | torch.matrix_exp(x[:, :2, :2])
torch.linalg.solve(torch.eye(2).double() + x[:, :2, :2].square(), x[:, :2, :2]) | x.bmm(x.mT).softmax(-1).bmm(x)
torch.logaddexp(x, x) | torch.addcmul(x, x, x) | torch.lerp(x, 2 * x, 0.5) | torch.std_mean(x, 1) | x.aminmax(dim=1)
F.mse_loss(x, 2 * x) | F.mse_loss(x, 2 * x, reduction="sum") | F.l1_loss(x, 2 * x, reduction="none")
F.kl_div(x, x.exp(), reduction="batchmean") | F.cross_entropy(x, (x[:, 0] > 0).long(), reduction="sum")
F.cross_entropy(x, (x[:, 0] > 0).long(), reduction="none") | F.cross_entropy(x, x.softmax(1))
F.nll_loss(x, (x[:, 0] > 0).long(), reduction="sum") | F.binary_cross_entropy_with_logits(x, x.sigmoid())
F.triplet_margin_loss(x[:, 0], x[:, 1], -x[:, 0]) | F.multilabel_soft_margin_loss(x[:, 0], x[:, 0].sigmoid())
F.huber_loss(x, x + 1, reduction="none").sum(1) | torch.dist(x, x + 1) | x.trace() if x.dim() == 2 else x
x.sum() + x.mean() | x.sum() * 3 - x.sum() / 2 | x.mean() + 1 | x.sum() + 1 | torch.stack([x.sum(), x.mean()])
x.mean() * x | x.sum().sqrt()
""".replace("\n", " | ").split(" | ")  # fmt: skip
TEXTS = [text.strip() for text in OPS if text.strip()]
seen = {"Shard": 0, "Partial": 0, "WeightedPartial": 0, "Replicate": 0, "Opaque": 0}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("text", TEXTS)
def test_the_kind_of_a_result_is_what_it_is(text, dim):
    shape = [A, A, B]
    shape[dim] = N
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with Recorder([x]) as recorder:
        try:
            eval(text, {"x": x, "F": F, "torch": torch, "W": W})
        except (RuntimeError, IndexError, ValueError):
            return
    tape = recorder.tape
    interpreter = KindInterpreter(key=lambda ref: ("tape", ref.node))
    first = _source_step(tape.metas[0], 0, N, lambda *_: Shard(dim))
    first.known = False
    interpreter.extend([first, *(_operand(tape, number) for number in tape.operands)])
    interpreter.extend([_op_step(at, op, tape, N) for at, op in enumerate(tape.ops)])
    flagged = {index[1]: share for index, share in interpreter.shares.items() if isinstance(index, tuple)}
    sizes = {index[1]: found for index, found in interpreter.sizes.items() if isinstance(index, tuple)}
    splitting = Splitting(op_shares=flagged, sizes=sizes)
    kinds = {number: interpreter.values["tape", number].kind for number in range(len(tape.metas))}
    whole = run_tape(tape, [x], tape.operands)
    for lengths in ([2, 3], [1, 1, 3]):
        weights = {at: share.weights(None, lengths) for at, share in flagged.items()}
        _compare(tape, splitting, kinds, whole, (x, dim), lengths, weights)


def test_entries_of_a_table_by_numbers_of_samples_are_of_samples():
    x, table = torch.randn(N, A), torch.arange(9.0)
    with Recorder([x]) as recorder:
        table.gather(-1, (x[:, 0] > 0).long())
    tape = recorder.tape
    interpreter = KindInterpreter(key=lambda ref: ("tape", ref.node))
    first = _source_step(tape.metas[0], 0, N, lambda *_: Shard(0))
    first.known = False
    interpreter.extend([first, *(_operand(tape, number) for number in tape.operands)])
    interpreter.extend([_op_step(at, op, tape, N) for at, op in enumerate(tape.ops)])
    assert interpreter.values["tape", len(tape.metas) - 1].kind == Shard(0)


def _operand(tape, number):
    from gemini.batch_analysis.loss_tape import Meta

    made = _source_step(Meta.of(tape.operands[number]), number, N, lambda at, s: at.decisions.get(s.index, Replicate()))
    made.known, made.name = True, "operand"
    return made


def _compare(tape, splitting, kinds, whole, given, lengths, weights):  # noqa: PLR0917
    x, dim = given
    needed = [number for number in range(len(tape.metas)) if type(kinds[number]).__name__ != "Opaque"]
    parts = []
    for index, (start, length) in enumerate(micro_batch_ranges(lengths)):
        operands = {
            number: kinds[number].take(tensor, start, length, N) if isinstance(kinds[number], Shard) else tensor
            for number, tensor in tape.operands.items()
        }
        factors = {at: weight[index] for at, weight in weights.items()}
        try:
            parts.append(
                run_tape(tape, [x.narrow(dim, start, length).contiguous()], operands, splitting, length, factors)
            )
        except (RuntimeError, IndexError, ValueError):
            assert len(needed) <= len(tape.metas) - 1, "a proven op failed on a micro-batch"
            return
    for number in needed:
        kind, values = kinds[number], [part[number] for part in parts]
        seen[type(kind).__name__] = seen.get(type(kind).__name__, 0) + 1
        if isinstance(kind, Shard):
            joined = kind.join(values)
        elif isinstance(kind, Partial):
            joined = torch.stack(values).sum(0)
        elif isinstance(kind, WeightedPartial):
            shares = kind.share.weights(None, lengths)
            joined = torch.stack([value * share for value, share in zip(values, shares, strict=True)]).sum(0)
        elif isinstance(kind, Replicate):
            joined = values[0]
        else:
            continue
        assert torch.allclose(joined.double(), whole[number].double(), rtol=1e-9, atol=1e-9), (kind, number)


def test_enough_was_compared():
    total = sum(seen.values())
    if total > 300:  # most of the above ran in this process
        assert seen["Shard"] > total / 2
        assert seen["Partial"] > total / 50
        assert seen["WeightedPartial"] > total / 150
