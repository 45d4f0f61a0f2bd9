"""Translate written dates to numbers: an encoder, attention, and a decoder unrolled in a Python loop."""

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

MONTHS = ["january", "february", "march", "april", "may", "june"]
MONTHS += ["july", "august", "september", "october", "november", "december"]
LETTERS = ["<pad>", "<start>", *"abcdefghijklmnopqrstuvwxyz0123456789- "]
PAD, START = 0, 1
SOURCE, TARGET = 17, 10  # letters of the longest date, and of every answer


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * width, width)

    def forward(self, source):
        states, last = self.gru(self.embedding(source))
        return states, torch.tanh(self.bridge(torch.cat([last[0], last[1]], dim=-1)))


class Decoder(nn.Module):
    """One letter at a time, looking back at the encoder's states."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.query = nn.Linear(width, 2 * width, bias=False)
        self.cell = nn.GRUCell(3 * width, width)
        self.out = nn.Linear(3 * width, len(LETTERS))

    def forward(self, letter, hidden, states, mask):
        scores = torch.bmm(states, self.query(hidden).unsqueeze(2)).squeeze(2)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        context = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
        hidden = self.cell(torch.cat([self.embedding(letter), context], dim=-1), hidden)
        return self.out(torch.cat([hidden, context], dim=-1)), hidden


class Translator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder, self.decoder = Encoder(width), Decoder(width)

    def forward(self, source, target=None):
        """Logits of every letter; with `target` each step is given the right letter before."""
        states, hidden = self.encoder(source)
        mask = source != PAD
        letter = torch.full_like(source[:, 0], START)
        outputs = []
        for step in range(TARGET):
            logits, hidden = self.decoder(letter, hidden, states, mask)
            outputs.append(logits)
            letter = target[:, step] if target is not None else logits.argmax(dim=-1)
        return torch.stack(outputs, dim=1)


def encode(text, length):
    ids = [LETTERS.index(letter) for letter in text]
    return ids + [PAD] * (length - len(ids))


def make_batch(chance, size):
    sources, targets = [], []
    for _ in range(size):
        year, month, day = chance.randint(1900, 2050), chance.randint(1, 12), chance.randint(1, 28)
        sources.append(encode(f"{day} {MONTHS[month - 1]} {year}", SOURCE))
        targets.append(encode(f"{year}-{month:02d}-{day:02d}", TARGET))
    return torch.tensor(sources), torch.tensor(targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    chance = random.Random(0)
    model = Translator(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        source, target = make_batch(chance, args.batch_size)
        logits = model(source, target)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.6f}")

    model.eval()
    source, target = make_batch(chance, 64)
    with torch.no_grad():
        made = model(source).argmax(dim=-1)
    print(f"letters right without help: {(made == target).float().mean().item():.3f}")
    for asked, answer in zip(source[:3], made[:3]):
        print("".join(LETTERS[i] for i in asked if i != PAD), "→", "".join(LETTERS[i] for i in answer))
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
