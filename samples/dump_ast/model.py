"""A small model with a hard-coded device, and its training steps."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(x)


def main():
    torch.manual_seed(0)
    model = Model().cuda()  # as if every machine had one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.MSELoss()
    for step in range(5):
        x = torch.randn(16, 8).to("cuda:0")
        loss = loss_fn(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
