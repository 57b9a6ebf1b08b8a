"""Face verification: one network embeds anchor, positive and negative; triplet loss on the three."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Triplets(Dataset):
    def __init__(self, people=200, photos=5, size=112):
        self.people, self.photos, self.size = people, photos, size

    def photo(self, person, number):
        base = torch.Generator().manual_seed(person)
        face = torch.rand(3, self.size, self.size, generator=base)
        noise = torch.rand(3, self.size, self.size, generator=base.manual_seed(person * 97 + number))
        return 0.7 * face + 0.3 * noise

    def __len__(self):
        return self.people * self.photos

    def __getitem__(self, i):
        person, number = divmod(i, self.photos)
        other = int(torch.randint(1, self.people, (1,)))
        return (
            self.photo(person, number),
            self.photo(person, (number + 1) % self.photos),
            self.photo((person + other) % self.people, number),
        )


class DepthwiseBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        mid = cin * 2
        self.body = nn.Sequential(
            nn.Conv2d(cin, mid, 1, bias=False),
            nn.BatchNorm2d(mid),
            nn.PReLU(mid),
            nn.Conv2d(mid, mid, 3, stride, 1, groups=mid, bias=False),
            nn.BatchNorm2d(mid),
            nn.PReLU(mid),
            nn.Conv2d(mid, cout, 1, bias=False),
            nn.BatchNorm2d(cout),
        )
        self.residual = stride == 1 and cin == cout

    def forward(self, x):
        return x + self.body(x) if self.residual else self.body(x)


class FaceNet(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        blocks = [nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.PReLU(64)]
        cin = 64
        for cout, repeats, stride in [(64, 4, 2), (128, 6, 2), (128, 4, 1), (256, 2, 2)]:
            for i in range(repeats):
                blocks.append(DepthwiseBlock(cin, cout, stride if i == 0 else 1))
                cin = cout
        self.trunk = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, dim))

    def forward(self, x):
        return nn.functional.normalize(self.head(self.trunk(x)))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = FaceNet().to(device)
criterion = nn.TripletMarginWithDistanceLoss(
    distance_function=lambda a, b: 1 - nn.functional.cosine_similarity(a, b), margin=0.3
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
loader = DataLoader(Triplets(), batch_size=32, shuffle=True)


def train_step(anchor, positive, negative):
    net.train()
    optimizer.zero_grad()
    loss = criterion(net(anchor), net(positive), net(negative))
    loss.backward()
    optimizer.step()
    return loss


if __name__ == "__main__":
    for epoch in range(10):
        for i, batch in enumerate(loader):
            loss = train_step(*[photos.to(device) for photos in batch])
            print(f"[{epoch}:{i}] {loss.item():.4f}")
