"""Image and text towers trained together by a symmetric contrastive loss with a learned temperature."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class CLIP(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, dim))
        self.token = nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.image(image), dim=-1)
        text_features = F.normalize(self.text(self.token(text)).mean(dim=1), dim=-1)
        logits = self.logit_scale.exp() * image_features @ text_features.t()
        return logits, logits.t()


torch.manual_seed(0)
model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    image, text = torch.rand(8, 3, 16, 16), torch.randint(0, 64, (8, 7))
    per_image, per_text = model(image, text)
    truth = torch.arange(8)
    loss = (F.cross_entropy(per_image, truth) + F.cross_entropy(per_text, truth)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} {loss.item():.6f} scale {model.logit_scale.exp().item():.5f}")
torch.save(model.state_dict(), "checkpoint.pt")
