"""Knowledge distillation: a frozen teacher, a student that learns from its soft targets."""

import torch
import torch.nn.functional as F
from torch import nn


def net(width, depth):
    layers = [nn.Linear(16, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 5))


def distillation_loss(student_logits, teacher_logits, labels, T=2.0, alpha=0.7):
    soft = nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1)
    ) * (T * T)
    return alpha * soft + (1 - alpha) * F.cross_entropy(student_logits, labels)


torch.manual_seed(0)
teacher, student = net(96, 3), net(32, 2)
mapping = torch.randn(16, 5)

optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
for step in range(6):
    x = torch.randn(24, 16)
    loss = F.cross_entropy(teacher(x), (x @ mapping).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"teacher step {step} loss {loss.item():.6f}")

teacher.eval()
for p in teacher.parameters():
    p.requires_grad = False
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
student.train()
for step in range(12):
    x = torch.randn(24, 16)
    labels = (x @ mapping).argmax(1)
    with torch.no_grad():
        teacher_logits = teacher(x)
    loss = distillation_loss(student(x), teacher_logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"student step {step} loss {loss.item():.6f}")
torch.save(student.state_dict(), "checkpoint.pt")
