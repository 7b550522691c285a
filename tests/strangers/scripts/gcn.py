"""A graph convolutional network written by hand, over a sparse adjacency matrix."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim, use_bias=False):
        super().__init__()
        self.kernel = nn.Parameter(torch.Tensor(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)
        self.bias = None
        if use_bias:
            self.bias = nn.Parameter(torch.Tensor(output_dim))
            nn.init.zeros_(self.bias)

    def forward(self, input_tensor, adj_mat):
        support = torch.mm(input_tensor, self.kernel)
        output = torch.spmm(adj_mat, support)
        if self.bias is not None:
            output = output + self.bias
        return output


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim, use_bias=True, dropout_p=0.1):
        super().__init__()
        self.gc1 = GraphConv(input_dim, hidden_dim, use_bias=use_bias)
        self.gc2 = GraphConv(hidden_dim, output_dim, use_bias=use_bias)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input_tensor, adj_mat):
        x = self.gc1(input_tensor, adj_mat)
        x = F.relu(x)
        x = self.dropout(x)
        x = self.gc2(x, adj_mat)
        return F.log_softmax(x, dim=1)


def citations(nodes, words, classes, device):
    """Papers that cite others of their own subject more often, and share words with them."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (nodes,), generator=generator)
    same = labels[:, None] == labels[None, :]
    chance = torch.where(same, 0.06, 0.006)
    adj_mat = (torch.rand(nodes, nodes, generator=generator) < chance).float().triu(1)
    adj_mat = adj_mat + adj_mat.T + torch.eye(nodes)
    topic = torch.arange(words)[None, :] % classes == labels[:, None]
    features = torch.rand(nodes, words, generator=generator) < torch.where(topic, 0.12, 0.05)
    features = features.float()
    features = features / features.sum(dim=1, keepdim=True).clamp(min=1)
    degree_mat = torch.diag(adj_mat.sum(dim=1).rsqrt()).to_sparse()
    adj_mat = degree_mat @ adj_mat @ degree_mat
    return features.to_sparse().to(device), labels.to(device), adj_mat.to_sparse().to(device)


def train_iter(epoch, model, optimizer, criterion, input, target, mask_train, mask_val, every):
    model.train()
    optimizer.zero_grad()
    output = model(*input)
    loss = criterion(output[mask_train], target[mask_train])
    loss.backward()
    optimizer.step()

    loss_train, acc_train = test(model, criterion, input, target, mask_train)
    loss_val, acc_val = test(model, criterion, input, target, mask_val)
    if epoch % every == 0:
        print(f"{epoch} train {loss_train:.4f} {acc_train:.2f} val {loss_val:.4f} {acc_val:.2f}")
    return [loss.item(), loss_train, loss_val]


def test(model, criterion, input, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*input)
        output, target = output[mask], target[mask]
        loss = criterion(output, target)
        acc = (output.argmax(dim=1) == target).float().sum() / len(target)
    return loss.item(), acc.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--dropout-p", type=float, default=0.5)
    parser.add_argument("--hidden-dim", type=int, default=16)
    parser.add_argument("--val-every", type=int, default=10)
    parser.add_argument("--include-bias", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    features, labels, adj_mat = citations(240, 60, 4, device)
    idx = torch.randperm(len(labels)).to(device)
    idx_test, idx_val, idx_train = idx[:60], idx[60:120], idx[120:]
    input_dim, classes = features.shape[1], labels.max().item() + 1

    gcn = GCN(input_dim, args.hidden_dim, classes, args.include_bias, args.dropout_p).to(device)
    optimizer = Adam(gcn.parameters(), lr=args.lr, weight_decay=args.l2)
    criterion = nn.NLLLoss()
    losses = []
    for epoch in range(1, args.epochs + 1):
        losses += train_iter(
            epoch, gcn, optimizer, criterion, (features, adj_mat), labels, idx_train, idx_val,
            args.val_every,
        )  # fmt: skip
    loss_test, acc_test = test(gcn, criterion, (features, adj_mat), labels, idx_test)
    print(f"test: loss {loss_test:.4f} accuracy {acc_test:.4f}")
    return [*losses, loss_test]


if __name__ == "__main__":
    main()
