"""Translation as in the classic tutorial: encoder and decoder are called a word at a time, losses are added up."""

import torch
from torch import nn, optim

torch.manual_seed(8)
HIDDEN, WORDS, LENGTH = 24, 15, 5


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN)

    def forward(self, word, hidden):
        return self.gru(self.embedding(word).unsqueeze(0), hidden)


class DecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, WORDS)

    def forward(self, word, hidden):
        output, hidden = self.gru(torch.relu(self.embedding(word)).unsqueeze(0), hidden)
        return torch.log_softmax(self.out(output[0]), dim=1), hidden


encoder, decoder = EncoderRNN(), DecoderRNN()
encoder_optimizer = optim.SGD(encoder.parameters(), lr=0.1)
decoder_optimizer = optim.SGD(decoder.parameters(), lr=0.1)
criterion = nn.NLLLoss()
for iteration in range(6):
    source = torch.randint(1, WORDS, (LENGTH, 8))
    target = (source + 1) % WORDS
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    hidden = torch.zeros(1, 8, HIDDEN)
    loss = 0
    for word in source:
        _, hidden = encoder(word, hidden)
    word = torch.zeros(8, dtype=torch.long)
    for expected in target:
        output, hidden = decoder(word, hidden)
        loss += criterion(output, expected)
        word = expected
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    print(f"{iteration} {loss.item() / LENGTH:.6f}")
torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}, "checkpoint.pt")
