"""LSTM language model: time first, batch in dimension 1, hidden state carried from chunk to chunk."""

import math

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.2):
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid, self.nlayers = nhid, nlayers
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output)
        decoded = decoded.view(-1, self.ntoken)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


torch.manual_seed(1111)
ntokens, bptt, lr = 30, 8, 5.0
stream = (torch.arange(1200) * 7 + torch.randint(0, 3, (1200,))) % ntokens
train_data = batchify(stream[:1000], 8)
val_data = batchify(stream[1000:], 4)
model = RNNModel(ntokens, 24, 32, 2)
criterion = nn.NLLLoss()


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


model.train()
hidden = model.init_hidden(8)
for batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
    data, targets = get_batch(train_data, i)
    model.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    print(f"| batch {batch:3d} | loss {loss.item():.6f} | ppl {math.exp(loss.item()):8.3f}")

model.eval()
total = 0.0
hidden = model.init_hidden(4)
with torch.no_grad():
    for i in range(0, val_data.size(0) - 1, bptt):
        data, targets = get_batch(val_data, i)
        output, hidden = model(data, hidden)
        total += len(data) * criterion(output, targets).item()
print(f"| valid loss {total / (len(val_data) - 1):.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
