"""Predicted against measured steps of transformers on one GPU, by the preset of its class and after calibration.

    python benchmarks/bench_calibration.py h200

Prints the calibrated efficiencies, then per model the measured step and the errors of time and memory.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.cluster import load_cluster
from gemini.tune import ParallelConfig, Transformer, TransformerCosts, simulate
from gemini.tune.device_calibration import calibrate_device

# layers, hidden, ffn, vocabulary, tokens, batch, recompute
MODELS = (
    (16, 2048, 5632, 32000, 2048, 8, False),
    (16, 2048, 5632, 32000, 2048, 16, True),
    (8, 4096, 14336, 32000, 4096, 4, False),
    (24, 1024, 2816, 50304, 1024, 32, False),
    (8, 4096, 14336, 32000, 16384, 1, True),
)
STEPS = 9


class Layer(nn.Module):
    """A layer as in Llama, without rotary embeddings."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the gated MLP."""
        batch, tokens, hidden = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, hidden // self.heads)
        seen = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, hidden))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def measure(  # noqa: PLR0917
    layers: int, hidden: int, ffn: int, vocab: int, tokens: int, batch: int, recompute: bool
) -> float:
    """Return the median seconds of a step in 16 bits."""
    parts = [nn.Embedding(vocab, hidden), *(Layer(hidden, hidden // 128, ffn) for _ in range(layers))]
    model = nn.ModuleList([*parts, nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)]).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch_of = torch.randint(vocab, (batch, tokens), device="cuda")
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad()
        value = batch_of
        for part in model:
            again = recompute and isinstance(part, Layer)
            value = checkpoint(part, value, use_reentrant=False) if again else part(value)
        F.cross_entropy(value.view(-1, vocab).float(), batch_of.view(-1)).backward()
        del value
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[STEPS // 2]


def main() -> None:
    """Calibrate and compare."""
    preset = load_cluster(sys.argv[1]).resized(1)
    calibrated = preset.with_device(calibrate_device(preset.device))
    print({name: value for name, value in calibrated.device.to_dict().items() if isinstance(value, float)})
    for layers, hidden, ffn, vocab, tokens, batch, recompute in MODELS:
        torch.cuda.reset_peak_memory_stats()
        seconds, held = measure(layers, hidden, ffn, vocab, tokens, batch, recompute), torch.cuda.max_memory_allocated()
        model = Transformer(layers, hidden, hidden // 128, vocab, tokens, ffn=ffn, gated=True)
        config = ParallelConfig(
            devices=1, batch=batch, micro_batch=batch, recompute="full" if recompute else "none", kernels="eager",
            pure_bf16=True,
        )  # fmt: skip
        first, second = (simulate(TransformerCosts(model), one, config) for one in (preset, calibrated))
        print(
            f"{layers} × {hidden}, {batch} × {tokens} tokens, {config.recompute}: {seconds * 1e3:.0f} ms, "
            f"preset {first.seconds / seconds - 1:+.1%}, calibrated {second.seconds / seconds - 1:+.1%}, "
            f"memory {held / 2**30:.1f} GiB, {first.memory.total / held - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
