"""Teaches a MobileNet what a ResNet-50 knows: soft targets, hard labels and a match of features."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader
from torchvision.transforms import v2

TEMPERATURE = 4.0
ALPHA = 0.7
CLASSES = 100

device = "cuda" if torch.cuda.is_available() else "cpu"


class Features:
    """Keeps what a layer gave in the last forward pass."""

    def __init__(self, layer):
        layer.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.value = output


teacher = torchvision.models.resnet50(num_classes=CLASSES).to(device)
teacher.eval()
for p in teacher.parameters():
    p.requires_grad_(False)
student = torchvision.models.mobilenet_v3_large(num_classes=CLASSES).to(device)
match = nn.Conv2d(960, 2048, 1).to(device)

teacher_features = Features(teacher.layer4)
student_features = Features(student.features)

optimizer = torch.optim.SGD(
    [*student.parameters(), *match.parameters()], lr=0.05, momentum=0.9, weight_decay=1e-4
)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 60, 80], gamma=0.1)


def distillation_loss(student_logits, teacher_logits, labels):
    soft = F.kl_div(
        F.log_softmax(student_logits / TEMPERATURE, dim=1),
        F.softmax(teacher_logits / TEMPERATURE, dim=1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(student_logits, labels)
    return ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * hard


def train_one_epoch(loader):
    student.train()
    total, correct, count = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.no_grad():
            teacher_logits = teacher(images)
        student_logits = student(images)
        loss = distillation_loss(student_logits, teacher_logits, labels)
        loss = loss + 0.1 * F.mse_loss(match(student_features.value), teacher_features.value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(images)
        correct += (student_logits.argmax(1) == labels).sum().item()
        count += len(images)
    return total / count, correct / count


if __name__ == "__main__":
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.RandomHorizontalFlip()])
    data = torchvision.datasets.FakeData(640, (3, 224, 224), CLASSES, transform=transform)
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
    for epoch in range(90):
        loss, accuracy = train_one_epoch(loader)
        scheduler.step()
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}")
