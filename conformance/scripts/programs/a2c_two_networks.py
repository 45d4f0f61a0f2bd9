"""Advantage actor-critic with separate networks and optimizers, batches of transitions."""

import torch
from torch import nn
from torch.distributions import Normal

torch.manual_seed(21)
actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)

state = torch.randn(20, 6)
for update in range(10):
    with torch.no_grad():
        action = Normal(actor(state), 0.5).sample()
    reward = -(action - state[:, :2]).pow(2).sum(-1, keepdim=True)
    next_state = torch.cat([0.9 * state[:, :4] + 0.1 * torch.randn(20, 4), action], dim=1)

    with torch.no_grad():
        target = reward + 0.9 * critic(next_state)
    value = critic(state)
    critic_loss = nn.functional.mse_loss(value, target)
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()

    advantage = (target - value).detach()
    log_prob = Normal(actor(state), 0.5).log_prob(action).sum(-1, keepdim=True)
    actor_loss = -(log_prob * advantage).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()
    print(f"update {update}: critic {critic_loss.item():.6f} actor {actor_loss.item():.6f} reward {reward.mean():.6f}")
    state = next_state
torch.save({"actor": actor.state_dict(), "critic": critic.state_dict()}, "checkpoint.pt")
