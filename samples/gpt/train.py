"""Train a small GPT on the letters of a text; stop and resume at any step."""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters, context, width, depth, heads, *, dropout=0.1):
        super().__init__()
        self.context = context
        self.letters = nn.Embedding(letters, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.letters.weight  # tied
        self.apply(self._start)

    def _start(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids, targets=None):
        x = self.letters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(self, ids, count):
        for _ in range(count):
            logits, _ = self(ids[:, -self.context :])
            ids = torch.cat([ids, torch.multinomial(logits[:, -1].softmax(-1), 1)], dim=1)
        return ids


def batch_of(data, size, context):
    starts = torch.randint(len(data) - context - 1, (size,)).tolist()
    x = torch.stack([data[i : i + context] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + context] for i in starts])
    return x, y


def rate(step, args):
    """Warm-up, then half a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.total - args.warmup))))


@torch.no_grad()
def evaluate(model, data, args):
    model.eval()
    chance = torch.get_rng_state()
    torch.manual_seed(1)
    losses = [model(*batch_of(data, args.batch_size, args.context))[1].item() for _ in range(4)]
    torch.set_rng_state(chance)
    model.train()
    return sum(losses) / len(losses)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("text.txt"))
    parser.add_argument("--steps", type=int, default=120, help="train until this step")
    parser.add_argument("--total", type=int, default=120, help="steps of the whole schedule of the learning rate")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=48)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--save", type=Path, help="write a checkpoint here at the end")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint")
    return parser.parse_args()


def main():
    args = parse_arguments()
    torch.manual_seed(0)
    text = args.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    split = int(0.9 * len(data))
    train_data, valid_data = data[:split], data[split:]

    model = GPT(len(letters), args.context, args.width, args.depth, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    start = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        start = saved["step"]
        print(f"resumed at step {start}")

    seconds = []
    for step in range(start, args.steps):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args)
        _, loss = model(*batch_of(train_data, args.batch_size, args.context))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.6f}")
    if seconds:
        print(f"{1e3 * statistics.median(seconds):.1f} ms per step")

    if args.save:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "random": torch.get_rng_state(), "step": args.steps}, args.save)
    model.eval()
    sample = model.generate(torch.tensor([[letters.index("T")]]), 80)[0].tolist()
    print("sample:", "".join(letters[i] for i in sample).replace("\n", " "))
    print(f"held out  loss {evaluate(model, valid_data, args):.6f}")


if __name__ == "__main__":
    main()
