"""Steps and models as the pages of the documentation write them, with layers and optimizers."""

from typing import Any, Final

import torch
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    checkpoint,
    convert,
    random,
    reduce_scatter,
    value_and_grad,
)
from shardmap_torch.nn import (
    attention,
    column_linear,
    fsdp_gather,
    row_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from shardmap_torch.optim import adamw, clip_by_global_norm, sgd, sync_gradients
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
    mean,
    registering,
    to_r,
    total,
)
from tests.checker.support.one_device import numbers

PROGRAMS: Final[dict[str, Program]] = {}
program: Final = registering(PROGRAMS)

MLP: Final = {"up": P(None, "tp"), "down": P("tp"), "bias": P()}
ADAM: Final = adamw(0.05)
SGD: Final = sgd(0.1, momentum=0.9)


def mlp() -> Any:
    return {"up": numbers(6, 8), "down": numbers(8, 4), "bias": numbers(4)}


@program((numbers(8, 6), numbers(6, 8), numbers(8, 4), numbers(4)), (DP, TP1, TP0, N), DP)
def row_parallel(x: Any, up: Any, down: Any, bias: Any) -> Any:
    h = torch.tanh(to_r(x) @ up)
    return add_tp(h @ down) + bias


@program(
    (mlp(), ADAM.init(mlp()), numbers(8, 6), numbers(8, 4)),
    (MLP, ADAM.specs(MLP), DP, DP),
    (MLP, ADAM.specs(MLP), N),
    step=True,
)
def adam_step(params: Any, state: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        h = torch.tanh(x @ params["up"])
        z = add_tp(h @ params["down"]) + params["bias"]
        return mean((z - y).square().mean())

    value, grads = value_and_grad(loss)(params)
    grads = sync_gradients(grads, MLP, "dp")
    params, state = ADAM.update(params, grads, state)
    return params, state, value


@program((mlp(), numbers(8, 6), ids(8, n=4)), (MLP, DP, DP), (MLP, N), step=True)
def clipped_step(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        h = functional.gelu(x @ params["up"])
        z = add_tp(h @ params["down"]) + params["bias"]
        return mean(functional.cross_entropy(z, y))

    _, grads = value_and_grad(loss)(params)
    grads = sync_gradients(grads, MLP, "dp")
    grads, norm = clip_by_global_norm(grads, MLP, max_norm=1.0)
    return {name: params[name] - 0.1 * grads[name] for name in params}, norm


@program((numbers(6, 4), numbers(2, 8, 6), numbers(2, 8, 4)), (N, P(None, "dp"), P(None, "dp")), N)
def microbatches(w: Any, xs: Any, ys: Any) -> Any:
    loss = torch.zeros((), dtype=w.dtype)
    for x, y in zip(xs.unbind(), ys.unbind(), strict=True):
        loss = loss + (x @ w - y).square().mean() / len(xs)
    return mean(loss)


@program(
    (numbers(6, 4), numbers(2, 8, 6), numbers(2, 8, 4)),
    (N, P(None, "dp"), P(None, "dp")),
    N,
    step=True,
)
def accumulated_step(w: Any, xs: Any, ys: Any) -> Any:
    grads = torch.zeros_like(w)
    for x, y in zip(xs.unbind(), ys.unbind(), strict=True):
        _, g = value_and_grad(lambda w, x=x, y=y: (x @ w - y).square().mean())(w)
        grads = grads + g / len(xs)
    return w - 0.1 * mean(grads)


@program((numbers(8, 6), numbers(8, 4), numbers(6, 4)), (DP, DP, DP), (DP, N), step=True)
def fsdp_step(x: Any, y: Any, w: Any) -> Any:
    def loss(w: Any) -> Any:
        full = all_gather(w, "dp", dim=0, dst=R)
        return mean((x @ full - y).square().mean())

    value, g = value_and_grad(loss)(w)
    return w - 0.1 * g, value


@program((numbers(6, 4), numbers(4, 6), numbers(8, 6)), (DP, DP, DP), N)
def fsdp_loss(w: Any, v: Any, x: Any) -> Any:
    w, v = fsdp_gather((w, v), (P("dp"), P("dp")), "dp")
    return mean((torch.tanh(x @ w) @ v - x).square().mean())


@program((ids(4, 6), numbers(8, 6), numbers(6, 8), ids(4, 6)), (DP, TP0, TP1, DP), N)
def language_model(tokens: Any, table: Any, head: Any, targets: Any) -> Any:
    x = vocab_parallel_embedding(tokens, table, "tp")
    logits = column_linear(functional.rms_norm(x, x.shape[-1:]), head, "tp")
    return vocab_parallel_cross_entropy(logits, targets, "tp", batch_axis="dp")


@program(
    (numbers(4, 6, 8), numbers(8, 3, 2, 4), numbers(2, 4, 8), numbers(8)), (DP, TP2, TP0, N), DP
)
def block(x: Any, qkv: Any, proj: Any, g: Any) -> Any:
    h = functional.rms_norm(x, x.shape[-1:], g)
    q, k, v = column_linear(h, qkv, "tp").unbind(-3)
    y = attention(q, k, v, causal=True).flatten(2)
    return x + row_linear(y, proj.flatten(0, 1), "tp")


@program((numbers(8, 6), numbers(6, 8), numbers(8, 6)), (P("dp", "tp"), TP1, TP0), BOTH)
def sequence_parallel(x: Any, up: Any, down: Any) -> Any:
    h = all_gather(x, "tp", dim=1, dst=R) @ up
    return reduce_scatter(functional.silu(h) @ down, "tp", dim=1)


@program((numbers(4, 8), numbers(8), random.key(3)), (DP, N, N), DP)
def dropped(x: Any, g: Any, key: Any) -> Any:
    return random.dropout(key, x, 0.5, spec=P("dp")) * g


@program((numbers(8, 6), numbers(6), numbers(6)), (DP, N, N), DP)
def batch_norm(x: Any, g: Any, b: Any) -> Any:
    mu = all_reduce(x.mean(0), "dp", op="mean", dst=R)
    var = all_reduce((x - mu).square().mean(0), "dp", op="mean", dst=R)
    return (x - mu) * torch.rsqrt(var + 1e-5) * g + b


@program((numbers(8, 6), numbers(8).abs(), numbers(6, 3)), (DP, DP, N), N)
def weighted_mean(x: Any, weight: Any, w: Any) -> Any:
    scores = (x @ w).square().sum(-1)
    return total((scores * weight).sum()) / total(weight.sum())


@program((numbers(4, 8), numbers(8, 6)), (BOTH, TP0), DP)
def normed_columns(x: Any, w: Any) -> Any:
    scale = all_reduce(x.square().sum(-1, keepdim=True), "tp", dst=R)
    return add_tp((x * torch.rsqrt(scale + 1e-6)) @ w)


@program((numbers(8, 6), numbers(6, 8), numbers(8, 4), ids(8, n=4)), (DP, TP1, TP0, DP), N)
def recomputed(x: Any, up: Any, down: Any, y: Any) -> Any:
    def layer(x: Any, up: Any, down: Any) -> Any:
        return add_tp(torch.relu(to_r(x) @ up) @ down)

    return mean(functional.cross_entropy(checkpoint(layer, x, up, down), y))


@program((numbers(4, 6), numbers(6, 8)), (DP, TP1), DP)
def sharded_softmax(x: Any, w: Any) -> Any:
    logits = convert(x, "tp", src=I, dst=R) @ w
    top = all_reduce(logits.detach().amax(-1, keepdim=True), "tp", op="max", dst=R)
    e = (logits - top).exp()
    return all_gather(e / all_reduce(e.sum(-1, keepdim=True), "tp", dst=R), "tp", dim=1, dst=I)


@program(
    (numbers(6, 4), SGD.init(numbers(6, 4)), numbers(8, 6), numbers(8, 4)),
    (N, SGD.specs(N), DP, DP),
    (N, SGD.specs(N), N),
    step=True,
)
def sgd_step(w: Any, state: Any, x: Any, y: Any) -> Any:
    value, g = value_and_grad(lambda w: (x @ w - y).square().mean())(w)
    g = all_reduce(g, "dp", op="mean", dst=I)
    w, state = SGD.update(w, g, state)
    return w, state, mean(value)
