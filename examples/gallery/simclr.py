"""Contrastive pretraining: two views of each image, pulled together against all others of the batch."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import models, transforms
from torchvision.datasets import FakeData


class TwoViews:
    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image):
        return self.transform(image), self.transform(image)


def augmentation(size):
    jitter = transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.ToTensor(),
        ]
    )


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.backbone = models.resnet18(weights=None)
        features = self.backbone.fc.in_features
        self.backbone.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.backbone.maxpool = nn.Identity()
        self.backbone.fc = nn.Identity()
        self.projector = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(inplace=True), nn.Linear(features, dim)
        )

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent(z1, z2, temperature):
    n = z1.size(0)
    z = torch.cat([z1, z2])
    similarity = z @ z.T / temperature
    itself = torch.eye(2 * n, dtype=torch.bool, device=z.device)
    similarity = similarity[~itself].view(2 * n, 2 * n - 1)
    # with the diagonal cut out, the partner of row i sits one to the left for the first half
    labels = torch.cat([torch.arange(n - 1, 2 * n - 1), torch.arange(0, n)]).to(z.device)
    accuracy = (similarity.argmax(1) == labels).float().mean()
    return F.cross_entropy(similarity, labels), accuracy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", default=256, type=int)
    parser.add_argument("--epochs", default=100, type=int)
    parser.add_argument("--temperature", default=0.07, type=float)
    parser.add_argument("--lr", default=3e-4, type=float)
    parser.add_argument("--workers", default=2, type=int)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = FakeData(2048, (3, 40, 40), transform=TwoViews(augmentation(32)))
    loader = DataLoader(
        data, args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True
    )
    model = SimCLR().to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))

    for epoch in range(args.epochs):
        for (view1, view2), _ in loader:
            images = torch.cat([view1, view2]).to(device)
            z1, z2 = model(images).chunk(2)
            loss, accuracy = nt_xent(z1, z2, args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}, top-1 {accuracy.item():.2%}")
        if epoch >= 10:
            scheduler.step()


if __name__ == "__main__":
    main()
