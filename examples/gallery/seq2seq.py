"""Translation with a GRU encoder, additive attention and a decoder that runs word by word."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

PAD, SOS, EOS = 0, 1, 2
SOURCE_VOCAB, TARGET_VOCAB = 8000, 6000


class Pairs(Dataset):
    def __init__(self, n=4000, longest=24):
        rng = random.Random(7)
        self.pairs = []
        for _ in range(n):
            length = rng.randint(5, longest)
            source = [rng.randrange(3, SOURCE_VOCAB) for _ in range(length)]
            target = [token % (TARGET_VOCAB - 3) + 3 for token in reversed(source)]
            self.pairs.append((source + [EOS], [SOS, *target, EOS]))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def collate(pairs):
    def pad(rows):
        rows = [torch.tensor(row) for row in rows]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)

    source, target = zip(*pairs)
    return pad(source), torch.tensor([len(s) for s in source]), pad(target)


class Encoder(nn.Module):
    def __init__(self, vocab, width=512, dropout=0.3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=PAD)
        self.gru = nn.GRU(
            width, width // 2, num_layers=2, batch_first=True, bidirectional=True, dropout=dropout
        )

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        states, last = self.gru(packed)
        states, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        return states, torch.cat([last[-2], last[-1]], dim=1)


class Decoder(nn.Module):
    def __init__(self, vocab, width=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=PAD)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.energy = nn.Linear(width, 1)
        self.cell = nn.GRUCell(2 * width, width)
        self.out = nn.Linear(2 * width, vocab)

    def forward(self, token, hidden, states, keys, mask):
        scores = self.energy(torch.tanh(self.query(hidden).unsqueeze(1) + keys)).squeeze(-1)
        weights = scores.masked_fill(mask, -1e9).softmax(dim=1)
        context = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
        hidden = self.cell(torch.cat([self.embed(token), context], dim=1), hidden)
        return self.out(torch.cat([hidden, context], dim=1)), hidden


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder(SOURCE_VOCAB)
        self.decoder = Decoder(TARGET_VOCAB)

    def forward(self, source, lengths, target, teacher_forcing=0.5):
        states, hidden = self.encoder(source, lengths)
        keys = self.decoder.key(states)
        mask = source[:, : states.size(1)] == PAD
        token, outputs = target[:, 0], []
        for t in range(1, target.size(1)):
            logits, hidden = self.decoder(token, hidden, states, keys, mask)
            outputs.append(logits)
            token = target[:, t] if random.random() < teacher_forcing else logits.argmax(dim=1)
        return torch.stack(outputs, dim=1)


def train(model, loader, optimizer, device, clip=1.0):
    model.train()
    total = 0.0
    for source, lengths, target in loader:
        source, target = source.to(device), target.to(device)
        optimizer.zero_grad()
        logits = model(source, lengths, target)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        total += loss.item()
    return total / len(loader)


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Pairs(), batch_size=64, shuffle=True, collate_fn=collate)
    model = Seq2Seq().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        print(epoch, train(model, loader, optimizer, device))
