"""Sequences: recurrent networks, packing, attention, rotary positions, state spaces, encoder and decoder."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from conformance.zoo.registry import Made, classic


class LanguageModel(nn.Module):
    def __init__(self, kind: type = nn.LSTM, **options) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.rnn = kind(16, 16, num_layers=2, batch_first=True, **options)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens, state=None):
        out, state = self.rnn(self.embed(tokens), state)
        return self.head(self.norm(out)), state


@classic
def lstm() -> Made:
    return LanguageModel(dropout=0.1), (torch.randint(0, 40, (4, 7)),), {}


@classic
def gru() -> Made:
    return LanguageModel(nn.GRU), (torch.randint(0, 40, (4, 7)),), {"state": torch.zeros(2, 4, 16)}


class TimeMajor(nn.Module):
    """Batch in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rnn, self.mid, self.out = nn.Linear(5, 8), nn.LSTM(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden, _ = self.rnn(self.inp(x))
        return self.out(torch.relu(self.mid(hidden)))


@classic
def batch_in_dimension_one() -> Made:
    return TimeMajor(), (torch.randn(7, 4, 5),), {}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.rnn = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.mid = nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(torch.relu(self.mid(padded.mean(1))))


@classic
def packed_sequences() -> Made:
    return Packed(), (torch.randint(1, 30, (4, 6)), torch.tensor([6, 4, 6, 3])), {}


class PackedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, packed):
        _, last = self.rnn(packed)
        return self.head(last[0])


@classic
def packed_input() -> Made:
    sequences = [torch.randn(length, 4) for length in (5, 3, 2)]
    return PackedInput(), (nn.utils.rnn.pack_sequence(sequences),), {}


class Unrolled(nn.Module):
    """A recurrent cell in a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


@classic
def unrolled_cell() -> Made:
    return Unrolled(), (torch.randn(4, 5, 4),), {}


class Rotary(nn.Module):
    @torch.no_grad()
    def forward(self, positions, width):
        frequencies = 1.0 / (100.0 ** (torch.arange(0, width, 2).float() / width))
        angles = positions[:, None].float() * frequencies
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


class RotaryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (h * cos + torch.cat([-h[..., 4:], h[..., :4]], -1) * sin for h in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, 16))


class RotaryLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(40, 16), Rotary()
        self.layers = nn.ModuleList(RotaryAttention() for _ in range(4))
        self.head = nn.Linear(16, 40)

    def forward(self, tokens):
        cos, sin = self.rotary(torch.arange(tokens.size(1)), 8)
        x = self.embed(tokens) * math.sqrt(self.embed.embedding_dim)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(x)


@classic
def rotary_language_model() -> Made:
    return RotaryLM(), (torch.randint(0, 40, (4, 8)),), {}


class SelectiveScan(nn.Module):
    """A state-space layer with its scan in Python."""

    def __init__(self, width: int = 8, states: int = 4) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.log_a = nn.Parameter(torch.randn(width, states))
        self.dt, self.bc = nn.Linear(width, width), nn.Linear(width, 2 * states)

    def forward(self, x):
        u, gate = self.inp(x).chunk(2, -1)
        dt = F.softplus(self.dt(u))
        b, c = self.bc(u).chunk(2, -1)
        decay = torch.exp(-dt[..., None] * self.log_a.exp())
        state = torch.zeros(x.shape[0], u.shape[-1], b.shape[-1])
        outputs = []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + (dt * u)[:, step, :, None] * b[:, step, None, :]
            outputs.append((state * c[:, step, None, :]).sum(-1))
        return x + self.out(torch.stack(outputs, 1) * F.silu(gate))


@classic
def state_space() -> Made:
    return (
        nn.Sequential(nn.Linear(3, 8), *(SelectiveScan() for _ in range(4)), nn.Linear(8, 2)),
        (torch.randn(4, 6, 3),),
        {},
    )


@classic
def encoder_decoder() -> Made:
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    source, target = torch.randn(4, 6, 16), torch.randn(4, 5, 16)
    return model, (source, target), {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5)}


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.layers(x)[:, 0])


@classic
def vision_transformer() -> Made:
    return ViT(), (torch.randn(4, 3, 16, 16),), {}


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(1, 8, 1)
        self.layers = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(4))
        self.out = nn.Conv1d(8, 4, 1)

    def forward(self, x):
        x = self.inp(x)
        total = 0
        for layer in self.layers:
            a, b = layer(F.pad(x, (layer.dilation[0], 0))).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            x, total = x + y, total + y
        return self.out(F.relu(total))


@classic
def wavenet() -> Made:
    return WaveNet(), (torch.randn(4, 1, 20),), {}
