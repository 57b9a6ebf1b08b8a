"""Plant diseases, Kaggle style: a pretrained EfficientNet with mixup, label smoothing and folds
(downloads its weights)."""

import random

import numpy as np
import pandas as pd
import timm
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm


class CFG:
    model_name = "efficientnet_b2"
    size = 256
    batch_size = 32
    epochs = 5
    lr = 1e-4
    weight_decay = 1e-6
    target_size = 5
    n_fold = 5
    trn_fold = [0]
    mixup_alpha = 0.4
    smoothing = 0.1
    max_grad_norm = 1000
    seed = 42
    print_freq = 10


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


class TrainDataset(Dataset):
    def __init__(self, df):
        self.labels = df["label"].values

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        image = np.random.randint(0, 256, (CFG.size, CFG.size, 3), dtype=np.uint8)
        image = torch.from_numpy(image).permute(2, 0, 1).float() / 255.0
        return image, torch.tensor(self.labels[idx]).long()


class CustomModel(nn.Module):
    def __init__(self, name=CFG.model_name, pretrained=False):
        super().__init__()
        self.model = timm.create_model(name, pretrained=pretrained)
        n_features = self.model.classifier.in_features
        self.model.classifier = nn.Linear(n_features, CFG.target_size)

    def forward(self, x):
        return self.model(x)


def mixup(x, y, alpha):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(x.size(0)).to(x.device)
    return lam * x + (1 - lam) * x[index], y, y[index], lam


class AverageMeter:
    def __init__(self):
        self.sum = self.count = self.avg = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count


def train_fn(loader, model, criterion, optimizer, scheduler, scaler, epoch):
    losses = AverageMeter()
    model.train()
    for step, (images, labels) in enumerate(tqdm(loader)):
        images, labels = images.to(device), labels.to(device)
        images, labels_a, labels_b, lam = mixup(images, labels, CFG.mixup_alpha)
        with torch.amp.autocast(device.type, enabled=device.type == "cuda"):
            y_preds = model(images)
            loss = lam * criterion(y_preds, labels_a) + (1 - lam) * criterion(y_preds, labels_b)
        losses.update(loss.item(), labels.size(0))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        if step % CFG.print_freq == 0:
            print(f"epoch {epoch} [{step}/{len(loader)}] loss {losses.avg:.4f} grad {grad_norm:.4f}")
    return losses.avg


def train_loop(folds, fold):
    train_folds = folds[folds["fold"] != fold].reset_index(drop=True)
    loader = DataLoader(
        TrainDataset(train_folds),
        CFG.batch_size,
        shuffle=True,
        num_workers=4,
        pin_memory=True,
        drop_last=True,
    )
    model = CustomModel(pretrained=True).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay, amsgrad=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10, eta_min=1e-6)
    criterion = nn.CrossEntropyLoss(label_smoothing=CFG.smoothing)
    scaler = torch.amp.GradScaler(enabled=device.type == "cuda")
    for epoch in range(CFG.epochs):
        print(epoch, train_fn(loader, model, criterion, optimizer, scheduler, scaler, epoch))
        torch.save({"model": model.state_dict()}, f"{CFG.model_name}_fold{fold}.pth")


if __name__ == "__main__":
    seed_everything(CFG.seed)
    train = pd.DataFrame({"label": np.random.randint(0, CFG.target_size, 1000)})
    train["fold"] = np.arange(len(train)) % CFG.n_fold
    for fold in CFG.trn_fold:
        train_loop(train, fold)
