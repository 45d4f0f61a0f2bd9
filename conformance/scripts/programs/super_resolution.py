"""ESPCN: a sub-pixel convolution that doubles the resolution; prints PSNR."""

from math import log10

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import init


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 32, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(32, 32, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(32, 16, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(16, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


torch.manual_seed(123)
model = Net(2)
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def batch():
    coarse = torch.rand(8, 1, 6, 6)
    target = F.interpolate(coarse, size=(24, 24), mode="bilinear", align_corners=False)
    return F.avg_pool2d(target, 2), target


for iteration in range(10):
    inputs, target = batch()
    optimizer.zero_grad()
    loss = criterion(model(inputs), target)
    loss.backward()
    optimizer.step()
    print(f"===> Iteration {iteration}: Loss: {loss.item():.6f}")
with torch.no_grad():
    inputs, target = batch()
    mse = criterion(model(inputs), target)
    print(f"===> PSNR: {10 * log10(1 / mse.item()):.4f} dB")
torch.save(model.state_dict(), "checkpoint.pt")
