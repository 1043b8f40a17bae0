"""Training steps as people write them, over data and tensor parallel ranks."""

from typing import Any, Final

import torch
from torch.nn import functional

from shardmap_torch import I, R, all_gather, reduce_scatter, value_and_grad
from tests.checker.support.daily import DP, N, Program, mean, registering, total
from tests.checker.support.one_device import numbers

PROGRAMS: Final[dict[str, Program]] = {}
program: Final = registering(PROGRAMS)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)
        self.fc2 = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.fc2(functional.relu(self.norm(self.fc1(x))))


NET: Final = MLP().double()
PARAMS: Final = {k: numbers(*v.shape) for k, v in NET.named_parameters()}


@program(
    (
        numbers(6, 4),
        numbers(8, 6),
        numbers(8, 4),
        torch.tensor(1024.0, dtype=torch.float64),
        torch.tensor(0),
    ),
    (N, DP, DP, N, N),
    (N, N, N, N),
    step=True,
)
def loss_scaling(w: Any, x: Any, y: Any, scale: Any, good: Any) -> Any:
    def loss(w: Any) -> Any:
        out = x.float() @ w.float()
        return mean(functional.mse_loss(out.double(), y)) * scale

    value, g = value_and_grad(loss)(w)
    g = total(g) / scale
    finite = torch.isfinite(g).all()
    norm = torch.where(finite, g.norm(), 1.0)
    g = g * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    new = torch.where(finite, w - 0.1 * g, w)
    good = torch.where(finite, good + 1, 0)
    scale = torch.where(finite, torch.where(good % 2000 == 0, scale * 2, scale), scale / 2)
    return new, scale, good, value / scale


@program(
    (numbers(6, 4), torch.zeros(6, 4, dtype=torch.float64), numbers(8, 6), numbers(8, 4)),
    (N, N, DP, DP),
    (N, N, N),
    step=True,
)
def muon(w: Any, buf: Any, x: Any, y: Any) -> Any:
    _, g = value_and_grad(lambda w: mean(functional.smooth_l1_loss(x @ w, y)))(w)
    g = total(g)
    buf = buf.lerp(g, 0.05)
    z = g.lerp(buf, 0.95)
    z = z.T / (z.norm() + 1e-7)
    for _ in range(3):
        a = z @ z.T
        z = 3.4445 * z + (-4.775 * a + 2.0315 * a @ a) @ z
    u = z.T
    w = w - 0.02 * u * max(1, w.size(0) / w.size(1)) ** 0.5
    lion = torch.sign(0.9 * buf + 0.1 * g)
    return w, buf, lion


@program((numbers(8, 6), numbers(8, 4), numbers(80)), (DP, DP, DP), (DP, N), step=True)
def fsdp_flat(x: Any, y: Any, flat: Any) -> Any:
    full = all_gather(flat, "dp", dim=0, dst=R)

    def loss(full: Any) -> Any:
        w1, w2 = torch.split(full, [48, 32])
        return functional.mse_loss(functional.relu(x @ w1.view(6, 8)) @ w2.view(8, 4), y)

    value, g = value_and_grad(loss)(full)
    g = reduce_scatter(g, "dp", dim=0, op="mean")
    return flat - 0.1 * g, mean(value)


@program(
    (
        numbers(4, 6),
        numbers(4, 6).sin(),
        numbers(6, 5),
        numbers(6, 5).cos(),
        numbers(5, 12),
        torch.tensor(4),
    ),
    (DP, DP, N, N, N, N),
    (N, N, N, N),
    step=True,
)
def moco(xq: Any, xk: Any, wq: Any, wk: Any, queue: Any, ptr: Any) -> Any:
    wk = wk * 0.99 + wq * 0.01
    k = functional.normalize(xk @ wk, dim=1)

    def loss(wq: Any) -> Any:
        q = functional.normalize(xq @ wq, dim=1)
        pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", q, queue)
        logits = torch.cat([pos, neg], 1) / 0.07
        return mean(
            functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))
        )

    value, g = value_and_grad(loss)(wq)
    keys = all_gather(k, "dp", dim=0, dst=I)
    queue = queue.clone()
    queue = queue.index_copy(1, (ptr + torch.arange(keys.shape[0])) % queue.shape[1], keys.T)
    return wq - 0.1 * total(g), wk, queue, value


@program(
    (numbers(6, 5), numbers(5, 1), numbers(8, 6), numbers(8, 6).sin(), numbers(8, 1).sigmoid()),
    (N, N, DP, DP, DP),
    (N, N, N),
    step=True,
)
def wgan_gp(d1: Any, d2: Any, real: Any, fake: Any, alpha: Any) -> Any:
    def critic(p: Any, x: Any) -> Any:
        return (x @ p[0]).tanh() @ p[1]

    def loss(p: Any) -> Any:
        mix = alpha * real + (1 - alpha) * fake
        g = torch.func.grad(lambda x: critic(p, x).sum())(mix)
        gp = ((g.norm(2, dim=1) - 1) ** 2).mean()
        return mean(critic(p, fake).mean() - critic(p, real).mean() + 10 * gp)

    value, g = value_and_grad(loss)((d1, d2))
    return value, total(g[0]), total(g[1])
