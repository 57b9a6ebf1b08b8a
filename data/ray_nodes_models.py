"""The models behind the runs of ray_nodes_campaign whose model source is "python". Each function takes the batch size and returns (module, inputs, loss)."""
import torch
import torch.nn.functional as F
from torch import nn


def convnet(batch):
    blocks = [layer for i, o in ((3, 32), (32, 64), (64, 128)) for layer in (nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))]
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))
    targets = torch.randint(0, 10, (batch,))
    return net, (torch.randn(batch, 3, 32, 32),), lambda out: F.cross_entropy(out, targets)


def mlp(batch):
    net = nn.Sequential(nn.Linear(784, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
    targets = torch.randint(0, 10, (batch,))
    return net, (torch.randn(batch, 784),), lambda out: F.cross_entropy(out, targets)


class Transformer(nn.Module):
    def __init__(self, vocab, width, heads, ffn, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, heads, ffn, batch_first=True), depth)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.out(self.layers(self.embed(tokens)))


def transformer(batch):
    tokens = torch.randint(0, 1000, (batch, 64))
    return Transformer(1000, 96, 4, 384, 3), (tokens,), lambda out: F.cross_entropy(out.flatten(0, 1), tokens.flatten())
