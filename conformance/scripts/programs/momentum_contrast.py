"""Momentum contrast: a queue of keys, and an encoder that follows another in its forward."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def enc():
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))


class MoCo(nn.Module):
    def __init__(self, K=16, m=0.9, T=0.1):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = enc(), enc()
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _deq(self, keys):
        b = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % b == 0
        self.queue[:, ptr : ptr + b] = keys.T
        self.queue_ptr[0] = (ptr + b) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        lp = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        ln = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([lp, ln], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._deq(k)
        return logits, labels


m = MoCo()
opt = torch.optim.SGD(m.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
crit = nn.CrossEntropyLoss()
for i in range(8):
    x = torch.randn(8, 10)
    out, t = m(im_q=x + 0.1 * torch.randn_like(x), im_k=x)
    l = crit(out, t)
    opt.zero_grad()
    l.backward()
    opt.step()
    print(f"{i} {l.item():.6f} {int(m.queue_ptr)}")
torch.save({"state_dict": m.state_dict(), "optimizer": opt.state_dict()}, "checkpoint.pt")
