"""Model-agnostic meta-learning on few-shot images: the outer step differentiates through inner ones."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

WAYS, SHOTS, QUERIES = 5, 1, 15
INNER_LR, INNER_STEPS, TASKS = 0.4, 3, 4


def conv_block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1),
        nn.BatchNorm2d(cout, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class ConvNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(
            conv_block(1, hidden),
            conv_block(hidden, hidden),
            conv_block(hidden, hidden),
            conv_block(hidden, hidden),
        )
        self.head = nn.Linear(hidden, WAYS)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def sample_task(device):
    prototypes = torch.rand(WAYS, 1, 28, 28, device=device)

    def draw(n):
        images = prototypes.repeat_interleave(n, dim=0)
        labels = torch.arange(WAYS, device=device).repeat_interleave(n)
        return images + 0.3 * torch.randn_like(images), labels

    return draw(SHOTS), draw(QUERIES)


def adapt(model, params, images, labels):
    for _ in range(INNER_STEPS):
        loss = F.cross_entropy(functional_call(model, params, (images,)), labels)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {name: p - INNER_LR * g for (name, p), g in zip(params.items(), grads)}
    return params


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ConvNet().to(device)
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for iteration in range(1000):
        meta_optimizer.zero_grad()
        meta_loss, accuracy = 0.0, 0.0
        for _ in range(TASKS):
            (support, support_labels), (query, query_labels) = sample_task(device)
            fast = adapt(model, dict(model.named_parameters()), support, support_labels)
            logits = functional_call(model, fast, (query,))
            meta_loss = meta_loss + F.cross_entropy(logits, query_labels) / TASKS
            accuracy += (logits.argmax(1) == query_labels).float().mean().item() / TASKS
        meta_loss.backward()
        meta_optimizer.step()
        if iteration % 10 == 0:
            print(f"{iteration}: loss {meta_loss.item():.3f}, accuracy after adapting {accuracy:.1%}")


if __name__ == "__main__":
    main()
