"""The same model on one device, written with torch's own layers: what the sharded one must equal.

Nothing is shared with the sharded one but the parameters, and the key of dropout.
"""

import torch
from torch import Tensor
from torch.nn import functional

from examples.gpt.dropout import Dropout
from examples.gpt.model import Params


def apply(params: Params, tokens: Tensor, dropout: Dropout | None = None) -> Tensor:
    """Tokens [b, t] -> logits [b, t, v]."""
    drop = (dropout or Dropout()).unsharded()
    x = drop(functional.embedding(tokens, params["embedding"]))
    for layer in params["layers"]:
        x = x + drop(_attention(_norm(x, layer["attention_norm"]), layer))
        x = x + drop(_mlp(_norm(x, layer["mlp_norm"]), layer))
    logits: Tensor = _norm(x, params["final_norm"]) @ params["unembedding"]
    return logits


def loss(params: Params, batch: Tensor, dropout: Dropout | None = None) -> Tensor:
    """Batch [b, t+1] -> mean nats a token."""
    logits = apply(params, batch[:, :-1], dropout)
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def loss_and_grads(params: Params, batch: Tensor) -> tuple[Tensor, Params]:
    """The loss, and its gradient for every parameter."""
    grads, value = torch.func.grad_and_value(loss)(params, batch)
    return value, grads


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], scale, eps=1e-6)


def _attention(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
    q, k, v = torch.einsum("btd,dhxk->xbhtk", x, layer["qkv"])
    y = functional.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    out: Tensor = torch.einsum("bhtk,hkd->btd", y, layer["attention_out"])
    return out


def _mlp(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
    gate, up = torch.einsum("btd,dxf->xbtf", x, layer["gate_up"])
    out: Tensor = (functional.silu(gate) * up) @ layer["down"]
    return out


def _rotate(x: Tensor) -> Tensor:
    """As a complex number, each pair is multiplied by exp(i * position * frequency)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.outer(torch.arange(length, dtype=x.dtype, device=x.device), frequencies)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag], -1)
