"""Sequence to sequence with attention; the decoder is unrolled in a Python loop with random teacher forcing."""

import random

import torch
import torch.nn.functional as F
from torch import nn

SOS, VOCAB, LENGTH = 0, 20, 6


class Encoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, source):
        return self.gru(self.dropout(self.embedding(source)))


class Attention(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class Decoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.attention = Attention(hidden)
        self.gru = nn.GRU(2 * hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, VOCAB)

    def forward(self, encoded, hidden, target=None):
        word = torch.full((encoded.size(0), 1), SOS)
        outputs = []
        for i in range(LENGTH):
            context, _ = self.attention(hidden.permute(1, 0, 2), encoded)
            output, hidden = self.gru(torch.cat((self.embedding(word), context), dim=2), hidden)
            logits = self.out(output)
            outputs.append(logits)
            if target is not None:
                word = target[:, i].unsqueeze(1)
            else:
                word = logits.argmax(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


random.seed(0)
torch.manual_seed(0)
encoder, decoder = Encoder(32), Decoder(32)
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
criterion = nn.NLLLoss()
for step in range(12):
    source = torch.randint(1, VOCAB, (10, LENGTH))
    target = source.flip(1)
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    encoded, hidden = encoder(source)
    forced = random.random() < 0.7
    output = decoder(encoded, hidden, target if forced else None)
    loss = criterion(output.view(-1, output.size(-1)), target.view(-1))
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    print(f"step {step} {'forced' if forced else 'free'} loss {loss.item():.6f}")
torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}, "checkpoint.pt")
