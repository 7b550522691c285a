"""Graph networks of torch_geometric, on a graph of two communities that is made here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, TransformerConv
from torch_geometric.utils import stochastic_blockmodel_graph

from strangers.packages.hand_loop import by_hand
from strangers.packages.timm_models import BATCH_NORM

NODES, FEATURES, CLASSES = 60, 16, 3


def graph(draw):
    """Features, edges and labels of three communities."""
    torch.manual_seed(int(torch.randint(1000, (1,), generator=draw)))
    chances = torch.full((CLASSES, CLASSES), 0.02) + 0.2 * torch.eye(CLASSES)
    edges = stochastic_blockmodel_graph([NODES // CLASSES] * CLASSES, chances)
    labels = torch.arange(CLASSES).repeat_interleave(NODES // CLASSES)
    features = torch.randn(NODES, FEATURES, generator=draw)
    return features + F.one_hot(labels, FEATURES), edges, labels


def node_loss(model, batch):
    features, edges, labels = batch
    return F.cross_entropy(model(features, edges), labels)


class Attentive(torch.nn.Module):
    """Two layers of torch_geometric's graph transformer, as its examples stack them."""

    def __init__(self):
        super().__init__()
        self.first = TransformerConv(FEATURES, 8, heads=2, beta=True)
        self.second = TransformerConv(16, CLASSES, heads=2, concat=False, beta=True)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def made(name, model, rule=""):
    return by_hand(
        name, "torch_geometric", rule, model=model, batch=graph, loss=node_loss, lr=1e-2,
        different=1,
    )  # fmt: skip


PROGRAMS = [
    made("GCN", lambda: GCN(FEATURES, 16, 2, CLASSES)),
    made("GAT", lambda: GAT(FEATURES, 16, 2, CLASSES, heads=2)),
    made("GIN", lambda: GIN(FEATURES, 16, 2, CLASSES)),
    made("GIN, batch norm", lambda: GIN(FEATURES, 16, 2, CLASSES, norm="batch_norm"), BATCH_NORM),
    made("GraphSAGE", lambda: GraphSAGE(FEATURES, 16, 2, CLASSES)),
    made("TransformerConv", Attentive),
]
