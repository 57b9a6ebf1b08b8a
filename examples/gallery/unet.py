"""Segments medical slices with a U-Net, by Dice loss and cross-entropy."""

import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, random_split

logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
CHECKPOINTS = Path("checkpoints")


class Slices(Dataset):
    """Discs on noise, as if they were organs."""

    def __init__(self, n=200, size=256, classes=4):
        self.n, self.size, self.classes = n, size, classes

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        rng = np.random.default_rng(idx)
        image = rng.normal(0, 0.2, (self.size, self.size)).astype(np.float32)
        mask = np.zeros((self.size, self.size), dtype=np.int64)
        ys, xs = np.mgrid[: self.size, : self.size]
        for organ in range(1, self.classes):
            cy, cx, r = rng.integers(40, self.size - 40, 2).tolist() + [rng.integers(10, 40)]
            inside = (ys - cy) ** 2 + (xs - cx) ** 2 < r**2
            mask[inside] = organ
            image[inside] += organ * 0.3
        return {"image": torch.as_tensor(image).unsqueeze(0), "mask": torch.as_tensor(mask)}


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, channels=1, classes=4, base=64):
        super().__init__()
        widths = [base, base * 2, base * 4, base * 8, base * 16]
        self.inc = double_conv(channels, widths[0])
        self.downs = nn.ModuleList([double_conv(a, b) for a, b in zip(widths, widths[1:])])
        self.ups = nn.ModuleList(
            [nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:])][::-1]
        )
        self.merges = nn.ModuleList([double_conv(2 * a, a) for a in widths[:-1]][::-1])
        self.outc = nn.Conv2d(base, classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.downs:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(self.ups, self.merges):
            skip = skips.pop()
            x = up(x)
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = merge(torch.cat([skip, x], dim=1))
        return self.outc(x)


def dice_loss(probs, target, epsilon=1e-6):
    assert probs.size() == target.size()
    inter = 2 * (probs * target).sum(dim=(-1, -2))
    sets = probs.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets = torch.where(sets == 0, inter, sets)
    return 1 - ((inter + epsilon) / (sets + epsilon)).mean()


@torch.inference_mode()
def evaluate(net, loader, device):
    net.eval()
    scores = []
    for batch in loader:
        probs = net(batch["image"].to(device)).softmax(1)
        true = F.one_hot(batch["mask"].to(device), net.outc.out_channels).permute(0, 3, 1, 2).float()
        scores.append(1 - dice_loss(probs, true).item())
    net.train()
    return sum(scores) / len(scores)


def train_model(epochs=5, batch_size=8, lr=1e-4, val_percent=0.1, amp=True):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    amp = amp and device.type == "cuda"
    model = UNet().to(device=device, memory_format=torch.channels_last)
    dataset = Slices()
    n_val = int(len(dataset) * val_percent)
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val])
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size, num_workers=2, pin_memory=True)
    val_loader = DataLoader(val_set, batch_size=batch_size, drop_last=True)
    logging.info("%d slices to train on, %d to check with, on %s", len(train_set), n_val, device)

    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in train_loader:
            images = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            masks = batch["mask"].to(device=device, dtype=torch.long)
            with torch.autocast(device.type, enabled=amp):
                logits = model(images)
                loss = criterion(logits, masks)
                one_hot = F.one_hot(masks, 4).permute(0, 3, 1, 2).float()
                loss += dice_loss(F.softmax(logits, dim=1).float(), one_hot)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            logging.info("epoch %d loss %.4f", epoch, loss.item())
        score = evaluate(model, val_loader, device)
        scheduler.step(score)
        CHECKPOINTS.mkdir(exist_ok=True)
        torch.save(model.state_dict(), CHECKPOINTS / f"epoch{epoch}.pth")


if __name__ == "__main__":
    train_model()
