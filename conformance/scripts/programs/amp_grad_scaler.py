"""Automatic mixed precision with a GradScaler, as in the recipe."""

import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers.append(nn.Linear(in_size, in_size))
        layers.append(nn.ReLU())
    layers.append(nn.Linear(in_size, out_size))
    return nn.Sequential(*layers).to(device)


data = [torch.randn(16, 48, device=device) for _ in range(6)]
targets = [torch.randn(16, 8, device=device) for _ in range(6)]
loss_fn = nn.MSELoss().to(device)

net = make_model(48, 8, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=5)

for epoch in range(2):
    for inp, target in zip(data, targets):
        with torch.autocast(device_type=device, dtype=dtype):
            output = net(inp)
            assert output.dtype is dtype
            loss = loss_fn(output.float(), target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.8)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.5f} scale {scaler.get_scale():.0f}")

torch.save({"net": net.state_dict(), "scaler": scaler.state_dict()}, "checkpoint.pt")
