"""A neural ordinary differential equation, integrated by Runge-Kutta steps, learns a spiral."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser("neural ODE")
parser.add_argument("--method", choices=["euler", "rk4"], default="rk4")
parser.add_argument("--data_size", type=int, default=1000)
parser.add_argument("--batch_time", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=256)
parser.add_argument("--niters", type=int, default=2000)
parser.add_argument("--test_freq", type=int, default=20)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
true_y0 = torch.tensor([[2.0, 0.0]]).to(device)
t = torch.linspace(0.0, 25.0, args.data_size).to(device)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]).to(device)


def step(f, t, dt, y):
    if args.method == "euler":
        return y + dt * f(t, y)
    k1 = f(t, y)
    k2 = f(t + dt / 2, y + dt * k1 / 2)
    k3 = f(t + dt / 2, y + dt * k2 / 2)
    k4 = f(t + dt, y + dt * k3)
    return y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6


def odeint(f, y0, ts):
    ys = [y0]
    for t0, t1 in zip(ts[:-1], ts[1:]):
        ys.append(step(f, t0, t1 - t0, ys[-1]))
    return torch.stack(ys)


with torch.no_grad():
    true_y = odeint(lambda t, y: (y**3) @ true_A, true_y0, t)


def get_batch():
    s = torch.randint(0, args.data_size - args.batch_time, (args.batch_size,), device=device)
    batch_y0 = true_y[s]
    batch_t = t[: args.batch_time]
    batch_y = torch.stack([true_y[s + i] for i in range(args.batch_time)], dim=0)
    return batch_y0, batch_t, batch_y


class ODEFunc(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
        )
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.05)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


if __name__ == "__main__":
    func = ODEFunc().to(device)
    optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
    for itr in range(1, args.niters + 1):
        optimizer.zero_grad()
        batch_y0, batch_t, batch_y = get_batch()
        pred_y = odeint(func, batch_y0, batch_t)
        loss = torch.mean(torch.abs(pred_y - batch_y))
        loss.backward()
        optimizer.step()
        if itr % args.test_freq == 0:
            with torch.no_grad():
                test_loss = torch.mean(torch.abs(odeint(func, true_y0, t) - true_y))
                print(f"iteration {itr}: total loss {test_loss.item():.6f}")
