"""Deep Q-learning on a corridor, with replay memory and a soft-updated target network."""

import random
from collections import deque, namedtuple

import torch
from torch import nn

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
random.seed(0)
torch.manual_seed(0)
LENGTH, BATCH, GAMMA, TAU = 10, 16, 0.95, 0.05


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(LENGTH, 48)
        self.layer2 = nn.Linear(48, 48)
        self.layer3 = nn.Linear(48, 2)

    def forward(self, x):
        x = torch.relu(self.layer1(x))
        x = torch.relu(self.layer2(x))
        return self.layer3(x)


policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory = deque(maxlen=200)


def encode(position):
    return torch.nn.functional.one_hot(torch.tensor([position]), LENGTH).float()


def select_action(state, eps):
    if random.random() > eps:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]])


def optimize_model():
    if len(memory) < BATCH:
        return None
    batch = Transition(*zip(*random.sample(memory, BATCH)))
    mask = torch.tensor([s is not None for s in batch.next_state])
    non_final = torch.cat([s for s in batch.next_state if s is not None])
    values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    next_values = torch.zeros(BATCH)
    with torch.no_grad():
        next_values[mask] = target_net(non_final).max(1).values
    expected = next_values * GAMMA + torch.cat(batch.reward)
    loss = nn.SmoothL1Loss()(values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.item()


position = LENGTH // 2
for step in range(32):
    state = encode(position)
    action = select_action(state, eps=0.5)
    position += 1 if action.item() else -1
    done = position in (0, LENGTH - 1)
    reward = torch.tensor([1.0 if position == LENGTH - 1 else -0.1])
    memory.append(Transition(state, action, None if done else encode(position), reward))
    loss = optimize_model()
    if loss is not None:
        print(f"step {step} loss {loss:.6f}")
    target_state, policy_state = target_net.state_dict(), policy_net.state_dict()
    for key in policy_state:
        target_state[key] = policy_state[key] * TAU + target_state[key] * (1 - TAU)
    target_net.load_state_dict(target_state)
    if done:
        position = LENGTH // 2
torch.save(policy_net.state_dict(), "checkpoint.pt")
