"""A script that saves a model, its optimizer and its tensors in every common format, at all times of a run."""

import copy
import pickle
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file, save_model
from torch import nn


class Block(nn.Module):
    """A residual block, of a class in `__main__`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """With a shared weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[Block(16) for _ in range(3)])
        self.tied, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.tied.weight = self.body[0].linear.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(self.body(x)))


def save_all(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Save everything that scripts save."""
    folder.mkdir(parents=True)
    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "loss": loss, "step": 3}
    objects = {
        "state": net.state_dict(),
        "model": net,
        "optimizer": optimizer.state_dict(),
        "checkpoint": states,
        "copy": copy.deepcopy(net),
        "shallow": copy.copy(net),
        "part": net.body[1],
        "gradients": [one.grad for one in net.parameters()],
        "bias_gradient": net.head.bias.grad,
    }
    for name, one in objects.items():
        torch.save(one, folder / f"{name}.pt")
    torch.save(net, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        (folder / f"model{protocol}.pkl").write_bytes(pickle.dumps(net, protocol))
    save_model(net, str(folder / "model.safetensors"))
    gradients = {name: one.grad for name, one in net.named_parameters() if one.grad is not None}
    for name, tensors in (("state", net.state_dict()), ("gradients", gradients)):
        tensors.pop("tied.weight", None)
        save_file(tensors, folder / f"{name}.safetensors")


def main(folder: Path) -> None:
    """Save before, during and after the steps that workers run."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    save_all(folder / "before", net, optimizer, torch.tensor(0.0))
    x, y = torch.randn(8, 16), torch.randint(3, (8,))
    for step in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        if step == 3:
            save_all(folder / "in_step", net, optimizer, loss.detach())
        loss.backward()
        optimizer.step()
        if step in (0, 2):
            save_all(folder / f"step{step}", net, optimizer, loss.detach())
    net.eval()
    save_all(folder / "after", net, optimizer, loss.detach())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
