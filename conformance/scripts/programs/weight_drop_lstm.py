"""A recurrent language model with dropout on its weights, in the style of AWD-LSTM; averaged SGD."""

import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class WeightDrop(nn.Module):
    def __init__(self, module, weights, dropout=0):
        super().__init__()
        self.module, self.weights, self.dropout = module, weights, dropout
        for n in weights:
            w = getattr(module, n)
            del module._parameters[n]
            module.register_parameter(n + "_raw", nn.Parameter(w.data))
        module.flatten_parameters = lambda *a, **k: None

    def forward(self, *args):
        for n in self.weights:
            raw = getattr(self.module, n + "_raw")
            setattr(self.module, n, F.dropout(raw, p=self.dropout, training=self.training))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.module.forward(*args)


class LockedDropout(nn.Module):
    def forward(self, x, p=0.5):
        if not self.training or not p:
            return x
        m = x.data.new(1, x.size(1), x.size(2)).bernoulli_(1 - p)
        return (torch.autograd.Variable(m, requires_grad=False) / (1 - p)).expand_as(x) * x


class Cell(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.randn(h, i) * 0.2)
        self.weight_hh = nn.Parameter(torch.randn(h, h) * 0.2)

    def forward(self, x, h):
        out = []
        for t in x:
            h = torch.tanh(t @ self.weight_ih.T + h @ self.weight_hh.T)
            out.append(h)
        return torch.stack(out), h


class RNNModel(nn.Module):
    def __init__(self, v=30, d=16):
        super().__init__()
        self.lockdrop = LockedDropout()
        self.encoder = nn.Embedding(v, d)
        self.rnns = nn.ModuleList([WeightDrop(Cell(d, d), ["weight_hh"], 0.3) for _ in range(2)])
        self.decoder = nn.Linear(d, v)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, hidden):
        e = self.lockdrop(self.encoder(x), 0.2)
        nh = []
        raws = []
        for l, r in enumerate(self.rnns):
            e, h = r(e, hidden[l])
            nh.append(h)
            raws.append(e)
            e = self.lockdrop(e, 0.2)
        return self.decoder(e.view(-1, e.size(2))).view(e.size(0), e.size(1), -1), nh, raws, e


m = RNNModel()
opt = torch.optim.ASGD(m.parameters(), lr=1.0, t0=0, lambd=0.0, weight_decay=1e-6)
hidden = [torch.zeros(8, 16) for _ in range(2)]
data = torch.randint(0, 30, (60, 8))
seq = 0


def repackage(h):
    return h.detach() if isinstance(h, torch.Tensor) else type(h)(repackage(v) for v in h)


for b in range(6):
    n = 6 + b % 2
    x, t = data[seq : seq + n], data[seq + 1 : seq + 1 + n].reshape(-1)
    seq += n
    hidden = repackage(hidden)
    opt.zero_grad()
    o, hidden, raws, drop = m(x, hidden)
    raw = F.cross_entropy(o.view(-1, 30), t)
    l = raw + 2 * drop.pow(2).mean() + (raws[-1][1:] - raws[-1][:-1]).pow(2).mean()
    l.backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.25)
    opt.step()
    print(f"{b} {raw.item():.6f} {l.item():.6f}")
tmp = {}
for p in m.parameters():
    tmp[p] = p.data.clone()
    if "ax" in opt.state[p]:
        p.data = opt.state[p]["ax"].clone()
m.eval()
print(f"{F.cross_entropy(m(x, hidden)[0].view(-1, 30), t).item():.6f}")
for p in m.parameters():
    p.data = tmp[p].clone()
torch.save(m.state_dict(), "checkpoint.pt")
