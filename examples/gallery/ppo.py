"""Proximal policy optimization on a cart with a pole, with a small vectorised environment in numpy."""

import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class CartPoles:
    """Many carts at once; each starts anew when its pole falls."""

    def __init__(self, n, seed=0):
        self.n, self.rng = n, np.random.default_rng(seed)
        self.state = self.rng.uniform(-0.05, 0.05, size=(n, 4))
        self.age = np.zeros(n, dtype=int)

    def step(self, action):
        x, v, angle, spin = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        push = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        accel = push - 0.05 * turn * cos / 1.1
        self.state = self.state + 0.02 * np.stack([v, accel, spin, turn], axis=1)
        self.age += 1
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21) | (self.age >= 500)
        self.state[done] = self.rng.uniform(-0.05, 0.05, size=(done.sum(), 4))
        self.age[done] = 0
        return self.state.astype(np.float32), np.ones(self.n, np.float32), done


def layer(cin, cout, std=np.sqrt(2)):
    linear = nn.Linear(cin, cout)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, obs=4, actions=2, hidden=64):
        super().__init__()
        self.critic = nn.Sequential(
            layer(obs, hidden), nn.Tanh(), layer(hidden, hidden), nn.Tanh(), layer(hidden, 1, 1.0)
        )
        self.actor = nn.Sequential(
            layer(obs, hidden), nn.Tanh(), layer(hidden, hidden), nn.Tanh(), layer(hidden, actions, 0.01)
        )

    def forward(self, obs, action=None):
        dist = Categorical(logits=self.actor(obs))
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.critic(obs).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--lam", type=float, default=0.95)
    parser.add_argument("--clip", type=float, default=0.2)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    env = CartPoles(args.envs)
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    shape = (args.steps, args.envs)
    obs = torch.zeros(*shape, 4, device=device)
    actions, logps, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(5))
    current = torch.tensor(env.state, dtype=torch.float32, device=device)
    done = torch.zeros(args.envs, device=device)

    for update in range(args.updates):
        began = time.time()
        optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - update / args.updates)
        for t in range(args.steps):
            obs[t], dones[t] = current, done
            with torch.no_grad():
                action, logp, _, value = agent(current)
            actions[t], logps[t], values[t] = action, logp, value
            state, reward, ended = env.step(action.cpu().numpy())
            rewards[t] = torch.from_numpy(reward).to(device)
            current = torch.from_numpy(state).to(device)
            done = torch.from_numpy(ended.astype(np.float32)).to(device)

        with torch.no_grad():
            after = agent(current)[-1]
            advantages, running = torch.zeros_like(rewards), 0
            for t in reversed(range(args.steps)):
                alive = 1.0 - (done if t == args.steps - 1 else dones[t + 1])
                following = after if t == args.steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * following * alive - values[t]
                running = delta + args.gamma * args.lam * alive * running
                advantages[t] = running
            returns = advantages + values

        flat = [v.reshape(-1, *v.shape[2:]) for v in (obs, actions, logps, advantages, returns)]
        total = args.steps * args.envs
        for _ in range(args.epochs):
            for idx in torch.randperm(total, device=device).chunk(args.minibatches):
                o, a, old_logp, adv, ret = (v[idx] for v in flat)
                _, logp, entropy, value = agent(o, a)
                ratio = (logp - old_logp).exp()
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
                policy = -torch.min(ratio * adv, clipped * adv).mean()
                loss = policy + 0.5 * (value - ret).pow(2).mean() - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        falls = dones.sum().item()
        print(
            f"{update}: loss {loss.item():.3f}, falls {falls:.0f}, {total / (time.time() - began):.0f} steps/s"
        )


if __name__ == "__main__":
    main()
