"""A DataLoader with worker processes, a custom dataset, collate function and worker seeds."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, count):
        self.lengths = [3 + (7 * i) % 9 for i in range(count)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        generator = np.random.default_rng(index)
        words = generator.integers(1, 50, self.lengths[index])
        return torch.tensor(words), int(words.sum() % 2)


def collate(samples):
    words, labels = zip(*samples)
    padded = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return padded, torch.tensor(labels)


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, words):
        mask = (words != 0).unsqueeze(-1)
        x = (self.embed(words) * mask).sum(1) / mask.sum(1)
        return self.head(self.body(x))


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        Sentences(96),
        batch_size=16,
        shuffle=True,
        num_workers=2,
        collate_fn=collate,
        worker_init_fn=seed_worker,
        generator=generator,
        drop_last=True,
    )
    model = Bag()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for i, (words, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(words), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} batch {i} shape {tuple(words.shape)} loss {loss.item():.6f}")
    torch.save(model.state_dict(), "checkpoint.pt")


if __name__ == "__main__":
    main()
