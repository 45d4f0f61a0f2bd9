"""Training runs in a thread of its own; the main thread prints what arrives in a queue."""

import queue
import threading

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2))
messages = queue.Queue()


def train():
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(12):
        x = torch.randn(16, 10)
        y = (x.sum(1) > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        messages.put((step, loss.item()))
    messages.put(None)


thread = threading.Thread(target=train, name="trainer")
thread.start()
while (message := messages.get()) is not None:
    print("step {} loss {:.6f}".format(*message))
thread.join()
torch.save(model.state_dict(), "checkpoint.pt")
