"""Graph convolution on one whole graph with a training mask."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        stdv = 1.0 / math.sqrt(out_features)
        self.weight.data.uniform_(-stdv, stdv)
        self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        return torch.spmm(adj, support) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


torch.manual_seed(42)
nodes = 40
edges = torch.rand(nodes, nodes) < 0.1
adjacency = ((edges | edges.T) | torch.eye(nodes, dtype=torch.bool)).float()
adjacency = (adjacency / adjacency.sum(1, keepdim=True)).to_sparse()
features, labels = torch.rand(nodes, 12), torch.randint(0, 3, (nodes,))
idx_train, idx_val = torch.arange(24), torch.arange(24, 40)

model = GCN(12, 16, 3, 0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(12):
    model.train()
    optimizer.zero_grad()
    output = model(features, adjacency)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        loss_val = F.nll_loss(model(features, adjacency)[idx_val], labels[idx_val])
    print(f"Epoch: {epoch:04d} loss_train: {loss_train.item():.6f} loss_val: {loss_val.item():.6f}")
torch.save(model.state_dict(), "checkpoint.pt")
