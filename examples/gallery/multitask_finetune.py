"""Age and expression from one photo: two new heads on a frozen ResNet-50 (downloads its weights)."""

import torch
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

preprocess = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
)


class Faces(torchvision.datasets.FakeData):
    """A face, its age, and one of seven expressions."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, torch.tensor(float(label)), label % 7


faces = Faces(size=512, image_size=(3, 300, 300), num_classes=90, transform=preprocess)
loader = DataLoader(faces, batch_size=32, shuffle=True, num_workers=2)

backbone = torchvision.models.resnet50(weights="DEFAULT")
for param in backbone.parameters():
    param.requires_grad = False
features = backbone.fc.in_features
backbone.fc = nn.Identity()


class Heads(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Dropout(0.4))
        self.age = nn.Linear(512, 1)
        self.expression = nn.Linear(512, 7)

    def forward(self, x):
        x = self.shared(x)
        return self.age(x).squeeze(1), self.expression(x)


backbone = backbone.to(device)
heads = Heads(features).to(device)
age_criterion = nn.L1Loss()
expression_criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(
    [
        {"params": heads.shared.parameters(), "lr": 1e-4},
        {"params": [*heads.age.parameters(), *heads.expression.parameters()], "lr": 1e-3},
    ]
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)


def train_model(num_epochs=15):
    for epoch in range(num_epochs):
        backbone.eval()
        heads.train()
        age_total, right = 0.0, 0
        for images, ages, expressions in loader:
            images, ages, expressions = images.to(device), ages.to(device), expressions.to(device)
            optimizer.zero_grad()
            predicted_age, logits = heads(backbone(images))
            age_loss = age_criterion(predicted_age, ages)
            expression_loss = expression_criterion(logits, expressions)
            (0.05 * age_loss).backward(retain_graph=True)
            expression_loss.backward()
            optimizer.step()
            age_total += age_loss.item() * images.size(0)
            right += torch.sum(logits.argmax(1) == expressions.data)
        scheduler.step()
        accuracy = right.double() / len(faces)
        print(f"{epoch}: off by {age_total / len(faces):.1f} years, expressions {accuracy:.3f}")


if __name__ == "__main__":
    train_model()
