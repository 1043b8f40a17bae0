"""Composite programs: what people build from collectives, each with its one-device version."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    convert,
    ppermute,
    reduce_scatter,
    shift,
)
from tests.programs.support.harness import Program

LINE = {1: (1,), 2: (2,), 3: (3,), 4: (4,)}
GRID = {1: (1, 1), 2: (1, 2), 4: (2, 2)}


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor]:
    return (torch.tanh(x @ w1) @ w2,)


def column_row_mlp(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor]:
    """x is equal on all ranks of tp, w1 sharded by columns, w2 by rows."""
    h = torch.tanh(convert(x, "tp", src=I, dst=R) @ w1)
    return (all_reduce(h @ w2, "tp", dst=I),)


def sequence_parallel_mlp(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor]:
    """x is sharded by rows over tp before and after."""
    h = torch.tanh(all_gather(x, "tp", dim=0, dst=R) @ w1)
    return (reduce_scatter(h @ w2, "tp", dim=0),)


def data_parallel_loss(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    residual = torch.tanh(x @ w) - y
    squares = residual.square().sum()
    return all_reduce(squares, "dp", dst=I), residual


def one_device_loss(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    residual = torch.tanh(x @ w) - y
    return residual.square().sum(), residual


def fully_sharded_mlp(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Every rank holds a shard of each weight and its own batch; weights are gathered when used."""
    y = torch.tanh(x @ all_gather(w1, "dp", dim=0, dst=R)) @ all_gather(w2, "dp", dim=1, dst=R)
    return y, all_reduce(y.square().mean(), "dp", dst=I, op="mean")


def one_device_mlp_and_mean(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    (y,) = mlp(x, w1, w2)
    return y, y.square().mean()


def ring_matmul(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """Rows of x stay, rows of w travel round the ring and meet the columns of x they belong to."""
    n, own = axis_size("tp"), axis_index("tp")
    parts = torch.stack(x.chunk(n, dim=1))
    total = torch.zeros_like(x @ torch.cat([w] * n))
    ring = [(rank, (rank + 1) % n) for rank in range(n)]
    for step in range(n):
        total = total + parts.index_select(0, (own - step).remainder(n).reshape(1))[0] @ w
        w = ppermute(w, "tp", ring)
    return (total,)


def matmul(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (x @ w,)


def experts(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """Token groups travel to the rank of their expert and back."""
    sent = all_to_all(x, "ep", split_dim=0, concat_dim=1)
    done = torch.tanh(torch.einsum("etd,edf->etf", sent, w))
    back = all_to_all(done, "ep", split_dim=1, concat_dim=0)
    return (back,)


def one_device_experts(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (torch.tanh(torch.einsum("etd,edf->etf", x, w)),)


def pipeline(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """One layer a rank: microbatches enter at the first, are shifted on, and leave at the last."""
    n, stage = axis_size("pp"), axis_index("pp")
    state = torch.zeros_like(x[0])
    outputs = []
    for tick in range(x.shape[0] + n - 1):
        fed = x[min(tick, x.shape[0] - 1)]
        state = torch.tanh(torch.where(stage == 0, fed, state) @ w[0])
        outputs.append(state)
        state = shift(state, "pp", 1, wrap=False)
    return (broadcast(torch.stack(outputs[n - 1 :]), "pp", n - 1, dst=I),)


def one_device_pipeline(x: Tensor, w: Tensor) -> tuple[Tensor]:
    for layer in w:
        x = torch.tanh(x @ layer)
    return (x,)


def softmax_over_vocabulary(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """Log of the sum of exponentials of logits sharded over tp, shifted by their maximum."""
    logits = convert(x, "tp", src=I, dst=R) @ w
    top = all_reduce(logits.amax(-1).detach(), "tp", dst=I, op="max")
    total = all_reduce((logits - top[:, None]).exp().sum(-1), "tp", dst=I)
    return (total.log() + top,)


def one_device_logsumexp(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return ((x @ w).logsumexp(-1),)


def weight_gathered(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """Two axes: the batch over dp, the weight over both; a gather, a product, a scatter."""
    rows = all_gather(w, "dp", dim=0, dst=R)
    return (reduce_scatter(x @ rows, "tp", dim=1),)


def vocabulary_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max and min whose cotangents go to the ranks that hold them."""
    top = all_reduce(x.amax(0), "dp", dst=I, op="max")
    low = all_reduce(x.amin(0), "dp", dst=R, op="min")
    own = convert(low, "dp", src=R, dst=V, dim=0)
    return top, own


def one_device_extrema(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(0), x.amin(0)


TP, DP = "tp", "dp"

PROGRAMS: Mapping[str, Program] = {
    "column/row MLP": Program(
        column_row_mlp,
        (P(invariant=TP), P(None, TP), P(TP)),
        (P(),),
        ((6, 5), (5, 12), (12, 7)),
        mlp,
        LINE,
        (TP,),
    ),
    "column/row MLP, data parallel": Program(
        column_row_mlp,
        (P(DP, invariant=TP), P(None, TP, replicate=DP), P(TP, replicate=DP)),
        (P(DP),),
        ((6, 5), (5, 12), (12, 7)),
        mlp,
        GRID,
        (DP, TP),
    ),
    "sequence-parallel MLP": Program(
        sequence_parallel_mlp,
        (P(TP), P(None, TP), P(TP)),
        (P(TP),),
        ((12, 5), (5, 12), (12, 7)),
        mlp,
        LINE,
        (TP,),
    ),
    "sequence-parallel MLP, rows over two axes": Program(
        sequence_parallel_mlp,
        (P((DP, TP)), P(None, TP, replicate=DP), P(TP, replicate=DP)),
        (P((DP, TP)),),
        ((12, 5), (5, 12), (12, 7)),
        mlp,
        GRID,
        (DP, TP),
    ),
    "data-parallel loss": Program(
        data_parallel_loss,
        (P(DP), P(DP), P(replicate=DP)),
        (P(), P(DP)),
        ((12, 3), (12, 2), (3, 2)),
        one_device_loss,
        LINE,
        (DP,),
    ),
    "fully sharded parameters": Program(
        fully_sharded_mlp,
        (P(DP), P(DP), P(None, DP)),
        (P(DP), P()),
        ((12, 12), (12, 5), (5, 24)),
        one_device_mlp_and_mean,
        LINE,
        (DP,),
    ),
    "ring matmul": Program(
        ring_matmul, (P(TP), P(TP)), (P(TP),), ((12, 12), (12, 5)), matmul, LINE, (TP,)
    ),
    "experts": Program(
        experts,
        (P(None, "ep"), P("ep")),
        (P(None, "ep"),),
        ((4, 8, 3), (4, 3, 2)),
        one_device_experts,
        {2: (2,), 4: (4,)},
        ("ep",),
    ),
    "pipeline": Program(
        pipeline,
        (P(replicate="pp"), P("pp")),
        (P(),),
        ((3, 2, 4), (4, 4, 4)),
        one_device_pipeline,
        {4: (4,)},
        ("pp",),
    ),
    "softmax over a sharded vocabulary": Program(
        softmax_over_vocabulary,
        (P(invariant=TP), P(None, TP)),
        (P(),),
        ((5, 4), (4, 12)),
        one_device_logsumexp,
        LINE,
        (TP,),
    ),
    "weight sharded over two axes": Program(
        weight_gathered,
        (P(DP, TP), P((TP, DP))),
        (P(DP, TP),),
        ((4, 8), (8, 6)),
        matmul,
        GRID,
        (DP, TP),
    ),
    "extrema": Program(
        vocabulary_maximum, (P(DP),), (P(), P(DP)), ((12, 12),), one_device_extrema, LINE, (DP,)
    ),
}
