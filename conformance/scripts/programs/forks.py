"""Evaluation in forked processes while training goes on in the parent."""

import multiprocessing
import os

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
held_out = torch.randn(20, 8)


def evaluate(results, epoch):
    with torch.no_grad():
        results.put(
            (epoch, nn.functional.mse_loss(model(held_out), held_out.sum(1, keepdim=True)).item(), os.getppid())
        )


def main():
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    for epoch in range(3):
        for _ in range(4):
            x = torch.randn(16, 8)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
        child = context.Process(target=evaluate, args=(results, epoch))
        child.start()
        number, value, parent = results.get()
        child.join()
        assert parent == os.getpid()
        print(f"child says: epoch {number} held out {value:.6f}, exit code {child.exitcode}", flush=True)
    with context.Pool(2) as pool:
        print("pool:", pool.map(abs, [-1, 2, -3]))
    torch.save(model.state_dict(), "checkpoint.pt")


if __name__ == "__main__":
    main()
