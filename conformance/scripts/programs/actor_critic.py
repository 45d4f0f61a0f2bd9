"""Actor-critic on a pole that balances on a cart, one backward an episode."""

import math
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Pole:
    """A plain integration of the equations of the cart and its pole."""

    def reset(self):
        self.state = [0.01, 0.0, 0.02, 0.0]
        return self.state

    def step(self, action):
        x, v, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        temp = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
        spin = (9.8 * math.sin(angle) - math.cos(angle) * temp) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        push = temp - 0.05 * spin * math.cos(angle) / 1.1
        self.state = [x + 0.02 * v, v + 0.02 * push, angle + 0.02 * turn, turn + 0.02 * spin]
        return self.state, 1.0, abs(self.state[2]) > 0.21


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 64)
        self.affine2 = nn.Linear(64, 64)
        self.action_head = nn.Linear(64, 2)
        self.value_head = nn.Linear(64, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine2(F.relu(self.affine1(x))))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


torch.manual_seed(543)
model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def select_action(state):
    probs, state_value = model(torch.tensor(state))
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return action.item()


def finish_episode():
    R = 0
    returns = []
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(model.saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.item()


env = Pole()
for i_episode in range(8):
    state = env.reset()
    for _ in range(30):
        state, reward, done = env.step(select_action(state))
        model.rewards.append(reward)
        if done:
            break
    length = len(model.rewards)
    print(f"Episode {i_episode}\tLength: {length}\tLoss: {finish_episode():.4f}")
torch.save(model.state_dict(), "checkpoint.pt")
