"""Deep Q-learning with a replay buffer and a target network, from 84 x 84 frames of a falling ball."""

import copy
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

Transition = namedtuple("Transition", "state action reward next_state done")

GAMMA = 0.99
BATCH = 32
LEARN_START = 200
TARGET_EVERY = 500
EPS_START, EPS_END, EPS_STEPS = 1.0, 0.05, 5000


class Catch:
    """Move the paddle under the ball; the last four frames are what the agent sees."""

    def reset(self):
        self.ball = [0, random.randrange(12)]
        self.paddle = 6
        self.frames = deque([self.draw()] * 4, maxlen=4)
        return np.stack(self.frames)

    def draw(self):
        frame = np.zeros((84, 84), dtype=np.uint8)
        row, col = self.ball
        frame[row * 7 : row * 7 + 7, col * 7 : col * 7 + 7] = 255
        frame[77:84, self.paddle * 7 : self.paddle * 7 + 7] = 128
        return frame

    def step(self, action):
        self.paddle = min(11, max(0, self.paddle + action - 1))
        self.ball[0] += 1
        self.frames.append(self.draw())
        done = self.ball[0] == 11
        reward = 0.0 if not done else (1.0 if self.ball[1] == self.paddle else -1.0)
        return np.stack(self.frames), reward, done


class ReplayBuffer:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, n, device):
        batch = Transition(*zip(*random.sample(self.memory, n)))
        return (
            torch.as_tensor(np.stack(batch.state), device=device).float() / 255,
            torch.as_tensor(batch.action, device=device),
            torch.as_tensor(batch.reward, dtype=torch.float32, device=device),
            torch.as_tensor(np.stack(batch.next_state), device=device).float() / 255,
            torch.as_tensor(batch.done, dtype=torch.float32, device=device),
        )

    def __len__(self):
        return len(self.memory)


class QNetwork(nn.Module):
    def __init__(self, actions=3):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
        )
        self.value = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))
        self.advantage = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions))

    def forward(self, x):
        h = self.conv(x).flatten(1)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(dim=1, keepdim=True)


class DQNAgent:
    def __init__(self, device):
        self.device = device
        self.policy = QNetwork().to(device)
        self.target = copy.deepcopy(self.policy)
        self.target.eval()
        self.optimizer = torch.optim.RMSprop(self.policy.parameters(), lr=2.5e-4, alpha=0.95, eps=0.01)
        self.buffer = ReplayBuffer(10_000)
        self.steps = 0

    def act(self, state):
        eps = EPS_END + (EPS_START - EPS_END) * max(0.0, 1 - self.steps / EPS_STEPS)
        self.steps += 1
        if random.random() < eps:
            return random.randrange(3)
        with torch.no_grad():
            q = self.policy(torch.as_tensor(state, device=self.device).float().unsqueeze(0) / 255)
            return int(q.argmax(1).item())

    def learn(self):
        state, action, reward, next_state, done = self.buffer.sample(BATCH, self.device)
        q = self.policy(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.policy(next_state).argmax(1, keepdim=True)
            target = reward + GAMMA * (1 - done) * self.target(next_state).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.policy.parameters():
            p.grad.data.clamp_(-1, 1)
        self.optimizer.step()
        if self.steps % TARGET_EVERY == 0:
            self.target.load_state_dict(self.policy.state_dict())
        return loss.item()


def main(episodes=2000):
    agent = DQNAgent(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    env, scores = Catch(), deque(maxlen=100)
    for episode in range(episodes):
        state, done, loss = env.reset(), False, 0.0
        while not done:
            action = agent.act(state)
            next_state, reward, done = env.step(action)
            agent.buffer.push(state, action, reward, next_state, done)
            state = next_state
            if len(agent.buffer) >= LEARN_START:
                loss = agent.learn()
        scores.append(reward)
        if episode % 10 == 0:
            print(f"episode {episode}: mean score {np.mean(scores):+.2f}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
