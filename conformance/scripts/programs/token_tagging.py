"""Token tagging with ignore_index, class weights and a bidirectional LSTM over packed sequences."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(80, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 24, bidirectional=True, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.lstm(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=tokens.shape[1])
        return self.dense(output)


torch.manual_seed(0)
model = Tagger()
criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.5, 2.0]), ignore_index=-100)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(12):
    lengths = torch.randint(4, 12, (10,))
    padding = torch.arange(11) >= lengths[:, None]
    tokens = torch.randint(1, 80, (10, 11)).masked_fill(padding, 0)
    tags = (tokens % 4).masked_fill(padding, -100)
    logits = model(tokens, lengths)
    loss = criterion(logits.transpose(1, 2), tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
