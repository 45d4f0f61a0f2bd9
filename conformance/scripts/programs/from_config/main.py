"""Model, loss and optimizer are built by name from a configuration file."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

MODELS = {}


def register(name):
    def add(cls):
        MODELS[name] = cls
        return cls

    return add


class Residual(nn.Module):
    def __init__(self, width, activation):
        super().__init__()
        self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), getattr(nn, activation)())

    def forward(self, x):
        return x + self.layer(x)


@register("residual_mlp")
class ResidualMLP(nn.Module):
    def __init__(self, inputs, width, depth, outputs, activation):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(*[Residual(width, activation) for _ in range(depth)])
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def main(path):
    config = json.loads(Path(path).read_text())
    torch.manual_seed(config["seed"])
    model = MODELS[config["model"]["type"]](**config["model"]["arguments"])
    optimizer_class = getattr(torch.optim, config["optimizer"]["type"])
    optimizer = optimizer_class(model.parameters(), **config["optimizer"]["arguments"])
    criterion = getattr(nn, config["loss"]["type"])(**config["loss"]["arguments"])
    for step in range(config["steps"]):
        x = torch.randn(config["batch_size"], 10)
        y = x[:, :3].abs().argmax(dim=-1)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "loss": round(loss.item(), 6)}))
    torch.save({"config": config, "state": model.state_dict()}, "checkpoint.pt")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("config.json"))
