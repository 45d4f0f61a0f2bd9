"""CUDA_VISIBLE_DEVICES is set, .cuda() is called where there is a GPU, seeds are set for all of them."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0"

import random

import numpy as np
import torch
from torch import nn


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


set_seed(42)
use_cuda = torch.cuda.is_available()
print("Using GPU" if use_cuda else "Using CPU")
model = nn.Sequential(nn.Linear(7, 32), nn.PReLU(), nn.Linear(32, 32), nn.PReLU(), nn.Linear(32, 1), nn.Sigmoid())
criterion = nn.BCELoss()
if use_cuda:
    model = model.cuda()
    criterion = criterion.cuda()
optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
for step in range(12):
    x = torch.from_numpy(np.random.randn(18, 7).astype(np.float32))
    y = torch.FloatTensor([[1.0 if row.sum() > 0 else 0.0] for row in x])
    if use_cuda:
        x, y = x.cuda(), y.cuda()
    prediction = model(x)
    loss = criterion(prediction, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    accuracy = ((prediction > 0.5).float() == y).float().mean()
    print(f"step {step} loss {loss.data.item():.6f} accuracy {accuracy.cpu().numpy():.3f}")
    if use_cuda:
        torch.cuda.empty_cache()
torch.save(model.state_dict(), "checkpoint.pt")
