"""A training class of one's own: fit, validate, snapshot and history."""

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Waves(Dataset):
    def __init__(self, count=160, length=24):
        time = torch.linspace(0, 6.28, length)
        self.frequency = torch.rand(count) * 3 + 0.5
        self.x = torch.sin(self.frequency[:, None] * time) + 0.1 * torch.randn(count, length)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"signal": self.x[index], "target": self.frequency[index]}


class Regressor(nn.Module):
    def __init__(self, length=24, hidden=48, depth=3):
        super().__init__()
        layers = [nn.Linear(length, hidden), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(hidden, hidden), nn.Tanh(), nn.Dropout(0.05)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(hidden, 1)

    def forward(self, signal):
        return self.head(self.body(signal)).squeeze(-1)


class Trainer:
    def __init__(self, model, optimizer, train_loader, valid_loader, folder):
        self.model = model
        self.optimizer = optimizer
        self.train_loader = train_loader
        self.valid_loader = valid_loader
        self.folder = Path(folder)
        self.criterion = nn.SmoothL1Loss()
        self.history = []

    def _run_batch(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        prediction = self.model(batch["signal"])
        loss = self.criterion(prediction, batch["target"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.model.train()
        total = 0.0
        for batch in self.train_loader:
            total += self._run_batch(batch)
        return total / len(self.train_loader)

    @torch.no_grad()
    def _validate(self):
        self.model.eval()
        losses = [self.criterion(self.model(b["signal"]), b["target"]).item() for b in self.valid_loader]
        return sum(losses) / len(losses)

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch}
        torch.save(snapshot, self.folder / "snapshot.pt")

    def fit(self, epochs):
        for epoch in range(epochs):
            train_loss = self._run_epoch(epoch)
            valid_loss = self._validate()
            self.history.append({"epoch": epoch, "train": train_loss, "valid": valid_loss})
            print(f"[epoch {epoch}] train {train_loss:.6f} | valid {valid_loss:.6f}")
            self._save_snapshot(epoch)
        (self.folder / "history.json").write_text(json.dumps(self.history))


def main():
    torch.manual_seed(3)
    train_set, valid_set = random_split(Waves(), [128, 32])
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    trainer = Trainer(model, optimizer, DataLoader(train_set, 32, shuffle=True), DataLoader(valid_set, 32), ".")
    trainer.fit(5)
    torch.save(model.state_dict(), "checkpoint.pt")


if __name__ == "__main__":
    main()
