# ResNet-18 on CIFAR-10 with mixed precision and a one-cycle schedule (downloads CIFAR-10)
import time

import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as T
from torch.utils.data import DataLoader

EPOCHS = 30
BATCH_SIZE = 512
MAX_LR = 0.4

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.backends.cudnn.benchmark = True

mean, std = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
train_tf = T.Compose(
    [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)]
)
test_tf = T.Compose([T.ToTensor(), T.Normalize(mean, std)])
train_data = torchvision.datasets.CIFAR10(root="data", train=True, download=True, transform=train_tf)
test_data = torchvision.datasets.CIFAR10(root="data", train=False, download=True, transform=test_tf)
train_loader = DataLoader(
    train_data, BATCH_SIZE, shuffle=True, num_workers=2, pin_memory=True, drop_last=True
)
test_loader = DataLoader(test_data, 1024, num_workers=2, pin_memory=True)


class Residual(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.a = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.na = nn.BatchNorm2d(cout)
        self.b = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.nb = nn.BatchNorm2d(cout)
        self.short = nn.Sequential()
        if stride > 1 or cin != cout:
            self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = self.na(self.a(x)).relu()
        out = self.nb(self.b(out))
        out += self.short(x)
        return out.relu()


def resnet18(classes=10):
    layers = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    cin = 64
    for width, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers += [Residual(cin, width, stride), Residual(width, width)]
        cin = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


model = resnet18().to(device, memory_format=torch.channels_last)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=MAX_LR, epochs=EPOCHS, steps_per_epoch=len(train_loader)
)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

best = 0.0
for epoch in range(EPOCHS):
    model.train()
    began, seen, running = time.time(), 0, 0.0
    for images, labels in train_loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        running += loss.item() * labels.size(0)
        seen += labels.size(0)

    model.eval()
    right = 0
    with torch.inference_mode():
        for images, labels in test_loader:
            predicted = model(images.to(device)).argmax(1).cpu()
            right += (predicted == labels).sum().item()
    accuracy = right / len(test_data)
    print(f"{epoch}: loss {running / seen:.3f}, accuracy {accuracy:.2%}, {time.time() - began:.1f} s")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "best.pt")
