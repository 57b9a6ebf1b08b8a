"""Speech recognition with CTC: convolutions, then recurrent layers that are recomputed in the backward pass."""

import torch
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

ALPHABET = "_ abcdefghijklmnopqrstuvwxyz'"
MELS = 80


class Utterances(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        frames = int(torch.randint(400, 801, (), generator=g))
        letters = int(torch.randint(20, 81, (), generator=g))
        spectrogram = torch.randn(frames, MELS, generator=g)
        return spectrogram, torch.randint(1, len(ALPHABET), (letters,), generator=g)


def pad(batch):
    spectrograms = pad_sequence([s for s, _ in batch], batch_first=True)
    labels = pad_sequence([label for _, label in batch], batch_first=True)
    input_lengths = torch.tensor([s.shape[0] // 2 for s, _ in batch])
    label_lengths = torch.tensor([len(label) for _, label in batch])
    return spectrograms, labels, input_lengths, label_lengths


class ResidualConv(nn.Module):
    def __init__(self, channels, features):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.dropout = nn.Dropout(0.1)

    @staticmethod
    def over_features(norm, x):
        return norm(x.transpose(2, 3)).transpose(2, 3)

    def forward(self, x):  # batch, channels, features, time
        h = self.conv1(self.dropout(nn.functional.gelu(self.over_features(self.norm1, x))))
        h = self.conv2(self.dropout(nn.functional.gelu(self.over_features(self.norm2, h))))
        return x + h


class Recurrent(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.gru = nn.GRU(size, size // 2, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.gru(nn.functional.gelu(self.norm(x)))[0])


class SpeechModel(nn.Module):
    def __init__(self, size=512, conv_layers=3, rnn_layers=5):
        super().__init__()
        self.front = nn.Conv2d(1, 32, 3, stride=2, padding=1)
        self.convs = nn.ModuleList([ResidualConv(32, MELS // 2) for _ in range(conv_layers)])
        self.bridge = nn.Linear(32 * MELS // 2, size)
        self.rnns = nn.ModuleList([Recurrent(size) for _ in range(rnn_layers)])
        self.head = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, len(ALPHABET)))

    def forward(self, spectrogram):
        x = self.front(spectrogram.transpose(1, 2).unsqueeze(1))
        for conv in self.convs:
            x = checkpoint(conv, x, use_reentrant=False) if self.training else conv(x)
        x = self.bridge(x.flatten(1, 2).transpose(1, 2))
        for rnn in self.rnns:
            x = checkpoint(rnn, x, use_reentrant=False) if self.training else rnn(x)
        return self.head(x)


def greedy(log_probs, lengths):
    texts = []
    for row, length in zip(log_probs.argmax(-1), lengths):
        best = torch.unique_consecutive(row[:length]).tolist()
        texts.append("".join(ALPHABET[i] for i in best if i))
    return texts


def main(epochs=10, batch_size=16, lr=5e-4):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = SpeechModel().to(device)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    loader = DataLoader(Utterances(), batch_size, shuffle=True, collate_fn=pad)
    optimizer = optim.AdamW(model.parameters(), lr)
    scheduler = optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, steps_per_epoch=len(loader), epochs=epochs, anneal_strategy="linear"
    )
    for epoch in range(epochs):
        model.train()
        for i, (spectrograms, labels, input_lengths, label_lengths) in enumerate(loader):
            spectrograms, labels = spectrograms.to(device), labels.to(device)
            optimizer.zero_grad()
            log_probs = model(spectrograms).log_softmax(dim=2)
            loss = criterion(log_probs.transpose(0, 1), labels, input_lengths, label_lengths)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if i % 10 == 0:
                heard = greedy(log_probs.detach()[:1], input_lengths[:1])[0]
                print(
                    f"epoch {epoch} batch {i}: loss {loss.item():.3f}, lr {scheduler.get_last_lr()[0]:.1e}, {heard!r}"
                )


if __name__ == "__main__":
    main()
