"""Bodies that people write, under check="global" on two axes, against one device."""

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    convert,
    local_region,
    ppermute,
    shift,
    validate_rule,
)
from tests.checker.support.one_device import assert_is_one_device, numbers

# torch's own forward mode scripts some decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

TOKENS: Final = P(None, "b")


@local_region(in_types=(TOKENS,) * 3, out_types=TOKENS)
def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends causally, [n, t/r, d]; keys and values go round."""
    count, rank, length = axis_size("b"), axis_index("b"), q.shape[1]
    places = torch.arange(length)
    top, total, out = torch.full_like(q[..., :1], -1e30), torch.zeros_like(q[..., :1]), 0 * q
    for step in range(count):
        owner = (rank - step) % count
        seen = (rank * length + places)[:, None] >= owner * length + places
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -1e30)
        high = torch.maximum(top, scores.amax(-1, keepdim=True)).detach()
        weights = (scores - high).exp() * seen
        total = total * (top - high).exp() + weights.sum(-1, keepdim=True)
        out = out * (top - high).exp() + weights @ v
        top, k, v = high, shift(k, "b", 1), shift(v, "b", 1)
    return out / total


def attention_block(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    return x + ring(x @ wq, x @ wk, x @ wv).tanh()


def stage(x: Tensor, weights: Tensor) -> Tensor:
    for weight in weights:
        x = x + (x @ weight).tanh()
    return x


@local_region(in_types=(P(replicate={"b"}), P("b")), out_types=P(partial={"b"}))
def pipeline(batches: Tensor, weights: Tensor) -> Tensor:
    """Runs microbatches [m, n, d] through stages; the last rank has the results."""
    count, rank = axis_size("b"), axis_index("b")
    state, out = torch.zeros_like(batches[0]), []
    for step in range(len(batches) + count - 1):
        x = torch.where(rank == 0, batches[min(step, len(batches) - 1)], state)
        y = stage(x, weights)
        if step >= count - 1:
            out.append(torch.where(rank == count - 1, y, 0.0))
        if count > 1:
            state = ppermute(y, "b", [(i, i + 1) for i in range(count - 1)])
    return torch.stack(out)


def gpipe(x: Tensor, weights: Tensor) -> Tensor:
    batches = x.unflatten(1, (2, -1)).transpose(0, 1)  # each of some tokens of every sample
    y: Tensor = all_reduce(pipeline(batches, weights), "b", dst=I)
    return y.transpose(0, 1).flatten(1, 2)


@local_region(in_types=(P("b"), P("b"), P("b")), out_types=P("b"))
def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Sends each token [n/r, d] to its expert, with room for all tokens of a rank at each."""
    count, room = axis_size("b"), x.shape[0]
    chosen = functional.one_hot(ids, weights.shape[0] * count)
    place = (chosen.cumsum(0) * chosen - 1).clamp(min=0)
    slot = functional.one_hot(place, room) * chosen.unsqueeze(-1)  # [n, e, c]
    sent = torch.einsum("nec,nd->ecd", slot.to(x.dtype), x)
    local = all_to_all(sent, "b", split_dim=0, concat_dim=1)
    back = all_to_all((local @ weights).relu(), "b", split_dim=1, concat_dim=0)
    return torch.einsum("nec,ecd->nd", slot.to(x.dtype), back)


def mixture(x: Tensor, gate: Tensor, weights: Tensor) -> Tensor:
    scores = (x @ gate).softmax(-1)
    best, ids = scores.max(-1)
    return x + best.unsqueeze(-1) * experts(x, ids, weights)


def vision(x: Tensor, patch: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Cuts images into patches by a convolution, and applies a block with sharded heads."""
    tokens = functional.conv2d(x, patch, stride=2).flatten(2).mT  # [n, t, d]
    h = convert(functional.layer_norm(tokens, tokens.shape[-1:]), "b", src=I, dst=R)
    q, k, v = (h @ w for w in qkv.unbind(0))
    q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in (q, k, v))
    y = ((q @ k.mT / 2**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    tokens = tokens + all_reduce(y @ out, "b", dst=I)
    h = convert(functional.layer_norm(tokens, tokens.shape[-1:]), "b", src=I, dst=R)
    tokens = tokens + all_reduce(functional.gelu(h @ up) @ down, "b", dst=I)
    pooled: Tensor = tokens.mean(1)
    return pooled


def centroids(x: Tensor, centers: Tensor) -> Tensor:
    """Takes a step of k-means."""
    nearest = torch.cdist(x, centers).argmin(1)
    chosen = functional.one_hot(nearest, centers.shape[0]).to(x.dtype)
    total, count = all_reduce((chosen.T @ x, chosen.sum(0)), "a", dst=I)
    return total / count.clamp(min=1)[:, None]


def picked_loss(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Takes a rank's logits of the targets by `gather`, and the first of their one column."""
    z = h @ w
    z = z - all_reduce(z.detach().max(-1, keepdim=True)[0], "b", op="max", dst=R)
    start = axis_index("b") * z.shape[1]
    own = (targets >= start) & (targets < start + z.shape[1])
    local = (targets - start).clamp(0, z.shape[1] - 1)
    picked = all_reduce(z.gather(1, local[:, None])[:, 0] * own, "b", dst=I)
    losses = all_reduce(z.exp().sum(-1), "b", dst=I).log() - picked
    return all_reduce(losses.mean(), "a", op="mean", dst=I)


def real_or_not(x: Tensor, w: Tensor) -> Tensor:
    """Compares classes with a target that is made in the body."""
    targets = torch.zeros(x.shape[0], dtype=torch.int64)
    total = functional.cross_entropy(x @ w, targets, reduction="sum")
    return all_reduce(total, "a", dst=I)


def sensitivities(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.func.jacfwd(lambda w: (x @ w).tanh())(w)
    return found


BODIES: Final[dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], Any, P]]] = {
    "ring attention": (
        attention_block,
        (numbers(2, 4, 6), *(numbers(6, 6) * s for s in (1.0, 0.5, 2.0))),
        (P("a", "b"), P(), P(), P()),
        P("a", "b"),
    ),
    "GPipe": (gpipe, (numbers(4, 4, 6), numbers(4, 6, 6)), (P("a"), P("b")), P("a")),
    "mixture of experts": (
        mixture,
        (numbers(8, 6), numbers(6, 4), numbers(4, 6, 6)),
        (P("b"), P(), P("b")),
        P("b"),
    ),
    "k-means": (centroids, (numbers(8, 3), numbers(4, 3)), (P("a"), P()), P()),
    "Megatron's loss": (
        picked_loss,
        (numbers(8, 6), numbers(6, 10), torch.arange(8) % 5 * 2),
        (P("a"), P(None, "b"), P("a")),
        P(),
    ),
    "targets of one class": (real_or_not, (numbers(8, 6), numbers(6, 4)), (P("a"), P()), P()),
    "Jacobian by columns": (sensitivities, (numbers(8, 6), numbers(6)), (P("a"), P()), P("a")),
    "vision transformer": (
        vision,
        (
            numbers(4, 3, 4, 4),
            numbers(8, 3, 2, 2),
            numbers(3, 8, 8),
            numbers(8, 8),
            numbers(8, 12),
            numbers(12, 8),
        ),
        (P("a"), P(), P(None, None, "b"), P("b"), P(None, "b"), P("b")),
        P("a"),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_people_write_is_that_of_one_device(name: str) -> None:
    assert_is_one_device(*BODIES[name])


def test_the_regions_keep_their_promises() -> None:
    validate_rule(ring, *(numbers(2, 12, 4) * s for s in (1.0, 0.5, 2.0)))
    validate_rule(pipeline, numbers(2, 3, 4), numbers(12, 4, 4))
    ids = torch.tensor([3, 0, 1, 5, 0, 2, 4, 4, 1, 3, 5, 2])
    validate_rule(experts, numbers(12, 4), ids, numbers(12, 4, 4))
