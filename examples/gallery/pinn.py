"""Solves Burgers' equation with a physics-informed network: derivatives of the output by autograd."""

import math

import torch
import torch.nn as nn

NU = 0.01 / math.pi
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class PINN(nn.Module):
    def __init__(self, width=128, depth=8):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        for m in self.net:
            if isinstance(m, nn.Linear):
                nn.init.xavier_normal_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def grad(outputs, inputs):
    return torch.autograd.grad(
        outputs, inputs, grad_outputs=torch.ones_like(outputs), create_graph=True, retain_graph=True
    )[0]


def residual(model, x, t):
    u = model(x, t)
    u_x, u_t = grad(u, x), grad(u, t)
    u_xx = grad(u_x, x)
    return u_t + u * u_x - NU * u_xx


model = PINN().to(device)

# points inside, on the walls and at the start
x_f = (torch.rand(10000, 1, device=device) * 2 - 1).requires_grad_(True)
t_f = torch.rand(10000, 1, device=device).requires_grad_(True)
x_0 = torch.linspace(-1, 1, 256, device=device).view(-1, 1)
u_0 = -torch.sin(math.pi * x_0)
t_b = torch.rand(200, 1, device=device)
x_b = torch.where(torch.rand(200, 1, device=device) < 0.5, -1.0, 1.0)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9995)

for it in range(20000):
    optimizer.zero_grad()
    loss_f = residual(model, x_f, t_f).pow(2).mean()
    loss_0 = (model(x_0, torch.zeros_like(x_0)) - u_0).pow(2).mean()
    loss_b = model(x_b, t_b).pow(2).mean()
    loss = loss_f + 10 * loss_0 + loss_b
    loss.backward()
    optimizer.step()
    scheduler.step()
    if it % 10 == 0:
        print(f"{it:6d} pde {loss_f.item():.2e} start {loss_0.item():.2e} walls {loss_b.item():.2e}")
