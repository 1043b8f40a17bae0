"""A training step by hand: Megatron-style autograd Functions on raw torch.distributed.

Everything that can be left out is: no types, no checks, gradients of the norms' scales summed in
one buffer, foreach updates in place.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.train_step.setting import BETAS, DECAY, MAX_NORM, Setting, Step, rate
from shardmap_torch.nn import positions, rotary, rotary_tables

Params = dict[str, Any]


def _gather(x: Tensor) -> Tensor:
    """[b, t/n, ...] -> [b, t, ...]."""
    parts = x.new_empty((dist.get_world_size(), *x.shape))
    dist.all_gather_into_tensor(parts, x.contiguous().unsqueeze(0))
    return torch.cat(parts.unbind(0), 1)


def _scatter(x: Tensor) -> Tensor:
    """[b, t, ...], an addend -> [b, t/n, ...], summed."""
    n = dist.get_world_size()
    parts = torch.stack(x.chunk(n, 1))
    out = x.new_empty((1, *parts.shape[1:]))
    dist.reduce_scatter_tensor(out, parts)
    return out[0]


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _scatter(grad)


class ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gather(grad)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


_gathered: Callable[[Tensor], Tensor] = GatherSequence.apply
_scattered: Callable[[Tensor], Tensor] = ScatterSequence.apply
_reduced: Callable[[Tensor], Tensor] = Reduce.apply


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def _column(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = (_gathered(x) @ weight.flatten(1)).unflatten(-1, weight.shape[1:])
    return y


def _row(x: Tensor, weight: Tensor) -> Tensor:
    return _scattered(x.flatten(2) @ weight.flatten(0, -2))


def _own(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    local = ids - dist.get_rank() * num_rows
    owned = (local >= 0) & (local < num_rows)
    return local * owned, owned


def _attention(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (rotary(q, tables), rotary(k, tables), v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _logits(params: Params, tokens: Tensor) -> Tensor:
    table = params["embedding"]
    ids, owned = _own(tokens, table.shape[0])
    x = _scattered(functional.embedding(ids, table) * owned.unsqueeze(-1))
    tables = rotary_tables(positions(tokens.shape[1]), params["layers"][0]["qkv"].shape[-1])
    for layer in params["layers"]:
        q, k, v = _column(_norm(x, layer["attention_norm"]), layer["qkv"]).unbind(-2)
        x = x + _row(_attention(q, k, v, tables), layer["attention_out"])
        gate, up = _column(_norm(x, layer["mlp_norm"]), layer["gate_up"]).unbind(-2)
        x = x + _row(functional.silu(gate) * up, layer["down"])
    return _column(_norm(x, params["final_norm"]), params["unembedding"])


def loss(params: Params, batch: Tensor) -> Tensor:
    """Mean nats a token."""
    logits, targets = _logits(params, batch[:, :-1]), batch[:, 1:]
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest
    total = _reduced(logits.exp().sum(-1))
    ids, owned = _own(targets, logits.shape[-1])
    picked = _reduced(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * owned)
    return (total.log() - picked).mean()


_CUT = {"embedding": 0, "qkv": 1, "attention_out": 0, "gate_up": 2, "down": 0, "unembedding": 1}
"""The dim that is sharded; the norms' scales are not."""


def _shard(name: str, value: Tensor) -> Tensor:
    dim = _CUT.get(name)
    if dim is not None:
        value = value.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return value.contiguous().clone().requires_grad_()


class Training:
    """Local parameters, split into those that are sharded and those that are not, and moments."""

    def __init__(self, setting: Setting) -> None:
        whole = setting.params()
        layers = [{k: _shard(k, v) for k, v in layer.items()} for layer in whole["layers"]]
        top = {k: _shard(k, v) for k, v in whole.items() if k != "layers"}
        self.params: Params = {**top, "layers": layers}
        self.batch = setting.batch()
        leaves = [*((k, v) for layer in layers for k, v in layer.items()), *top.items()]
        self.matrices = [v for k, v in leaves if k in _CUT]
        self.scales = [v for k, v in leaves if k not in _CUT]
        self.all = [*self.matrices, *self.scales]
        self.means = [torch.zeros_like(p) for p in self.all]
        self.squares = [torch.zeros_like(p) for p in self.all]
        self.steps = 0

    def step(self) -> Tensor:
        """Updates all in place; the loss before."""
        value = loss(self.params, self.batch)
        grads = list(torch.autograd.grad(value, self.all))
        with torch.no_grad():
            sharded = grads[: len(self.matrices)]
            flat = torch.cat([g.flatten() for g in grads[len(sharded) :]])
            dist.all_reduce(flat)
            sizes = [p.numel() for p in self.scales]
            pairs = zip(flat.split(sizes), self.scales, strict=True)
            grads = [*sharded, *(g.view_as(p) for g, p in pairs)]
            self._clip(sharded, flat, grads)
            self._update(grads)
        return value.detach()

    def _clip(self, sharded: list[Tensor], flat: Tensor, grads: list[Tensor]) -> None:
        square = torch.stack(torch._foreach_norm(sharded)).square().sum()
        dist.all_reduce(square)
        norm = (square + flat.square().sum()).sqrt()
        torch._foreach_mul_(grads, (MAX_NORM / norm).clamp(max=1))

    def _update(self, grads: list[Tensor]) -> None:
        self.steps += 1
        now, (beta1, beta2) = rate(self.steps), BETAS
        torch._foreach_lerp_(self.means, grads, 1 - beta1)
        torch._foreach_mul_(self.squares, beta2)
        torch._foreach_addcmul_(self.squares, grads, grads, 1 - beta2)
        scale = 1 / math.sqrt(1 - beta2**self.steps)
        divisors = torch._foreach_mul(torch._foreach_sqrt(self.squares), scale)
        torch._foreach_add_(divisors, 1e-8)
        torch._foreach_mul_(self.matrices, 1 - now * DECAY)
        torch._foreach_addcdiv_(self.all, self.means, divisors, -now / (1 - beta1**self.steps))


def make(setting: Setting) -> Step:
    """Each rank keeps its own shards as plain tensors."""
    return Training(setting).step
