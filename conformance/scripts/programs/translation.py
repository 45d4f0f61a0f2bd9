"""nn.Transformer for translation: causal and padding masks, ignore_index for padding, Xavier initialisation."""

import torch
from torch import nn

PAD, BOS = 0, 1


class Translator(nn.Module):
    def __init__(self, vocab=25, dim=32):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, dim, PAD), nn.Embedding(vocab, dim, PAD)
        self.positions = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.transformer = nn.Transformer(dim, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(dim, vocab)

    def forward(self, source, target):
        causal = self.transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape).masked_fill(source == PAD, float("-inf"))
        x = self.source(source) + self.positions[:, : source.shape[1]]
        y = self.target(target) + self.positions[:, : target.shape[1]]
        out = self.transformer(x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.generator(out)


torch.manual_seed(0)
model = Translator()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
for step in range(10):
    lengths = torch.randint(4, 10, (8, 1))
    source = torch.randint(2, 25, (8, 9)).masked_fill(torch.arange(9) >= lengths, PAD)
    target = torch.cat([torch.full((8, 1), BOS), source], dim=1)
    logits = model(source, target[:, :-1])
    loss = criterion(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
