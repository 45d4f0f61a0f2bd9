"""A thread that feeds, a pool that logs, and three models trained in threads at the same time."""

import concurrent.futures as cf
import queue
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
q = queue.Queue(2)
g = torch.Generator().manual_seed(1)


def feed():
    for _ in range(6):
        q.put((torch.randn(8, 8, generator=g), torch.randint(0, 3, (8,), generator=g)))
    q.put(None)


threading.Thread(target=feed, daemon=True).start()
m = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
opt = torch.optim.Adam(m.parameters(), 1e-2)
log = []
with cf.ThreadPoolExecutor(1) as ex:
    while (b := q.get()) is not None:
        x, y = b
        opt.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        opt.step()
        log.append(
            ex.submit(
                lambda s: sum(v.abs().sum().item() for v in s.values()),
                {k: v.clone() for k, v in m.state_dict().items()},
            )
        )
        print(f"{l.item():.6f}")
    print([f"{f.result():.4f}" for f in log])


def two(seed, out):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(0)
    n = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    n.load_state_dict({k: torch.randn(v.shape, generator=g) * 0.2 for k, v in n.state_dict().items()})
    o = torch.optim.SGD(n.parameters(), 0.1)
    for _ in range(4):
        x = torch.randn(8, 4, generator=g)
        o.zero_grad()
        l = (n(x) - x.sum(1, keepdim=True)).pow(2).mean()
        l.backward()
        o.step()
    out[seed] = l.item()


out = {}
ts = [threading.Thread(target=two, args=(s, out)) for s in (1, 2, 3)]
for t in ts:
    t.start()
for t in ts:
    t.join()
print([f"{out[s]:.6f}" for s in (1, 2, 3)])
torch.save(m.state_dict(), "checkpoint.pt")
