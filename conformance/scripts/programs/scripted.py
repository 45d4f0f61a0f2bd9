"""torch.jit: scripted functions and modules inside a model, traced and scripted models, saved and loaded."""

import torch
import torch.nn as nn

torch.manual_seed(0)


@torch.jit.script
def fused_gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Cell(torch.jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16) * 0.1)

    @torch.jit.script_method
    def forward(self, x):
        return torch.tanh(x @ self.w)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(8, 16)
        self.cell = Cell()
        self.block = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
        self.o = nn.Linear(16, 3)

    def forward(self, x):
        x = fused_gelu(self.i(x))
        for _ in range(2):
            x = self.cell(x)
        return self.o(self.block(x))


for m in (
    Net(),
    torch.jit.trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(4, 8)),
    torch.jit.script(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))),
):
    opt = torch.optim.Adam(m.parameters(), 1e-2)
    for i in range(4):
        x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
        opt.zero_grad()
        l = nn.functional.cross_entropy(m(x), y)
        l.backward()
        opt.step()
        print(f"{i} {l.item():.6f}")
m.save("scripted.pt")
print(torch.allclose(torch.jit.load("scripted.pt")(x), m(x)))
torch.save(m.state_dict(), "checkpoint.pt")
