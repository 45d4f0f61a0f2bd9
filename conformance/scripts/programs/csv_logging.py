"""Metrics go to a CSV file and to the logging module; a line a step on standard output."""

import csv
import logging
import sys
import time

import torch
from torch import nn

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
log = logging.getLogger("train")


class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def average(self):
        return self.sum / self.count


torch.manual_seed(30)
model = nn.Sequential(
    nn.Conv1d(2, 16, 5), nn.ReLU(), nn.Conv1d(16, 16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 12, 3)
)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
losses, times = Meter(), Meter()
with open("metrics.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=["step", "loss", "average", "lr"])
    writer.writeheader()
    for step in range(12):
        begin = time.perf_counter()
        signal = torch.randn(14, 2, 20)
        labels = signal.sum((1, 2)).div(6).round().long().clamp(-1, 1) + 1
        loss = nn.functional.cross_entropy(model(signal), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(signal))
        times.update(time.perf_counter() - begin)
        writer.writerow({"step": step, "loss": f"{loss.item():.5f}", "average": f"{losses.average:.5f}", "lr": 0.02})
        file.flush()
        log.info("step %d loss %.5f (%.5f)", step, loss.item(), losses.average)
assert times.average > 0
print(f"{times.average * 1000:.1f} ms a step", file=sys.stderr)
print(len(open("metrics.csv").readlines()), "lines logged")
torch.save(model.state_dict(), "checkpoint.pt")
