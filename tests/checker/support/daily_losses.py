"""Losses and metrics as people write them, over data and tensor parallel ranks."""

from typing import Any, Final

import torch
from torch.nn import functional

from shardmap_torch import I, R, all_gather, all_reduce, axis_index, axis_size
from tests.checker.support.daily import (
    DP,
    TP0,
    TP1,
    N,
    Program,
    ids,
    mean,
    registering,
    to_r,
    total,
)
from tests.checker.support.one_device import numbers

PROGRAMS: Final[dict[str, Program]] = {}
program: Final = registering(PROGRAMS)


@program(
    (
        numbers(8, 6),
        numbers(8, 6).sin(),
        numbers(8, 6).cos(),
        numbers(8),
        (torch.arange(6)[None] < torch.tensor([3, 6, 4, 5, 6, 1, 2, 3])[:, None]),
    ),
    DP,
    (N, N),
)
def grpo(logp: Any, old: Any, ref: Any, rewards: Any, mask: Any) -> Any:
    g = rewards.view(-1, 2)
    adv = ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)).view(-1)
    ratio = (logp - old.detach()).exp()
    obj = torch.min(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None])
    kl = (ref - logp).exp() - (ref - logp) - 1
    per = -(obj - 0.04 * kl)
    loss = ((per * mask).sum(1) / mask.sum(1)).mean()
    return mean(loss), mean(((kl * mask).sum(1) / mask.sum(1)).mean())


@program((numbers(4, 6), numbers(4, 6).sin(), numbers(1)[0]), (DP, DP, N), N)
def clip(img: Any, txt: Any, logit_scale: Any) -> Any:
    img, txt = functional.normalize(img, dim=-1), functional.normalize(txt, dim=-1)
    all_img, all_txt = all_gather(img, "dp", dim=0, dst=R), all_gather(txt, "dp", dim=0, dst=R)
    scale = logit_scale.exp()
    li, lt = scale * img @ all_txt.T, scale * txt @ all_img.T
    labels = torch.arange(img.shape[0]) + axis_index("dp") * img.shape[0]
    return mean((functional.cross_entropy(li, labels) + functional.cross_entropy(lt, labels)) / 2)


@program((numbers(4, 6), numbers(6, 8), ids(4)), (DP, TP1, DP), N)
def z_loss(h: Any, w: Any, t: Any) -> Any:
    logits = to_r(h) @ w
    m = all_reduce(logits.detach().amax(-1, keepdim=True), "tp", op="max", dst=I)
    lse = m.squeeze(-1) + all_reduce((logits - m).exp().sum(-1), "tp", dst=I).log()
    n = logits.shape[-1]
    hit = t[:, None] == torch.arange(n) + axis_index("tp") * n
    picked = all_reduce((logits * hit).sum(-1), "tp", dst=I)
    return mean((lse - picked + 1e-4 * lse**2).mean())


@program((numbers(8, 6), ids(8), numbers(6, 8), numbers(6, 8).sin()), (DP, DP, N, N), N)
def distill(x: Any, y: Any, student: Any, teacher: Any) -> Any:
    heat = 2.0
    s = x @ student
    with torch.no_grad():
        t = x @ teacher
    s_log, t_soft = functional.log_softmax(s / heat, -1), functional.softmax(t / heat, -1)
    soft = functional.kl_div(s_log, t_soft, reduction="batchmean") * heat * heat
    cos = functional.cosine_embedding_loss(s, t, torch.ones(s.shape[0]))
    return mean(0.5 * soft + 0.5 * functional.cross_entropy(s, y) + cos)


@program((numbers(4, 3, 4, 4), ids(4, 4, 4, n=3)), DP, (N, N))
def segmentation(logits: Any, y: Any) -> Any:
    ce = functional.cross_entropy(logits, y, reduction="none")
    p = torch.exp(-ce)
    focal = mean(((1 - p) ** 2 * ce).mean())
    probs = logits.softmax(1)
    oh = functional.one_hot(y, 3).permute(0, 3, 1, 2).to(logits.dtype)
    inter = total((probs * oh).sum((0, 2, 3)))
    card = total((probs + oh).sum((0, 2, 3)))
    dice = 1 - ((2 * inter + 1) / (card + 1)).mean()
    return focal, dice


@program((numbers(8, 5), ids(8, n=5), numbers(5).abs()), (DP, DP, N), N)
def class_weights(logits: Any, y: Any, weight: Any) -> Any:
    return total(functional.cross_entropy(logits, y, weight=weight, reduction="sum")) / total(
        weight[y].sum()
    )


@program((numbers(4, 6, 5), numbers(4, 6), numbers(5)), (DP, DP, N), N)
def mae(x: Any, noise: Any, tok: Any) -> Any:
    keep = 2
    shuffle = torch.argsort(noise, dim=1)
    restore = torch.argsort(shuffle, dim=1)
    vis = torch.gather(x, 1, shuffle[:, :keep, None].repeat(1, 1, x.shape[-1]))
    mask = torch.ones(x.shape[:2], dtype=x.dtype)
    mask[:, :keep] = 0
    mask = torch.gather(mask, 1, restore)
    full = torch.cat([vis, tok.repeat(x.shape[0], x.shape[1] - keep, 1)], 1)
    full = torch.gather(full, 1, restore[..., None].expand(-1, -1, x.shape[-1]))
    loss = ((full.tanh() - x) ** 2).mean(-1)
    return total((loss * mask).sum()) / total(mask.sum())


@program((numbers(8, 4), numbers(6, 4), numbers(6).abs() + 1), (DP, N, N), (DP, N, N, N))
def vqvae(z: Any, codebook: Any, counts: Any) -> Any:
    d = z.pow(2).sum(1, keepdim=True) - 2 * z @ codebook.T + codebook.pow(2).sum(1)
    idx = d.argmin(1)
    q = functional.embedding(idx, codebook)
    loss = mean(functional.mse_loss(q.detach(), z) * 0.25 + functional.mse_loss(q, z.detach()))
    q = z + (q - z).detach()
    one = functional.one_hot(idx, codebook.shape[0]).to(z.dtype)
    n = total(one.sum(0)).detach()
    dw = total(one.T @ z).detach()
    counts = counts.detach() * 0.99 + 0.01 * n
    return q, loss, counts, (codebook.detach() * 0.99 + 0.01 * dw) / counts[:, None]


@program((numbers(4, 6), numbers(4, 7), (numbers(4, 6) > 0)), DP, (DP, DP), step=True)
def gae(rewards: Any, values: Any, done: Any) -> Any:
    adv = torch.zeros_like(rewards)
    last = torch.zeros(rewards.shape[0], dtype=rewards.dtype)
    nd = (~done).to(rewards.dtype)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + 0.99 * values[:, t + 1] * nd[:, t] - values[:, t]
        last = delta + 0.99 * 0.95 * nd[:, t] * last
        adv[:, t] = last
    return adv, adv + values[:, :-1]


@program((numbers(6, 5), numbers(5, 1), numbers(8, 6)), (N, N, DP), N)
def gp_autograd(d1: Any, d2: Any, x: Any) -> Any:
    x = x.detach().requires_grad_()
    out = (x @ d1).tanh() @ d2
    (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    return mean(((g.norm(2, dim=1) - 1) ** 2).mean())


@program((numbers(8, 4), numbers(8, 4).sin()), DP, N)
def vicreg(x: Any, y: Any) -> Any:
    inv = mean(functional.mse_loss(x, y))
    out = 25 * inv
    for z in (x, y):
        z = all_gather(z, "dp", dim=0, dst=I)
        n, d = z.shape
        z = z - z.mean(0)
        std = torch.sqrt(z.var(0) + 1e-4)
        cov = (z.T @ z) / (n - 1)
        off = cov.flatten()[:-1].view(d - 1, d + 1)[:, 1:].flatten()
        out = out + functional.relu(1 - std).mean() + off.pow(2).sum() / d
    return out


@program((numbers(8, 5), ids(8, n=5)), DP, N, step=True)
def ece(logits: Any, y: Any) -> Any:
    conf, pred = logits.softmax(-1).max(-1)
    bins = torch.linspace(0, 1, 6, dtype=conf.dtype)
    b = torch.bucketize(conf, bins[1:-1])
    one = functional.one_hot(b, 5).to(conf.dtype)
    n = total(one.sum(0)).clamp(min=1)
    acc = total((one * (pred == y)[:, None]).sum(0)) / n
    c = total((one * conf[:, None]).sum(0)) / n
    return (n / n.sum() * (acc - c).abs()).sum()


@program((numbers(8, 4),), DP, (N, DP), step=True)
def pca(x: Any) -> Any:
    n = x.shape[0] * axis_size("dp")
    mu = total(x.sum(0)) / n
    xc = x - mu
    cov = total(xc.T @ xc) / (n - 1)
    s, v = torch.linalg.eigh(cov)
    return s, (xc @ v[:, -2:]).abs()


@program((numbers(8, 5), ids(8, n=4)), DP, N)
def triplet(z: Any, y: Any) -> Any:
    z = functional.normalize(z)
    az, ay = all_gather(z, "dp", dim=0, dst=R), all_gather(y, "dp", dim=0, dst=R)
    d = torch.cdist(z, az)
    same = y[:, None] == ay[None]
    pos = torch.where(same, d, -1e9).amax(1)
    neg = torch.where(same, 1e9, d).amin(1)
    return mean(functional.relu(pos - neg + 0.3).mean())


@program((numbers(4, 6), numbers(8, 6), ids(4)), (DP, TP0, DP), N)
def arcface(x: Any, w: Any, y: Any) -> Any:
    cos = functional.linear(to_r(functional.normalize(x)), functional.normalize(w))
    n = w.shape[0]
    local = y - axis_index("tp") * n
    hit = local[:, None] == torch.arange(n)
    theta = torch.acos(cos.clamp(-1 + 1e-7, 1 - 1e-7))
    logits = 4.0 * torch.where(hit, torch.cos(theta + 0.5), cos)
    m = all_reduce(logits.detach().amax(1), "tp", op="max", dst=R)
    lse = all_reduce((logits - m[:, None]).exp().sum(1), "tp", dst=I).log()
    pick = all_reduce(torch.where(hit, logits - m[:, None], 0.0).sum(1), "tp", dst=I)
    return mean((lse - pick).mean())
