"""FGSM: the gradient with respect to the input makes adversarial examples that are trained on."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def fgsm(images, labels, epsilon):
    images = images.clone().requires_grad_(True)
    loss = F.cross_entropy(model(images), labels)
    model.zero_grad()
    loss.backward()
    return (images + epsilon * images.grad.sign()).clamp(0, 1).detach()


for step in range(10):
    images = torch.rand(12, 1, 6, 6)
    labels = images.flatten(1).max(1).indices % 3
    attacked = fgsm(images, labels, 0.05)
    optimizer.zero_grad()
    clean = F.cross_entropy(model(images), labels)
    adversarial = F.cross_entropy(model(attacked), labels)
    loss = 0.5 * clean + 0.5 * adversarial
    loss.backward()
    optimizer.step()
    print(f"step {step} clean {clean.item():.6f} adversarial {adversarial.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
