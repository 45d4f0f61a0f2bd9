"""nn.DataParallel around the model, as scripts do that may find several GPUs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(input_size, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.out = nn.Linear(32, output_size)

    def forward(self, input):
        return self.out(self.fc(input))


torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = DataLoader(dataset=RandomDataset(10, 180), batch_size=15, shuffle=True)
model = Model(10, 2)
if torch.cuda.device_count() > 1:
    print("Let's use", torch.cuda.device_count(), "GPUs!")
model = nn.DataParallel(model)
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for i, data in enumerate(loader):
    input = data.to(device)
    output = model(input)
    loss = (output - input[:, :2].sin()).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("Outside: input size", tuple(input.size()), "output_size", tuple(output.size()), f"loss {loss.item():.6f}")
torch.save(model.module.state_dict(), "checkpoint.pt")
