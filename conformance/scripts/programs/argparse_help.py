"""A script with a command line; run with --help it trains nothing."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser(description="Fit a line", epilog="That is all.")
parser.add_argument("data", nargs="?", default="synthetic", help="where the data comes from")
parser.add_argument("--lr", type=float, default=0.1, metavar="RATE")
parser.add_argument("-n", "--steps", type=int, default=12)
parser.add_argument("--mode", choices=["fast", "slow"], default="fast")
parser.add_argument("--verbose", "-v", action="count", default=0)
parser.add_argument("--output", default="checkpoint.pt")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
print(f"{parser.prog}: {args.data}, {args.mode}, verbosity {args.verbose}")
for step in range(args.steps):
    x = torch.rand(16, 1)
    loss = ((model(x) - 3 * x + 1) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.verbose:
        print(f"{step} {loss.item():.6f}")
torch.save(model.state_dict(), args.output)
