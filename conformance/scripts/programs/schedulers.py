"""Learning-rate schedulers of many kinds, one after the other, on the same small model."""

import torch
from torch import nn
from torch.optim import lr_scheduler


def make():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def warmup_cosine(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])


SCHEDULERS = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [3, 6], gamma=0.3),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warmup_cosine": warmup_cosine,
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}

for name, schedule in SCHEDULERS.items():
    model, optimizer = make()
    scheduler = schedule(optimizer)
    for _ in range(8):
        x = torch.randn(16, 10)
        loss = nn.functional.mse_loss(model(x), x.prod(dim=1, keepdim=True).clamp(-1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if name == "plateau":
            scheduler.step(loss)
        else:
            scheduler.step()
        print(f"{name:13s} lr {optimizer.param_groups[0]['lr']:.6f} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
