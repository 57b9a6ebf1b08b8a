"""A wide residual network for 32 x 32 images: a class with defaults, and a function that picks a size."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class WideBlock(nn.Module):
    def __init__(self, cin, cout, stride, drop):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(cin), nn.BatchNorm2d(cout)
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.drop = nn.Dropout(drop)
        self.project = None
        if stride != 1 or cin != cout:
            self.project = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.bn1(x))
        skip = x if self.project is None else self.project(h)
        h = self.conv1(h)
        h = self.conv2(self.drop(F.relu(self.bn2(h))))
        return skip + h


class WideResNet(nn.Module):
    def __init__(self, depth=16, widen=4, num_classes=10, drop=0.3):
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError("depth must be 6n + 4")
        blocks = (depth - 4) // 6
        widths = [16, 16 * widen, 32 * widen, 64 * widen]
        layers = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)]
        for stage, (cin, cout) in enumerate(zip(widths, widths[1:])):
            for i in range(blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                layers.append(WideBlock(cin if i == 0 else cout, cout, stride, drop))
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(widths[-1]), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(widths[-1], num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        return self.classifier(self.features(x).mean(dim=(2, 3)))


def get_model(name="wrn-16-4"):
    _, depth, widen = name.split("-")
    return WideResNet(depth=int(depth), widen=int(widen))


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = WideResNet().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for step in range(100):
        images = torch.randn(128, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (128,), device=device)
        loss = F.cross_entropy(model(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{step:4d} {loss.item():.3f}")
