"""Train a small convolutional network on handwritten digits."""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions and two linear layers, for square images of `size` pixels."""

    def __init__(self, size):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * (size // 4) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        x = F.relu(self.fc1(x))
        return self.fc2(x)


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
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--gamma", type=float, default=0.85, help="factor of the learning rate, every epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10, help="batches between two lines of progress")
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
