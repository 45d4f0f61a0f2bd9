"""Differentiable architecture search: architecture weights in a plain attribute, an unrolled step now and then."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)


class MixedOp(nn.Module):
    def __init__(self, C):
        super().__init__()
        self.ops = nn.ModuleList(
            [nn.Identity(), nn.Sequential(nn.ReLU(), nn.Conv2d(C, C, 3, padding=1)), nn.AvgPool2d(3, 1, 1)]
        )

    def forward(self, x, w):
        return sum(a * op(x) for a, op in zip(w, self.ops))


class Network(nn.Module):
    def __init__(self, C=6, n=2, crit=nn.CrossEntropyLoss()):
        super().__init__()
        self._criterion = crit
        self.stem = nn.Conv2d(3, C, 3, padding=1)
        self.cells = nn.ModuleList([MixedOp(C) for _ in range(n)])
        self.cls = nn.Linear(C, 4)
        self.alphas = torch.autograd.Variable(1e-3 * torch.randn(n, 3), requires_grad=True)
        self._arch = [self.alphas]

    def new(self):
        m = Network()
        for x, y in zip(m.arch_parameters(), self.arch_parameters()):
            x.data.copy_(y.data)
        return m

    def arch_parameters(self):
        return self._arch

    def forward(self, x):
        x = self.stem(x)
        for i, c in enumerate(self.cells):
            x = c(x, F.softmax(self.alphas, dim=-1)[i])
        return self.cls(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1))

    def _loss(self, x, t):
        return self._criterion(self(x), t)


model = Network()
w_opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=3e-4)
a_opt = torch.optim.Adam(model.arch_parameters(), lr=3e-3, betas=(0.5, 0.999), weight_decay=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(w_opt, 4.0, eta_min=1e-3)


def unrolled(xt, yt, xv, yv, eta):
    loss = model._loss(xt, yt)
    theta = torch.cat([p.data.view(-1) for p in model.parameters()])
    g = torch.cat([x.view(-1) for x in torch.autograd.grad(loss, model.parameters())]) + 3e-4 * theta
    um = model.new()
    d, off = {}, 0
    vec = theta - eta * g
    for k, v in model.named_parameters():
        n = v.numel()
        d[k] = vec[off : off + n].view(v.size())
        off += n
    um.load_state_dict({**um.state_dict(), **d})
    ul = um._loss(xv, yv)
    ul.backward()
    da = [v.grad for v in um.arch_parameters()]
    vector = [v.grad.data for v in um.parameters()]
    R = 1e-2 / torch.cat([v.view(-1) for v in vector]).norm()
    for p, v in zip(model.parameters(), vector):
        p.data.add_(v, alpha=R)
    gp = torch.autograd.grad(model._loss(xt, yt), model.arch_parameters())
    for p, v in zip(model.parameters(), vector):
        p.data.sub_(v, alpha=2 * R)
    gn = torch.autograd.grad(model._loss(xt, yt), model.arch_parameters())
    for p, v in zip(model.parameters(), vector):
        p.data.add_(v, alpha=R)
    for a, b, c in zip(da, gp, gn):
        a.data.sub_(eta * (b - c) / (2 * R))
    for v, gr in zip(model.arch_parameters(), da):
        v.grad = gr.clone() if v.grad is None else v.grad.copy_(gr)


for e in range(4):
    xt, yt, xv, yv = (
        torch.randn(8, 3, 8, 8),
        torch.randint(0, 4, (8,)),
        torch.randn(8, 3, 8, 8),
        torch.randint(0, 4, (8,)),
    )
    a_opt.zero_grad()
    if e % 2:
        unrolled(xt, yt, xv, yv, 0.05)
    else:
        model._loss(xv, yv).backward()
    a_opt.step()
    w_opt.zero_grad()
    loss = model._loss(xt, yt)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5)
    w_opt.step()
    sched.step()
    print(f"{e} {loss.item():.6f}", [round(v, 5) for v in F.softmax(model.alphas, -1)[0].tolist()])
torch.save((model.state_dict(), model.alphas), "checkpoint.pt")
