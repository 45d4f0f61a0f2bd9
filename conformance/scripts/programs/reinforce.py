"""REINFORCE on a bandit with contexts; a batch of episodes at once."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(7)
policy = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
baseline = 0.0
for iteration in range(12):
    context = torch.randn(32, 8)
    logits = policy(context)
    actions = torch.multinomial(F.softmax(logits, dim=-1), 1).squeeze(1)
    rewards = (actions == context[:, :4].argmax(dim=1)).float()
    log_probs = F.log_softmax(logits, dim=-1).gather(1, actions.unsqueeze(1)).squeeze(1)
    entropy = -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1).mean()
    loss = -(log_probs * (rewards - baseline)).mean() - 0.01 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.9 * baseline + 0.1 * rewards.mean().item()
    print(f"iteration {iteration} reward {rewards.mean().item():.4f} loss {loss.item():.6f}")
torch.save(policy.state_dict(), "checkpoint.pt")
