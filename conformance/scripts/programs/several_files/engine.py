"""One epoch of training, and one of testing."""

import torch
import torch.nn.functional as F


def train_one_epoch(model, optimizer, loader, epoch):
    model.train()
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch={epoch} step={step} loss={loss.item():.6f}")


@torch.inference_mode()
def evaluate(model, loader):
    model.eval()
    hits = sum((model(x).argmax(-1) == y).sum().item() for x, y in loader)
    print(f"accuracy={hits / len(loader.dataset):.4f}")
