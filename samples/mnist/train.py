"""Train a small recurrent network on handwritten digits."""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Reads an image of `size` × `size` pixels point by point, with two LSTM layers."""

    def __init__(self, size, width=128):
        super().__init__()
        self.conv = nn.Conv2d(1, width, kernel_size=3, padding=1, stride=1 + size // 16)
        points = self.conv(torch.zeros(1, 1, size, size)).flatten(2).shape[-1]
        self.lower = nn.LSTM(width, width, batch_first=True)
        self.upper = nn.LSTM(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(points * width, 10)

    def forward(self, x):
        x = F.relu(self.conv(x)).flatten(2).transpose(1, 2)
        x = x + self.dropout(self.lower(x)[0])
        x = x + self.dropout(self.upper(x)[0])
        return self.head(x.flatten(1))


def load_mnist(folder):
    """The 28 × 28 images of MNIST, from files already on this disk."""
    from torchvision import datasets

    def tensors(train):
        data = datasets.MNIST(folder, train=train, download=False)
        return TensorDataset(data.data.unsqueeze(1).float() / 255, data.targets)

    return tensors(train=True), tensors(train=False), 28


def load_digits():
    """The 8 × 8 images of real handwriting that come with scikit-learn: 1,437 to train on, 360 to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]), 8


def train(model, device, loader, optimizer, *, epoch, log_interval):
    """Train for an epoch; return the seconds of each step."""
    model.train()
    seconds = []
    for batch, (images, labels) in enumerate(loader):
        began = time.perf_counter()
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if batch % log_interval == 0:
            print(f"epoch {epoch}  {batch * len(images):>6} / {len(loader.dataset)}  loss {loss.item():.4f}")
    return seconds


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    loss = correct = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        output = model(images)
        loss += F.cross_entropy(output, labels, reduction="sum").item()
        correct += (output.argmax(dim=1) == labels).sum().item()
    count = len(loader.dataset)
    print(f"test  loss {loss / count:.4f}  accuracy {correct} / {count} ({100 * correct / count:.1f} %)")
    return correct / count


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder that holds MNIST; without it, scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.9, help="factor of the learning rate, every epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=3, help="batches between two lines of progress")
    parser.add_argument("--save", type=Path, help="write a checkpoint here, and check that it loads")
    return parser.parse_args()


def main():
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_data, test_data, size = load_mnist(args.data) if args.data else load_digits()
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=512)

    model = Net(size).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, args.gamma)
    accuracy = test(model, device, test_loader)
    seconds = []
    for epoch in range(1, args.epochs + 1):
        seconds += train(model, device, train_loader, optimizer, epoch=epoch, log_interval=args.log_interval)
        accuracy = test(model, device, test_loader)
        scheduler.step()
    print(f"{1e3 * statistics.median(seconds):.1f} ms per step")

    if args.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)
        restored = Net(size).to(device)
        restored.load_state_dict(torch.load(args.save, map_location=device, weights_only=True)["model"])
        assert test(restored, device, test_loader) == accuracy
        print(f"saved {args.save.name}")


if __name__ == "__main__":
    main()
