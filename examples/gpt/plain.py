"""A one-device GPT written with torch's own layers, which the sharded one must equal.

Nothing is shared with the sharded one but the parameters, and the key of dropout.
"""

import torch
from torch import Tensor
from torch.nn import functional

from examples.gpt.dropout import Dropout
from examples.gpt.model import BALANCE, Params


def apply(params: Params, tokens: Tensor, dropout: Dropout | None = None) -> Tensor:
    """Tokens [b, t] -> logits [b, t, v]."""
    return forward(params, tokens, dropout)[0]


def forward(
    params: Params, tokens: Tensor, dropout: Dropout | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Computes the logits, and how uneven the loads of each layer's experts are."""
    balances: list[Tensor] = []
    drop = (dropout or Dropout()).unsharded()
    x = drop(functional.embedding(tokens, params["embedding"]))
    for layer in _layers(params):
        x = x + drop(_attention(_norm(x, layer["attention_norm"]), layer))
        normed = _norm(x, layer["mlp_norm"])
        if "router" in layer:
            made, balance = _experts(normed, layer)
            balances.append(balance)
        else:
            made = _mlp(normed, layer)
        x = x + drop(made)
    logits: Tensor = _norm(x, params["final_norm"]) @ params["unembedding"]
    return logits, balances


def _layers(params: Params) -> list[Params]:
    """Those of a pipeline are one pytree of stacked weights."""
    layers = params["layers"]
    if isinstance(layers, list):
        return layers
    count = len(layers["down"])
    return [{name: stacked[number] for name, stacked in layers.items()} for number in range(count)]


def loss(params: Params, batch: Tensor, dropout: Dropout | None = None) -> Tensor:
    """Batch [b, t+1] -> mean nats a token."""
    logits, balances = forward(params, batch[:, :-1], dropout)
    value = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    return value + BALANCE * torch.stack(balances).sum() if balances else value


def loss_and_grads(
    params: Params, batch: Tensor, num_microbatches: int = 1
) -> tuple[Tensor, Params]:
    """The loss, and its gradient for every parameter.

    It is the mean over microbatches, of which number m has every sequence whose number is m modulo
    `num_microbatches`: experts are balanced in each of them.
    """

    def mean(params: Params) -> Tensor:
        parts = (loss(params, batch[m::num_microbatches]) for m in range(num_microbatches))
        return torch.stack(list(parts)).mean()

    grads, value = torch.func.grad_and_value(mean)(params)
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


def _experts(x: Tensor, layer: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Has every expert process every position, and keeps what the two that are chosen made."""
    chances = (x @ layer["router"]).softmax(-1)  # [b, t, e]
    values, chosen = chances.topk(2, -1)
    picks = functional.one_hot(chosen, chances.shape[-1]).to(x.dtype)  # [b, t, 2, e]
    gate, up = torch.einsum("btd,edxf->xbetf", x, layer["gate_up"])
    made = torch.einsum("betf,efd->bted", functional.silu(gate) * up, layer["down"])
    weights = (picks * (values / values.sum(-1, keepdim=True)).unsqueeze(-1)).sum(2)
    balance = (picks.mean((0, 1, 2)) * chances.mean((0, 1))).sum() * chances.shape[-1]
    return torch.einsum("bte,bted->btd", weights, made), balance


def _rotate(x: Tensor) -> Tensor:
    """Multiplies each pair, as a complex number, by exp(i * position * frequency)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.outer(torch.arange(length, dtype=x.dtype, device=x.device), frequencies)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag], -1)
