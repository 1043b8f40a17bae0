"""Attention and decoding as people write them, with sharded samples, heads and tokens."""

import math
from typing import Any, Final

import torch
from torch.nn import functional

from shardmap_torch import I, P, R, all_reduce, axis_index, axis_size
from tests.checker.support.daily import (
    BOTH,
    DP,
    TP0,
    TP1,
    TP2,
    N,
    Program,
    add_tp,
    ids,
    registering,
    to_r,
)
from tests.checker.support.one_device import numbers

PROGRAMS: Final[dict[str, Program]] = {}
program: Final = registering(PROGRAMS)


@program((numbers(4, 8, 4), torch.tensor([0, 3, 5, 8])), (DP, N), DP)
def packed_cu_seqlens(x: Any, cu: Any) -> Any:
    t = x.shape[1]
    doc = torch.searchsorted(cu, torch.arange(t), right=True) - 1
    start = cu[doc]
    positions = torch.arange(t) - start
    mask = (doc[:, None] == doc[None]).tril()
    pe = torch.sin(positions[:, None] / 100.0 ** (torch.arange(4) / 4))
    x = x + pe
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ x


@program((numbers(4, 4, 6, 4), numbers(4, 4, 6, 4).sin(), numbers(4, 4, 6, 4).cos()), BOTH, BOTH)
def alibi(q: Any, k: Any, v: Any) -> Any:
    h, t = q.shape[1], q.shape[2]
    num_heads = h * axis_size("tp")
    slopes = torch.tensor(
        [2 ** (-8 * (i + 1) / num_heads) for i in range(num_heads)], dtype=q.dtype
    )
    slopes = slopes.narrow(0, 0, num_heads)[axis_index("tp") * h + torch.arange(h)]
    dist = torch.arange(t)[None, :] - torch.arange(t)[:, None]
    bias = slopes[:, None, None] * dist
    bias = bias.masked_fill(dist > 0, float("-inf"))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@program(
    (numbers(4, 2, 8, 4), numbers(4, 2, 8, 4).sin(), numbers(4, 2, 8, 4).cos(), numbers(2)),
    (BOTH, BOTH, BOTH, TP0),
    BOTH,
)
def sliding_window(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    t = q.shape[2]
    ones = torch.ones(t, t, dtype=torch.bool)
    mask = torch.tril(ones) & torch.triu(ones, diagonal=-2)
    s = torch.where(mask, q @ k.mT / 2, float("-inf"))
    sink = sinks.view(1, -1, 1, 1).expand(s.shape[0], -1, t, 1)
    w = torch.cat([s, sink], dim=-1).softmax(-1)[..., :-1]
    return w @ v


@program((numbers(4, 2, 8, 4), numbers(4, 2, 8, 4).sin(), numbers(4, 2, 8, 4).cos()), BOTH, BOTH)
def retnet(q: Any, k: Any, v: Any) -> Any:
    t, h = q.shape[2], q.shape[1]
    head = torch.arange(h) + axis_index("tp") * h
    gamma = 1 - 2.0 ** (-5.0 - head)
    n = torch.arange(t)
    decay = (gamma[:, None, None] ** (n[:, None] - n[None, :]).clamp(min=0)) * (
        n[:, None] >= n[None, :]
    )
    y = (q @ k.mT * decay) @ v
    kv = torch.cumsum(functional.elu(k)[..., :, None] * v[..., None, :], dim=2)
    z = functional.elu(k).cumsum(2)
    return y + torch.einsum("bhtk,bhtkv->bhtv", functional.elu(q), kv) / (
        1 + (q * z).sum(-1, keepdim=True) ** 2
    )


@program((numbers(4, 8, 8, 4), numbers(4, 3, 2, 2), numbers(2, 2, 4)), (DP, TP2, TP0), DP)
def swin(x: Any, qkv: Any, proj: Any) -> Any:
    w = 4
    shifted = torch.roll(x, shifts=(-2, -2), dims=(1, 2))
    b, h, wd, c = x.shape
    win = shifted.view(b, h // w, w, wd // w, w, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, c)
    img = torch.zeros(1, h, wd, 1)
    cnt = 0
    for hs in (slice(0, -w), slice(-w, -2), slice(-2, None)):
        for ws in (slice(0, -w), slice(-w, -2), slice(-2, None)):
            img[:, hs, ws, :] = cnt
            cnt += 1
    mw = img.view(1, h // w, w, wd // w, w, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w)
    mask = mw[:, None] != mw[:, :, None]
    q, k, v = torch.einsum("ntd,dchk->cnhtk", to_r(win), qkv)
    s = q @ k.mT / 2**0.5
    s = s.view(b, -1, *s.shape[1:]).masked_fill(mask[None, :, None], -100.0).view(-1, *s.shape[1:])
    y = s.softmax(-1) @ v
    y = add_tp(torch.einsum("nhtk,hkd->ntd", y, proj))
    y = y.view(b, h // w, wd // w, w, w, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, wd, c)
    return x + torch.roll(y, shifts=(2, 2), dims=(1, 2))


@program((numbers(4, 4, 6, 4), numbers(4, 4, 6, 4).sin(), numbers(8, 4)), (BOTH, BOTH, TP1), BOTH)
def t5_bias(q: Any, k: Any, table: Any) -> Any:
    t = q.shape[2]
    rel = torch.arange(t)[None] - torch.arange(t)[:, None]
    n = -rel
    n = torch.max(n, torch.zeros_like(n))
    exact = 4
    large = exact + (torch.log(n.double() / exact + 1e-9) / math.log(16 / exact) * 4).to(torch.long)
    large = torch.min(large, torch.full_like(large, 7))
    bucket = torch.where(n < exact, n, large)
    bias = functional.embedding(bucket, table).permute(2, 0, 1).unsqueeze(0)
    return (q @ k.mT + bias).softmax(-1) @ k


@program(
    (numbers(4, 2, 1, 4), numbers(4, 2, 8, 4), numbers(4, 2, 8, 4).sin()),
    (DP, P("dp", None, "tp"), P("dp", None, "tp")),
    DP,
)
def flash_decoding(q: Any, k: Any, v: Any) -> Any:
    s = to_r(q) @ k.mT / 2
    m = all_reduce(s.amax(-1, keepdim=True), "tp", op="max", dst=R)
    p = (s - m).exp()
    num = all_reduce(p @ v, "tp", dst=I)
    den = all_reduce(p.sum(-1, keepdim=True), "tp", dst=I)
    return num / den


@program(
    (
        numbers(4, 8),
        numbers(4, 2, 6, 4),
        numbers(4, 2, 6, 4).sin(),
        torch.tensor(3),
        numbers(8, 3, 2, 4),
        numbers(2, 4, 8),
        numbers(8, 10),
        numbers(4, 10),
    ),
    (DP, BOTH, BOTH, N, TP2, TP0, N, DP),
    (DP, BOTH, BOTH),
    step=True,
)
def decode_top_p(
    x: Any, kc: Any, vc: Any, pos: Any, qkv: Any, proj: Any, head: Any, noise: Any
) -> Any:
    q, k, v = torch.einsum("bd,dchk->cbhk", x, qkv)[:, :, :, None]
    at = (torch.arange(kc.shape[2]) == pos)[:, None]
    kc, vc = torch.where(at, k, kc), torch.where(at, v, vc)
    mask = (torch.arange(kc.shape[2]) <= pos)[None]
    y = functional.scaled_dot_product_attention(q, kc, vc, attn_mask=mask)
    x = x + add_tp(torch.einsum("bhtk,hkd->btd", y, proj)).squeeze(1)
    logits = x @ head / 0.8
    v10, _ = torch.topk(logits, 5)
    logits = logits.masked_fill(logits < v10[:, [-1]], -float("inf"))
    s, i = torch.sort(logits, descending=True)
    cum = torch.cumsum(functional.softmax(s, -1), -1)
    remove = cum > 0.9
    remove[..., 1:] = remove[..., :-1].clone()
    remove[..., 0] = 0
    remove = torch.zeros_like(remove).scatter(1, i, remove)
    logits = logits.masked_fill(remove, -float("inf"))
    token = (logits.softmax(-1) / (noise.abs() + 0.1)).argmax(-1)
    return token, kc, vc


@program(
    (numbers(4, 3, 10), numbers(4, 3), numbers(4, 3, 2, 5, 2), ids(4, 3, 5)),
    DP,
    (DP, DP, DP),
    step=True,
)
def beam_search(logits: Any, scores: Any, cache: Any, tokens: Any) -> Any:
    b, k, v = logits.shape
    lp = functional.log_softmax(logits, -1) + scores[:, :, None]
    top, idx = lp.view(b, -1).topk(k, dim=-1)
    beam = torch.div(idx, v, rounding_mode="floor")
    tok = idx % v
    cache = cache.gather(1, beam[:, :, None, None, None].expand(-1, -1, *cache.shape[2:]))
    tokens = torch.cat(
        [tokens.gather(1, beam[..., None].expand(-1, -1, tokens.shape[-1])), tok[..., None]], -1
    )
    return top, cache, tokens
