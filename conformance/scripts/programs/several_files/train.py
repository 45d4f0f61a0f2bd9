"""Entry point of a small project: configuration, data, model and engine are in files of their own."""

import sys

import torch
from data import make_loaders
from engine import evaluate, train_one_epoch
from net import build_model
from settings import Settings


def main(argv):
    settings = Settings.from_arguments(argv)
    torch.manual_seed(settings.seed)
    train_loader, test_loader = make_loaders(settings)
    model = build_model(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    for epoch in range(settings.epochs):
        train_one_epoch(model, optimizer, train_loader, epoch)
        evaluate(model, test_loader)
    torch.save(model.state_dict(), settings.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
