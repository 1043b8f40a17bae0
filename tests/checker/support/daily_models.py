"""Layers and models as people write them, data, tensor and context parallel."""

import math
from typing import Any, Final

import torch
from torch.nn import functional

from shardmap_torch import I, P, R, all_gather, all_reduce, all_to_all, axis_index, reduce_scatter
from tests.checker.support.daily import (
    BOTH,
    DP,
    MASK,
    TP0,
    TP1,
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


def precompute(dim: int, t: int, theta: float = 10000.0) -> Any:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].double() / dim))
    ones = torch.ones(t, dim // 2, dtype=torch.float64)
    return torch.polar(ones, torch.outer(torch.arange(t).double(), freqs))


def rotary(x: Any, freqs: Any) -> Any:
    xc = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(xc * freqs.view(1, x.shape[1], 1, -1)).flatten(3)


def repeat_kv(x: Any, n: int) -> Any:
    b, t, h, d = x.shape
    return x[:, :, :, None, :].expand(b, t, h, n, d).reshape(b, t, h * n, d)


LSTM: Final = torch.nn.LSTM(6, 4, batch_first=True).double()
LP: Final = {k: numbers(*v.shape) for k, v in LSTM.named_parameters()}


@program(
    (
        ids(4, 6),
        ids(4, 6) + 0,
        numbers(8, 8),
        numbers(6, 8),
        numbers(8, 3, 4, 2),
        numbers(4, 2, 8),
        numbers(8, 32),
        numbers(32, 8),
    ),
    (DP, DP, N, N, TP2, TP0, TP1, TP0),
    N,
)
def nanogpt(
    idx: Any, targets: Any, wte: Any, wpe: Any, qkv: Any, proj: Any, up: Any, down: Any
) -> Any:
    t = idx.size(1)
    x = functional.embedding(idx, wte) + wpe[torch.arange(0, t)]
    h = to_r(functional.layer_norm(x, (x.size(-1),)))
    q, k, v = torch.einsum("btd,dchk->cbhtk", h, qkv).unbind(0)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(torch.tril(torch.ones(t, t)) == 0, float("-inf"))
    y = functional.softmax(att, dim=-1) @ v
    x = x + add_tp(torch.einsum("bhtk,hkd->btd", y, proj))
    h = to_r(functional.layer_norm(x, (x.size(-1),)))
    x = x + add_tp(functional.gelu(h @ up) @ down)
    logits = x @ wte.T
    return mean(functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1)))


@program(
    (
        numbers(4, 6, 8),
        numbers(8),
        numbers(8, 16),
        numbers(8, 8),
        numbers(8, 8),
        numbers(16, 8),
        numbers(8, 12),
        numbers(8, 12),
        numbers(12, 8),
    ),
    (DP, N, TP1, TP1, TP1, TP0, TP1, TP1, TP0),
    DP,
)
def torchtitan_llama(
    x: Any, g: Any, wq: Any, wk: Any, wv: Any, wo: Any, w1: Any, w3: Any, w2: Any
) -> Any:
    hd = 4
    b, t, _ = x.shape
    h = to_r(rms(x, g))
    q, k, v = h @ wq, h @ wk, h @ wv
    q, k, v = q.view(b, t, -1, hd), k.view(b, t, -1, hd), v.view(b, t, -1, hd)
    freqs = precompute(hd, t)
    q, k = rotary(q, freqs), rotary(k, freqs)
    n_rep = q.shape[2] // k.shape[2]
    k, v = repeat_kv(k, n_rep), repeat_kv(v, n_rep)
    y = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    x = x + add_tp(y.transpose(1, 2).contiguous().view(b, t, -1) @ wo)
    h = to_r(rms(x, g))
    return x + add_tp((functional.silu(h @ w1) * (h @ w3)) @ w2)


@program((numbers(4, 8, 6), numbers(6), numbers(6, 8), numbers(8, 6)), (BOTH, N, TP1, TP0), BOTH)
def megatron_sequence_parallel(x: Any, g: Any, up: Any, down: Any) -> Any:
    h = functional.layer_norm(x, x.shape[-1:], g)
    h = all_gather(h, "tp", dim=1, dst=R)
    h = functional.gelu(h @ up, approximate="tanh") @ down
    return x + reduce_scatter(h, "tp", dim=1)


@program((numbers(4, 8, 6), numbers(6, 24), numbers(8, 6)), (BOTH, N, N), BOTH)
def ulysses(x: Any, qkv: Any, out: Any) -> Any:
    b, t, _ = x.shape
    q, k, v = (x @ qkv).view(b, t, 3, 4, 2).permute(2, 0, 3, 1, 4)
    q, k, v = (all_to_all(y, "tp", split_dim=1, concat_dim=2) for y in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = all_to_all(y, "tp", split_dim=2, concat_dim=1)
    return x + y.transpose(1, 2).reshape(b, t, -1) @ out


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
    (numbers(4, 4, 8, 8), numbers(8, 4, 3, 3), numbers(8), numbers(4, 8, 3, 3)),
    (DP, TP0, TP0, TP1),
    DP,
)
def unet_tensor_parallel(x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    h = functional.conv2d(to_r(x), w1, b1, padding=1)
    h = functional.silu(functional.group_norm(h, h.shape[1] // 2))
    h = functional.avg_pool2d(h, 2)
    h = functional.interpolate(h, size=(8, 8), mode="bilinear", align_corners=False)
    return x + add_tp(functional.conv2d(h, w2, padding=1))


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


@program((ids(4, 6), ids(4, 6).flip(1), numbers(8, 6), numbers(6, 6)), (DP, DP, TP0, N), N)
def tied_vocab_parallel(idx: Any, targets: Any, wte: Any, w: Any) -> Any:
    n = wte.shape[0]
    local = idx - axis_index("tp") * n
    own = (local >= 0) & (local < n)
    x = functional.embedding(local.clamp(0, n - 1), wte)
    x = all_reduce(torch.where(own[..., None], x, 0.0), "tp", dst=I)
    x = (x @ w).tanh()
    logits = to_r(x) @ wte.T
    m = all_reduce(logits.detach().amax(-1, keepdim=True), "tp", op="max", dst=R)
    logits = logits - m
    lse = all_reduce(logits.exp().sum(-1), "tp", dst=I).log()
    lt = targets - axis_index("tp") * n
    ok = (lt >= 0) & (lt < n)
    pick = logits.gather(-1, lt.clamp(0, n - 1)[..., None])[..., 0]
    pick = all_reduce(pick * ok, "tp", dst=I)
    return mean((lse - pick).mean())


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


@program((numbers(4, 4, 6), numbers(6, 4), numbers(4, 6, 6)), (DP, N, TP0), DP)
def gshard_groups(x: Any, gate: Any, w: Any) -> Any:
    probs = (x @ gate).softmax(-1)
    val, idx = probs.max(-1)
    onehot = functional.one_hot(idx, probs.shape[-1])
    place = (onehot.cumsum(1) - 1) * onehot
    cap = 2
    keep = (place < cap) & (onehot > 0)
    disp = functional.one_hot(place.clamp(max=cap - 1), cap) * keep[..., None]
    disp = disp.to(x.dtype)
    n = w.shape[0]
    start = axis_index("tp") * n
    disp = disp.index_select(2, start + torch.arange(n))
    inp = torch.einsum("gsec,gsm->egcm", disp, to_r(x))
    out = torch.relu(torch.einsum("egcm,emn->egcn", inp, w))
    comb = disp * to_r(val)[..., None, None]
    return add_tp(torch.einsum("gsec,egcn->gsn", comb, out))


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


@program(({name: p.float() for name, p in LP.items()}, numbers(4, 5, 6).float()), (N, DP), DP)
def lstm_of_cpus(params: Any, x: Any) -> Any:
    """Runs in float32, for which torch has a kernel on CPUs that is one operation."""
    return lstm_module(params, x)


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
