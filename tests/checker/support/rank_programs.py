"""Programs as people write them for one rank, with raw `torch.distributed` on the group `G`.

Their text is the test: mutants are made of it.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional

G: Any = None
"""The group, which the test sets."""


def ddp_step(w: Tensor, x: Tensor, y: Tensor) -> Any:
    w = w.detach().requires_grad_()
    loss = functional.mse_loss(x @ w, y)
    (g,) = torch.autograd.grad(loss, w)
    dist.all_reduce(g, group=G)
    g /= dist.get_world_size(G)
    return w.detach() - 0.1 * g


def ddp_hooks(w: Tensor, x: Tensor, y: Tensor) -> Any:
    w = w.detach().requires_grad_()

    def average(grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=G)
        return grad

    w.register_hook(average)
    loss = functional.mse_loss(x @ w, y)
    loss.backward()
    assert w.grad is not None
    return w.detach() - 0.1 * w.grad


def zero1(w: Tensor, m: Tensor, x: Tensor, y: Tensor) -> Any:
    size, rank = dist.get_world_size(G), dist.get_rank(G)
    w = w.detach().requires_grad_()
    loss = functional.mse_loss((x @ w.view(4, 2)), y)
    (g,) = torch.autograd.grad(loss, w)
    shard = torch.empty(g.numel() // size, dtype=g.dtype)
    dist.reduce_scatter_tensor(shard, g.contiguous(), op=dist.ReduceOp.AVG, group=G)
    m = 0.9 * m + shard
    own = w.detach().chunk(size)[rank] - 0.1 * m
    out = torch.empty_like(w.detach())
    dist.all_gather_into_tensor(out, own.contiguous(), group=G)
    return out, m


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
    size, rank = dist.get_world_size(G), dist.get_rank(G)
    acc, total, top = (
        torch.zeros_like(q),
        torch.zeros_like(q[:, :1]),
        torch.full_like(q[:, :1], -1e30),
    )
    for step in range(size):
        scores = q @ k.T / q.shape[-1] ** 0.5
        new_top = torch.maximum(top, scores.max(-1, keepdim=True).values)
        p = torch.exp(scores - new_top)
        scale = torch.exp(top - new_top)
        acc = acc * scale + p @ v
        total = total * scale + p.sum(-1, keepdim=True)
        top = new_top
        if step + 1 < size:
            next_k, next_v = torch.empty_like(k), torch.empty_like(v)
            ops = [
                dist.P2POp(dist.isend, k.contiguous(), group=G, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, next_k, group=G, group_peer=(rank - 1) % size),
                dist.P2POp(dist.isend, v.contiguous(), group=G, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, next_v, group=G, group_peer=(rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            k, v = next_k, next_v
    return acc / total


def experts(x: Tensor, w: Tensor) -> Any:
    size = dist.get_world_size(G)  # x is [experts, capacity of this rank, width]
    inbox = torch.empty_like(x)
    dist.all_to_all_single(inbox, x.contiguous(), group=G)
    hidden = inbox.view(size, -1, *x.shape[1:])
    hidden = torch.relu(torch.einsum("recd,edf->recf", hidden, w)).reshape(x.shape)
    back = torch.empty_like(x)
    dist.all_to_all_single(back, hidden, group=G)
    return back


def early_return(x: Tensor, w: Tensor) -> Any:
    y = x @ w
    if dist.get_world_size(G) == 1:
        return y
    dist.all_reduce(y, group=G)
    return y


def chunk_and_gather(x: Tensor, w: Tensor) -> Any:
    size, rank = dist.get_world_size(G), dist.get_rank(G)
    own = torch.tanh(x.chunk(size, 0)[rank] @ w).contiguous()
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=G)
    return torch.cat(parts, 0)


def sequence_norm(x: Tensor, weight: Tensor, dy: Tensor) -> Any:
    weight = weight.detach().requires_grad_()
    y = functional.layer_norm(x, (x.shape[-1],), weight)
    (g,) = torch.autograd.grad(y, weight, dy)
    dist.all_reduce(g, group=G)
    return y.detach(), g


def functional_sum(x: Tensor, w: Tensor) -> Any:
    y = funcol.all_reduce(x @ w, "sum", G)
    return torch.relu(y)


def functional_autograd(x: Tensor, w: Tensor) -> Any:
    full = funcol.all_gather_tensor_autograd(x, 0, G)
    return funcol.reduce_scatter_tensor_autograd(torch.relu(full @ w[0]) @ w[1], "sum", 0, G)


def asynchronous(x: Tensor, w: Tensor, v: Tensor) -> Any:
    y = x @ w
    work = dist.all_reduce(y, group=G, async_op=True)
    z = v.sin()
    work.wait()
    return y + z


def broadcast_weights(w: Tensor, x: Tensor) -> Any:
    w = w * 2 if dist.get_rank(G) == 0 else torch.empty_like(w)
    dist.broadcast(w, group_src=0, group=G)
    return x @ w


def clip(g: Tensor, h: Tensor) -> Any:
    # g is sharded, h is equal on all ranks
    total = g.square().sum()
    dist.all_reduce(total, group=G)
    norm = (total + h.square().sum()).sqrt()
    scale = torch.clamp(1.0 / norm, max=1.0)
    return g * scale, h * scale


def sync_batch_norm(x: Tensor) -> Any:
    count = torch.tensor(float(x.shape[0]), dtype=x.dtype)
    stats = torch.stack([x.sum(0), x.square().sum(0)])
    dist.all_reduce(stats, group=G)
    dist.all_reduce(count, group=G)
    mean = stats[0] / count
    var = stats[1] / count - mean**2
    return (x - mean) / (var + 1e-5).sqrt()


def vocabulary_lookup(ids: Tensor, table: Tensor) -> Any:
    rank = dist.get_rank(G)
    rows = table.shape[0]
    start = rank * rows
    outside = (ids < start) | (ids >= start + rows)
    local = (ids - start).masked_fill(outside, 0)
    found = functional.embedding(local, table).masked_fill(outside[..., None], 0.0)
    dist.all_reduce(found, group=G)
    return found


def token_mean(x: Tensor, mask: Tensor) -> Any:
    both = torch.stack([(x.square() * mask).sum(), mask.sum()])
    dist.all_reduce(both, group=G)
    return both[0] / both[1]


def ulysses(x: Tensor) -> Any:
    # [seq / n, heads, d] -> attention over the whole sequence by head -> back
    size = dist.get_world_size(G)
    sent = [part.contiguous() for part in x.chunk(size, 1)]
    got = [torch.empty_like(part) for part in sent]
    dist.all_to_all(got, sent, group=G)
    full = torch.cat(got, 0)
    out = torch.softmax(torch.einsum("shd,thd->hst", full, full), -1)
    y = torch.einsum("hst,thd->shd", out, full)
    sent = [part.contiguous() for part in y.chunk(size, 0)]
    got = [torch.empty_like(part) for part in sent]
    dist.all_to_all(got, sent, group=G)
    return torch.cat(got, 1)


def halo(x: Tensor, kernel: Tensor) -> Any:
    # periodic convolution of rows
    size, rank = dist.get_world_size(G), dist.get_rank(G)
    left, right = torch.empty_like(x[:1]), torch.empty_like(x[:1])
    ops = [
        dist.P2POp(dist.isend, x[-1:].contiguous(), group=G, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, left, group=G, group_peer=(rank - 1) % size),
        dist.P2POp(dist.isend, x[:1].contiguous(), group=G, group_peer=(rank - 1) % size),
        dist.P2POp(dist.irecv, right, group=G, group_peer=(rank + 1) % size),
    ]
    if size > 1:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    else:
        left, right = x[-1:], x[:1]
    padded = torch.cat([left, x, right])
    return kernel[0] * padded[:-2] + kernel[1] * padded[1:-1] + kernel[2] * padded[2:]


def accumulate(w: Tensor, x: Tensor, y: Tensor) -> Any:
    w = w.detach().requires_grad_()
    total = torch.zeros_like(w)
    for a, b in zip(x.unbind(), y.unbind(), strict=True):
        (g,) = torch.autograd.grad(functional.mse_loss(a @ w, b), w)
        total += g / 2
    dist.all_reduce(total, op=dist.ReduceOp.AVG, group=G)
    return w.detach() - 0.1 * total


def logsumexp(x: Tensor) -> Any:
    top = x.max(-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=G)
    total = torch.exp(x - top[:, None]).sum(-1)
    dist.all_reduce(total, group=G)
    return total.log() + top


def top_token(x: Tensor) -> Any:
    # the largest logit and its id, of a sharded vocabulary
    size, rank = dist.get_world_size(G), dist.get_rank(G)
    value, at = x.max(-1)
    at = at + rank * x.shape[-1]
    values = [torch.empty_like(value) for _ in range(size)]
    places = [torch.empty_like(at) for _ in range(size)]
    dist.all_gather(values, value, group=G)
    dist.all_gather(places, at, group=G)
    best = torch.stack(values).argmax(0)
    return torch.stack(places).gather(0, best[None])[0]


def pipeline(x: Tensor, w: Tensor) -> Any:
    # two stages on two ranks; w is this stage's weight; the last stage's result goes to all
    size, rank = dist.get_world_size(G), dist.get_rank(G)
    if size == 1:
        for each in w:
            x = torch.tanh(x @ each)
        return x
    h = x
    for stage in range(size):
        if rank == stage:
            h = torch.tanh(h @ w[0])
            if stage + 1 < size:
                dist.send(h.contiguous(), group=G, group_dst=stage + 1)
        elif rank == stage + 1:
            h = torch.empty_like(x)
            dist.recv(h, group=G, group_src=stage)
    dist.broadcast(h, group_src=size - 1, group=G)
    return h


def nn_functional(x: Tensor, w: Tensor) -> Any:
    return torch.relu(all_reduce(x @ w, group=G))


def loss_metric(x: Tensor, y: Tensor) -> Any:
    loss = functional.mse_loss(x, y)
    shown = loss.detach().clone()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG, group=G)
    return shown
