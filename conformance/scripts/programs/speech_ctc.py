"""Speech-like sequences with the CTC loss."""

import torch
from torch import nn


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(10, 32, 3, padding=1), nn.GELU(), nn.Conv1d(32, 32, 3, padding=1), nn.GELU()
        )
        self.rnn = nn.GRU(32, 24, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(48, 9)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.rnn(x)
        return nn.functional.log_softmax(self.fc(x), dim=2)


torch.manual_seed(0)
model = Acoustic()
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(10):
    spectrogram = torch.randn(8, 20, 10)
    target_lengths = torch.randint(2, 6, (8,))
    targets = torch.randint(1, 9, (8, 5))
    output = model(spectrogram).transpose(0, 1)
    loss = criterion(output, targets, torch.full((8,), 20), target_lengths)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} ctc {loss.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
