"""Names and their languages, a letter at a time, one name a step: the classic tutorial."""

import torch
from torch import nn

torch.manual_seed(0)
names = {
    "dutch": ["jansen", "devries", "bakker"],
    "welsh": ["evans", "lloyd", "price"],
    "latin": ["marcus", "julia", "livia"],
}
letters = "abcdefghijklmnopqrstuvwxyz"
categories = list(names)


class RNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.h2o = nn.Linear(hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, input, hidden):
        hidden = torch.tanh(self.i2h(torch.cat((input, hidden), 1)))
        return self.softmax(self.h2o(hidden)), hidden

    def initHidden(self):
        return torch.zeros(1, self.hidden_size)


def line_to_tensor(line):
    tensor = torch.zeros(len(line), 1, len(letters))
    for i, letter in enumerate(line):
        tensor[i][0][letters.index(letter)] = 1
    return tensor


rnn = RNN(len(letters), 32, len(categories))
criterion = nn.NLLLoss()
for iteration in range(12):
    category = categories[iteration % 3]
    line = names[category][(iteration // 3) % 3]
    category_tensor = torch.tensor([categories.index(category)])
    hidden = rnn.initHidden()
    rnn.zero_grad()
    for letter in line_to_tensor(line):
        output, hidden = rnn(letter, hidden)
    loss = criterion(output, category_tensor)
    loss.backward()
    for p in rnn.parameters():
        p.data.add_(p.grad.data, alpha=-0.05)
    guess = categories[output.topk(1)[1][0].item()]
    print(f"{iteration} {loss.item():.6f} {line} / {guess} {'✓' if guess == category else '✗ (' + category + ')'}")
torch.save(rnn.state_dict(), "checkpoint.pt")
