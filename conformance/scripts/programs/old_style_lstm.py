"""LSTM language model, old style: types compared, hidden states repackaged."""

import torch
from torch import nn

torch.manual_seed(0)


class RNN(nn.Module):
    def __init__(self, v=30, d=24):
        super().__init__()
        self.enc, self.rnn, self.dec = nn.Embedding(v, d), nn.LSTM(d, d, 2, dropout=0.2), nn.Linear(d, v)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.enc(x), hidden)
        return self.dec(out.view(-1, out.size(2))), hidden


def repackage(h):
    if type(h) == torch.Tensor:
        return h.detach()
    return tuple(repackage(v) for v in h)


net = RNN()
opt = torch.optim.SGD(net.parameters(), 0.5)
data = torch.randint(0, 30, (50, 8))
hidden = (torch.zeros(2, 8, 24), torch.zeros(2, 8, 24))
for i in range(0, 42, 6):
    x, y = data[i : i + 6], data[i + 1 : i + 7].reshape(-1)
    hidden = repackage(hidden)
    opt.zero_grad()
    out, hidden = net(x, hidden)
    loss = nn.functional.cross_entropy(out, y)
    print(type(out), type(hidden[0]), type(loss) == torch.Tensor)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.25)
    opt.step()
    print(f"{i} {loss.item():.6f}")
torch.save(net.state_dict(), "checkpoint.pt")
