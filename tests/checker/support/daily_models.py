"""Layers and models as people write them, data, tensor and context parallel."""

import math
from typing import Any, Final

import torch
from torch.nn import functional

from shardmap_torch import P, axis_index
from tests.checker.support.daily import (
    DP,
    MASK,
    TP0,
    TP2,
    N,
    Program,
    add_tp,
    ids,
    mean,
    registering,
    to_r,
)
from tests.checker.support.one_device import numbers

PROGRAMS: Final[dict[str, Program]] = {}
program: Final = registering(PROGRAMS)


def rms(x: Any, g: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g


def rotary(x: Any, freqs: Any) -> Any:
    xc = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(xc * freqs.view(1, x.shape[1], 1, -1)).flatten(3)


LSTM: Final = torch.nn.LSTM(6, 4, batch_first=True).double()
LP: Final = {k: numbers(*v.shape) for k, v in LSTM.named_parameters()}


@program(
    (
        numbers(4, 3, 8, 8),
        ids(4),
        numbers(6, 3, 4, 4),
        numbers(1, 1, 6),
        numbers(1, 5, 6),
        numbers(6, 3, 2, 3),
        numbers(2, 3, 6),
        numbers(6, 8),
    ),
    (DP, DP, N, N, N, TP2, TP0, N),
    N,
)
def vit(img: Any, y: Any, patch: Any, cls: Any, pos: Any, qkv: Any, proj: Any, head: Any) -> Any:
    x = functional.conv2d(img, patch, stride=4).flatten(2).transpose(1, 2)
    x = torch.cat((cls.expand(x.shape[0], -1, -1), x), dim=1) + pos
    h = to_r(functional.layer_norm(x, (x.shape[-1],)))
    q, k, v = torch.einsum("btd,dchk->cbhtk", h, qkv)
    a = functional.scaled_dot_product_attention(q, k, v)
    x = x + add_tp(torch.einsum("bhtk,hkd->btd", a, proj))
    return mean(functional.cross_entropy(x[:, 0] @ head, y, label_smoothing=0.1))


@program(
    (
        numbers(4, 4, 8, 8),
        numbers(4, 4, 8, 8).sin(),
        ids(4, n=50),
        numbers(8, 4, 3, 3),
        numbers(8, 8, 3, 3),
        numbers(8, 8, 3, 3),
        numbers(4, 16, 3, 3),
        numbers(8, 8),
    ),
    (DP, DP, DP, N, N, N, N, N),
    N,
)
def unet_step(
    img: Any, noise: Any, t: Any, w_in: Any, w_down: Any, w_up: Any, w_out: Any, w_t: Any
) -> Any:
    betas = torch.linspace(1e-4, 0.02, 50, dtype=torch.float64)
    acp = torch.cumprod(1 - betas, dim=0)
    s = acp[t].sqrt()[:, None, None, None]
    noisy = s * img + (1 - acp[t])[:, None, None, None].sqrt() * noise
    half = 4
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
    emb = t[:, None].double() * freqs[None]
    emb = torch.cat([emb.cos(), emb.sin()], dim=-1) @ w_t
    h1 = (
        functional.silu(functional.group_norm(functional.conv2d(noisy, w_in, padding=1), 4))
        + emb[:, :, None, None]
    )
    h2 = functional.silu(
        functional.group_norm(functional.conv2d(h1, w_down, stride=2, padding=1), 4)
    )
    u = functional.interpolate(h2, scale_factor=2.0, mode="nearest")
    u = functional.conv2d(u, w_up, padding=1)
    out = functional.conv2d(torch.cat([u, h1], dim=1), w_out, padding=1)
    return mean(functional.mse_loss(out, noise))


@program(
    (
        numbers(4, 6, 5),
        numbers(5, 2, 8),
        numbers(8, 1, 3),
        numbers(8, 4),
        numbers(4, 6, 3),
        numbers(4, 6, 3).cos(),
        numbers(8, 5),
    ),
    (DP, TP2, TP0, TP0, DP, DP, TP0),
    DP,
)
def mamba(x: Any, w_in: Any, conv: Any, a_log: Any, b_in: Any, c_out: Any, w_out: Any) -> Any:
    b, t, _ = x.shape
    xz = torch.einsum("btd,dce->cbte", to_r(x), w_in)
    u, z = xz[0], xz[1]
    u = functional.conv1d(
        u.transpose(1, 2), conv, padding=conv.shape[-1] - 1, groups=conv.shape[0]
    )[..., :t].transpose(1, 2)
    u = functional.silu(u)
    rate = -torch.exp(a_log[:, :3])
    delta = functional.softplus(u + a_log[:, 3])
    decay = torch.exp(torch.einsum("btd,dn->btdn", delta, rate))
    driven = torch.einsum("btd,btn,btd->btdn", delta, to_r(b_in), u)
    h = torch.zeros(b, u.shape[2], 3, dtype=x.dtype)
    ys = []
    for i in range(t):
        h = decay[:, i] * h + driven[:, i]
        ys.append(torch.einsum("bdn,bn->bd", h, to_r(c_out)[:, i]))
    y = torch.stack(ys, dim=1)
    y = y * functional.silu(z)
    return add_tp(y @ w_out)


@program(
    (numbers(8, 6), numbers(6, 4), numbers(4, 6, 8), numbers(4, 8, 6)), (DP, N, TP0, TP0), (DP, N)
)
def experts_capacity(x: Any, gate: Any, w1: Any, w2: Any) -> Any:
    probs = (x @ gate).softmax(-1)
    top, idx = probs.topk(2, dim=-1)
    top = top / top.sum(-1, keepdim=True)
    num_experts = probs.shape[-1]
    onehot = functional.one_hot(idx, num_experts).to(x.dtype)
    combine = (onehot * top[..., None]).sum(1)
    n = w1.shape[0]
    mine = torch.narrow(to_r(combine), 1, axis_index("tp") * n, n)
    h = torch.einsum("td,edf->etf", to_r(x), w1)
    y = torch.einsum("etf,efd->etd", functional.silu(h), w2)
    out = add_tp(torch.einsum("etd,te->td", y, mine))
    load = mean(onehot.sum(1).mean(0))
    aux = num_experts * (load * mean(probs.mean(0))).sum()
    return x + out, aux


@program((numbers(8, 6), numbers(6, 4), numbers(4, 6, 6)), (DP, N, TP0), DP)
def mixtral_loop(x: Any, gate: Any, w: Any) -> Any:
    probs = (x @ gate).softmax(-1)
    val, idx = probs.topk(2, -1)
    val = val / val.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    first = axis_index("tp") * w.shape[0]
    xr, vr = to_r(x), to_r(val)
    for e in range(w.shape[0]):
        weight = (vr * (idx == first + e)).sum(-1, keepdim=True)
        out = out + weight * torch.relu(xr @ w[e])
    return add_tp(out)


@program((LP, numbers(4, 5, 6)), (N, DP), DP)
def lstm_module(params: Any, x: Any) -> Any:
    y, _ = torch.func.functional_call(LSTM, params, (x,))
    return y


@program((numbers(4, 8, 6), numbers(6)), (P("dp", None, "tp"), TP0), P("dp", None, "tp"))
def scan_by_doubling(x: Any, a: Any) -> Any:
    a = torch.sigmoid(a).expand_as(x)
    t, d = x.shape[1], 1
    while d < t:
        x = x + a * functional.pad(x, (0, 0, d, 0))[:, :t]
        a = a * functional.pad(a, (0, 0, d, 0), value=0.0)[:, :t]
        d *= 2
    return x


@program((numbers(4, 6, 3), numbers(3, 3), ids(4, 6, n=3), MASK), (DP, N, DP, DP), N)
def crf(emit: Any, trans: Any, tags: Any, mask: Any) -> Any:
    alpha = emit[:, 0]
    score = emit[:, 0].gather(1, tags[:, :1]).squeeze(1)
    for t in range(1, emit.shape[1]):
        nxt = torch.logsumexp(alpha[:, :, None] + trans + emit[:, t, None], dim=1)
        alpha = torch.where(mask[:, t, None], nxt, alpha)
        score = score + mask[:, t] * (
            trans[tags[:, t - 1], tags[:, t]] + emit[:, t].gather(1, tags[:, t, None]).squeeze(1)
        )
    return mean((alpha.logsumexp(1) - score).mean())


@program((numbers(4, 8, 4, 4), numbers(4, 2, 3)), DP, DP)
def spatial_transformer(x: Any, theta: Any) -> Any:
    grid = functional.affine_grid(theta, x.shape, align_corners=False)
    return functional.pixel_shuffle(functional.grid_sample(x, grid, align_corners=False), 2)
