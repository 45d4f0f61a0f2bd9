"""Train an LSTM language model on the words of a text."""

import argparse
import math
import re
from pathlib import Path

import torch
from torch import nn


class LanguageModel(nn.Module):
    """Words in, logits of the next words out; (time, batch) all through."""

    def __init__(self, words, width, hidden, layers, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, hidden, layers, dropout=dropout)
        self.decoder = nn.Linear(hidden, words)
        self.layers, self.hidden = layers, hidden

    def forward(self, words, state):
        output, state = self.lstm(self.dropout(self.encoder(words)), state)
        return self.decoder(self.dropout(output)), state

    def start(self, batch):
        zeros = torch.zeros(self.layers, batch, self.hidden)
        return zeros, zeros.clone()


def columns(data, batch):
    """The text in `batch` columns that run on from step to step."""
    length = len(data) // batch
    return data[: length * batch].view(batch, length).t().contiguous()


def pieces(data, length):
    for start in range(0, len(data) - 1, length):
        end = min(start + length, len(data) - 1)
        yield data[start:end], data[start + 1 : end + 1]


@torch.no_grad()
def evaluate(model, data, args):
    model.eval()
    total, state = 0.0, model.start(data.shape[1])
    for words, targets in pieces(data, args.length):
        logits, state = model(words, state)
        total += nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() * len(words)
    model.train()
    return total / (len(data) - 1)


def train(model, data, optimizer, args, epoch):
    state = model.start(args.batch_size)
    for step, (words, targets) in enumerate(pieces(data, args.length)):
        state = tuple(part.detach() for part in state)
        logits, state = model(words, state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if step % 10 == 0:
            print(f"epoch {epoch}  step {step:3d}  loss {loss.item():.6f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "gpt" / "text.txt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=16, help="words of a step")
    parser.add_argument("--lr", type=float, default=5.0)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    words = re.findall(r"\w+|[^\w\s]", args.text.read_text(encoding="utf-8").lower())
    known = sorted(set(words))
    index = {word: number for number, word in enumerate(known)}
    data = torch.tensor([index[word] for word in words])
    split = int(0.9 * len(data))
    train_data, valid_data = columns(data[:split], args.batch_size), columns(data[split:], 8)

    model = LanguageModel(len(known), 64, 128, 2, 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    for epoch in range(args.epochs):
        train(model, train_data, optimizer, args, epoch)
        valid = evaluate(model, valid_data, args)
        scheduler.step(valid)
        print(f"epoch {epoch}  perplexity {math.exp(valid):.3f}  held-out loss {valid:.6f}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
