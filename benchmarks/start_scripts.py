"""Training scripts for `bench_start.py`, as users write them: no reference to Gemini.

    python benchmarks/start_scripts.py NAME [--steps N]

The last line of the output is JSON: the loss, and the end of every step in seconds since the start of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

BEGAN = float(os.environ.get("BEGAN") or time.time())
VOCABULARY = 2000


class LanguageModel(nn.Module):
    """A decoder of the GPT kind."""

    def __init__(self, layers: int, width: int, heads: int, longest: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        y = self.tokens(x) + self.positions(torch.arange(length))
        return self.head(self.body(y, mask=mask, is_causal=True))


class Loop(nn.Module):
    """An LSTMCell called once per element of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(1, 51), nn.Linear(51, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next element of each position."""
        h, c = x.new_zeros(len(x), 51), x.new_zeros(len(x), 51)
        outputs = []
        for element in x.split(1, dim=1):
            h, c = self.cell(element, (h, c))
            outputs.append(self.head(h))
        return torch.cat(outputs, dim=1)


def train_lm(model: nn.Module, sizes: Iterator[tuple[int, int]], after: Callable[[int], None] = lambda _: None) -> None:
    """Train on batches of the given sizes; call `after` after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step, (batch, length) in enumerate(sizes):
        x = torch.randint(VOCABULARY, (batch, length + 1))
        logits = model(x[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step(loss)
        after(step)


def small_lm() -> nn.Module:
    """Return a model of 6 layers."""
    return LanguageModel(6, 256, 4, 128)


def fixed(steps: int) -> None:
    """6-layer LM, one length."""
    train_lm(small_lm(), ((16, 64) for _ in range(steps)))


def lengths(steps: int) -> None:
    """6-layer LM, 40 lengths."""
    chosen = random.Random(0)
    train_lm(small_lm(), ((16, chosen.choice(range(24, 104, 2))) for _ in range(steps)))


def batches(steps: int) -> None:
    """6-layer LM, batches of 12 to 20 samples."""
    chosen = random.Random(0)
    train_lm(small_lm(), ((chosen.randint(12, 20), 64) for _ in range(steps)))


def evaluation(steps: int) -> None:
    """6-layer LM, evaluated at other sizes every 10 steps."""
    model = small_lm()

    def evaluate(step: int) -> None:
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                for length in (48, 80):
                    x = torch.randint(VOCABULARY, (8, length + 1))
                    F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).item()
            model.train()

    train_lm(model, ((16, 64) for _ in range(steps)), evaluate)


def lstm_loop(steps: int) -> None:
    """LSTMCell called 300 times per step."""
    model = Loop()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.sin(torch.arange(301) / 20 + torch.rand(32, 1))
    for _ in range(steps):
        loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step(loss)


def mlp(steps: int) -> None:
    """A tiny MLP."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(32, 16)), torch.randint(4, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step(loss)


def bert(steps: int) -> None:
    """HF Trainer, BERT of 4 layers, batches padded to their longest text."""
    import tempfile

    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    chosen = random.Random(0)
    texts = [[chosen.randrange(VOCABULARY) for _ in range(chosen.randint(16, 96))] for _ in range(16 * steps)]

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        texts, longest = [row["ids"] for row in rows], max(len(row["ids"]) for row in rows)
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}

    class Timed(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            end_step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=16, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_steps=steps, remove_unused_columns=False, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            transformers.BertForSequenceClassification(config), arguments, data_collator=collate,
            train_dataset=[{"ids": text} for text in texts], callbacks=[Timed()],
        )  # fmt: skip
        end_run(trainer.train().training_loss)


def gpt(steps: int) -> None:
    """GPT of 60 million parameters."""
    train_lm(LanguageModel(17, 528, 8, 128, VOCABULARY), ((8, 128) for _ in range(steps)))


SCRIPTS = {
    "fixed": (fixed, 60), "lengths": (lengths, 160), "batches": (batches, 60), "evaluation": (evaluation, 60),
    "lstm_loop": (lstm_loop, 60), "mlp": (mlp, 3000), "bert": (bert, 80), "gpt": (gpt, 12),
}  # fmt: skip
ENDS: list[float] = []
LOSS: list[float] = []


def end_step(loss: torch.Tensor | None = None) -> None:
    """Note the end of a step."""
    ENDS.append(round(time.time() - BEGAN, 4))
    if loss is not None:
        LOSS[:] = [loss.item()]


def end_run(loss: float) -> None:
    """Note the loss of a run."""
    LOSS[:] = [loss]


def main() -> None:
    """Run one script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=SCRIPTS)
    parser.add_argument("--steps", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    script, steps = SCRIPTS[arguments.name]
    script(arguments.steps or steps)
    print(json.dumps({"loss": LOSS[0], "ends": ENDS}))


if __name__ == "__main__":
    main()
