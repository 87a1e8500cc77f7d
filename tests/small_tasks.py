"""Small training problems for the laws of the inner loop and of hypergradients, and deliberately bad ones."""

import math

import torch
from torch import Tensor

from metamd.potentials import MaxDiagonal
from metamd.tasks import Task

F64 = torch.float64


class Small(Task):
    """Everything a test task needs but its init and loss."""

    def __init__(self, seed: int = 0, steps: int = 10) -> None:
        super().__init__({"seed": seed}, steps)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=F64)

    def batch(self, step: int) -> Tensor:
        return torch.tensor(float(step), dtype=F64)

    def evaluate(self, params, split="test"):
        raise AssertionError("meta-training must not evaluate")

    def init(self):
        return {n: x.clone() for n, x in self.start.items()}


class Quadratic(Small):
    """1/2 x'Ax - (b + noise_t)'x over two tensors, A dense; `wave` adds a part that is not quadratic."""

    def __init__(self, seed=0, steps=10, size=5, wave=0.0, noise=0.0) -> None:
        super().__init__(seed, steps)
        root = self.normal(size, size)
        self.A = root @ root.T / size + 0.2 * torch.eye(size, dtype=F64)
        self.b, self.noise, self.wave = self.normal(size), noise * self.normal(steps, size), wave
        point = self.normal(size)
        self.start = {"a": point[:2].clone(), "b": point[2:].clone()}

    def batch(self, step):
        return self.b + self.noise[step % len(self.noise)]

    def loss(self, params, batch):
        x = torch.cat([params["a"], params["b"]])
        return 0.5 * x @ self.A @ x - batch @ x + self.wave * torch.cos(2 * x).sum()

    def solution(self):
        x = torch.linalg.solve(self.A, self.b)
        return {"a": x[:2], "b": x[2:]}


class Regression(Small):
    """Least squares with several outputs and correlated inputs: convex, and curved alike for every output."""

    def __init__(self, seed=0, steps=12, outputs=3, inputs=5, spread=2.0) -> None:
        super().__init__(seed, steps)
        q, _ = torch.linalg.qr(torch.randn(inputs, inputs, generator=torch.Generator().manual_seed(99), dtype=F64))
        self.x = self.normal(256, inputs) @ (q * torch.logspace(0, -spread, inputs, dtype=F64)) @ q.T
        self.y = self.x @ self.normal(inputs, outputs) + 0.1 * self.normal(256, outputs)
        self.start = {"fc.weight": self.normal(outputs, inputs), "fc.bias": self.normal(outputs)}

    def batch(self, step):
        return torch.arange(step * 64, step * 64 + 64) % 256

    def loss(self, params, batch):
        residual = self.x[batch] @ params["fc.weight"].T + params["fc.bias"] - self.y[batch]
        return 0.5 * residual.square().sum(1).mean()


class Separable(Small):
    """1/2 sum a_i (x_i - c_i)^2."""

    def __init__(self, seed=0, steps=10, curvatures=(0.3, 14.0, 2.0)) -> None:
        super().__init__(seed, steps)
        self.a = torch.tensor(curvatures, dtype=F64)
        self.c = self.normal(len(curvatures))
        self.start = {"x": self.normal(len(curvatures))}

    def loss(self, params, batch):
        return 0.5 * (self.a * (params["x"] - self.c) ** 2).sum()


class Logistic(Small):
    """Logistic regression in minibatches: convex."""

    def __init__(self, seed=0, steps=10, size=6) -> None:
        super().__init__(seed, steps)
        self.x = self.normal(64, size)
        self.y = (self.x @ self.normal(size) + self.normal(64) > 0).to(F64)
        self.start = {"w": 0.5 * self.normal(size), "b": 0.5 * self.normal(1)}

    def batch(self, step):
        rows = torch.arange(step * 8, step * 8 + 8) % 64
        return self.x[rows], self.y[rows]

    def loss(self, params, batch):
        x, y = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(x @ params["w"] + params["b"], y)


class TanhNet(Small):
    """A two-layer tanh network on random regression data."""

    def __init__(self, seed=0, steps=10, width=5, dtype=F64) -> None:
        super().__init__(seed, steps)
        self.x, self.y = self.normal(40, 4).to(dtype), self.normal(40, 2).to(dtype)
        shapes = {"0.weight": (width, 4), "0.bias": (width,), "2.weight": (2, width), "2.bias": (2,)}
        self.start = {n: (0.5 * self.normal(*s)).to(dtype) for n, s in shapes.items()}

    def batch(self, step):
        rows = torch.arange(step * 10, step * 10 + 10) % 40
        return self.x[rows], self.y[rows]

    def loss(self, params, batch):
        x, y = batch
        hidden = torch.tanh(x @ params["0.weight"].mT + params["0.bias"])
        return ((hidden @ params["2.weight"].mT + params["2.bias"] - y) ** 2).mean()


class ConvNet(Small):
    """A smooth convolutional network: convolution, batch statistics, softplus, average pooling, linear."""

    def __init__(self, seed=0, steps=6) -> None:
        super().__init__(seed, steps)
        self.x, self.y = self.normal(8, 1, 6, 6), torch.arange(8) % 3
        shapes = {"0.weight": (2, 1, 3, 3), "0.bias": (2,), "1.weight": (2,), "3.weight": (3, 8), "3.bias": (3,)}
        self.start = {n: 0.5 * self.normal(*s) for n, s in shapes.items()}

    def loss(self, params, batch):
        f = torch.nn.functional
        h = f.conv2d(self.x, params["0.weight"], params["0.bias"])
        h = f.softplus(f.batch_norm(h, None, None, params["1.weight"], training=True))
        h = f.avg_pool2d(h, 2).flatten(1)
        return f.cross_entropy(h @ params["3.weight"].mT + params["3.bias"], self.y)


class NoisyCoordinate(Small):
    """One coordinate with curvature; one of noise that all but cancels over the run, as batches of one epoch do."""

    def __init__(self, seed=0, steps=50) -> None:
        super().__init__(seed, steps)
        noise = self.normal(steps)
        noise -= noise.mean()
        self.noise = noise + 0.3 * noise.norm() / steps  # |sum g| = 0.3 sqrt(sum g^2), up to the second order
        self.start = {"signal": self.normal(1) + 3, "noise": torch.zeros(1, dtype=F64)}

    def batch(self, step):
        return self.noise[step % len(self.noise)]

    def loss(self, params, batch):
        return 0.5 * params["signal"].square().sum() + batch * params["noise"].sum()


class BecomesNaN(Separable):
    def __init__(self, at: int, **options) -> None:
        super().__init__(**options)
        self.at = at

    def batch(self, step):
        return torch.tensor(math.nan if step == self.at else 0.0, dtype=F64)

    def loss(self, params, batch):
        return super().loss(params, batch) + batch


def potential_for(task: Task, pieces=1, seed=0, *, log=1.0, spread=0.5, offsets=0.0, **options) -> MaxDiagonal:
    """A potential bound to a task, with random metrics around exp(log)."""
    g = torch.Generator().manual_seed(seed)
    phi = MaxDiagonal(pieces, **options).bind(task.init())
    with torch.no_grad():
        for leaf in phi.log_d.values():
            leaf.copy_(log + spread * torch.randn(leaf.shape, generator=g, dtype=leaf.dtype))
        phi.offsets.copy_(offsets * torch.randn(pieces, generator=g, dtype=F64))
    return phi
