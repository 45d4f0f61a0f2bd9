"""An image is optimized, not the network: features of a frozen network through forward hooks."""

import torch
from torch import nn

torch.manual_seed(0)
features = nn.Sequential(
    nn.Conv2d(3, 12, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(12, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.ReLU(),
).eval()
for p in features.parameters():
    p.requires_grad_(False)
kept = {}
for index in (1, 3, 6):
    features[index].register_forward_hook(lambda module, args, output, index=index: kept.__setitem__(index, output))


def gram(x):
    b, c, h, w = x.shape
    flat = x.view(b, c, h * w)
    return flat @ flat.transpose(1, 2) / (c * h * w)


content, style = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)
features(content)
content_target = kept[6].detach()
features(style)
style_targets = {i: gram(kept[i]).detach() for i in (1, 3)}
image = content.clone().requires_grad_(True)
optimizer = torch.optim.Adam([image], lr=0.02)
for step in range(10):
    optimizer.zero_grad()
    features(image)
    loss = (kept[6] - content_target).pow(2).mean()
    for i, target in style_targets.items():
        loss = loss + 100 * (gram(kept[i]) - target).pow(2).sum()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        image.clamp_(0, 1)
    print(f"step {step} loss {loss.item():.6f}")
torch.save(image.detach(), "checkpoint.pt")
