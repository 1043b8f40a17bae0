"""A one-device Llama written with torch's own functions and complex rotations.

It shares nothing with the sharded one but the parameters.
"""

import torch
from torch import Tensor
from torch.nn import functional

from examples.llama.model import Config, Params

Cache = list[tuple[Tensor, Tensor]]


def apply(
    params: Params, tokens: Tensor, cache: Cache | None, config: Config
) -> tuple[Tensor, Cache]:
    """Logits [b, v] after the last of `tokens` [b, t], and a cache that has grown by them."""
    x, grown = _hidden(params, tokens, cache, config)
    return functional.linear(x[:, -1], params["embedding"]), grown


def loss(params: Params, batch: Tensor, config: Config) -> Tensor:
    """Batch [b, t+1] -> mean nats a token."""
    x, _ = _hidden(params, batch[:, :-1], None, config)
    logits = functional.linear(x, params["embedding"])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _hidden(
    params: Params, tokens: Tensor, cache: Cache | None, config: Config
) -> tuple[Tensor, Cache]:
    x = functional.embedding(tokens, params["embedding"])
    start = 0 if cache is None else cache[0][0].shape[2]
    grown = []
    for index, layer in enumerate(params["layers"]):
        h = functional.rms_norm(x, x.shape[-1:], layer["attention_norm"], config.epsilon)
        heads = (h @ layer["qkv"].flatten(1)).unflatten(-1, layer["qkv"].shape[1:])
        q, k, v = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, heads, t, k]
        q, k = _rotate(q, start, config.rotary_base), _rotate(k, start, config.rotary_base)
        if cache is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(cache[index], (k, v), strict=True))
        grown.append((k, v))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(start)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2) @ layer["out"].flatten(0, 2)
        h = functional.rms_norm(x, x.shape[-1:], layer["mlp_norm"], config.epsilon)
        gate, up = (h @ layer["gate_up"].flatten(1)).unflatten(-1, (-1, 2)).unbind(-1)
        x = x + (functional.silu(gate) * up) @ layer["down"]
    return functional.rms_norm(x, x.shape[-1:], params["final_norm"], config.epsilon), grown


def _rotate(x: Tensor, start: int, base: float) -> Tensor:
    """Neighbouring features are a complex number, which is turned by its position."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(start, start + x.shape[2], dtype=x.dtype), frequencies)
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)
