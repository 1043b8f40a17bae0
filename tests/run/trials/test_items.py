"""check="global": loops over the items of a sharded dim, of which one device has more."""

import random
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, ShardMapError, all_reduce, axis_index, make_mesh, shard_map

Body = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SPECS: Final = (P(), P("ep"), P("ep"), P(None, "ep"))
X: Final = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
W: Final = torch.randn(4, 4, 4, dtype=torch.float64)
V: Final = torch.randn(4, 4, 4, dtype=torch.float64)
GATES: Final = torch.rand(3, 4, dtype=torch.float64)


def total(x: Tensor | int) -> Tensor:
    assert isinstance(x, Tensor)
    return all_reduce(x, "ep", dst=I)


def added(x: Tensor, w: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for a, b in zip(w, v, strict=True):
        y = y + (x.relu() @ a).tanh() @ b
    return total(y)


def routed(x: Tensor, w: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    chosen, first = gates.shape[0] - torch.arange(3), axis_index("ep") * w.shape[0]
    return total(sum((chosen == first + e)[:, None] * (x @ w[e]) for e in range(w.shape[0])))


def own_gradient(x: Tensor, w: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        return total(sum((x @ a).tanh().square().sum() for a in w))

    found: Tensor = torch.func.grad(loss)(w)
    return total(torch.stack([a - 0.1 * g for a, g in zip(w, found, strict=True)]).sum(0)[:3])


def in_a_vmap(x: Tensor, w: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    return total(torch.func.vmap(lambda row: sum((row @ a).tanh() for a in w))(x))


def numbers_from_one(x: Tensor, w: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    first = axis_index("ep") * w.shape[0] + 1
    return total(sum((torch.arange(3) == first + e)[:, None] * (x @ a) for e, a in enumerate(w)))


RIGHT: Final = [
    numbers_from_one,
    in_a_vmap,
    *(added, routed, own_gradient),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("body", RIGHT)
def test_a_loop_over_a_ranks_items_is_one_over_all_items(body: Body, size: int) -> None:
    compare(body, size)


def compare(body: Body, size: int = 2) -> None:
    """Requires that ranks and one device agree, and so do the gradients of all arguments."""
    found = []
    for ranks in (size, 1):
        mesh = make_mesh((ranks,), ("ep",), kind="simulated")
        args = [x.clone().requires_grad_() for x in (X, W, V, GATES)]
        y = shard_map(body, mesh=mesh, in_specs=SPECS, out_specs=P(), check="global")(*args)
        seed = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
        grads = torch.autograd.grad((y * seed).sum(), args, allow_unused=True)
        found.append((y, *(g for g in grads if g is not None)))
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there)


# ---------------------------------------------------------------------------- random loops

PIECES: Final = [
    *("h = h.tanh()", "h = h @ b", "h = h * g", "h = h + x", "h = h.softmax(-1)", "h = h * 0.5"),
    *("h = h * (e + 1)", "h = h if e % 2 else h.sin()", "h = h + h", "h = h @ W[0]", "h *= 2"),
    *("h = h.detach()", "x = h", "h = h * (e == first + e)", "h = h - y", "h = h / W.shape[0]"),
    *("h = h * (first + e)", "n += 1", "h = h * n", "h = x.cos() @ a", "h = h * W.shape[0]"),
    *("h = h if e < 2 else h.sin()", "h = h.sum(0, keepdim=True)", "h = x.T @ h"),
]
SUMS: Final = ["y = y + h", "y += h", "y = y + h; y = y * 1.5", "y = y - h", "y = h", "y += h + x"]
ENDS: Final = [
    *("total(y)", "total(y)", "total(y).tanh()", "total(torch.stack(hs).sum(0))"),
    *("total(torch.cat(hs, 1).sin().sum(1))", "total(torch.stack(hs).tanh().sum((0, 1)))"),
    *("total(y.tanh())", "total(sum(hs[1:], hs[0]))", "total(hs[0])", "y"),
]


def random_body(rng: random.Random) -> str:
    """Writes a loop over items, right or wrong."""
    pieces = rng.choices(PIECES[:6], k=rng.randint(0, 2)) + rng.choices(PIECES, k=rng.randint(0, 2))
    rng.shuffle(pieces)
    lines = ["h = x @ a", *pieces, rng.choice([*SUMS[:2], *SUMS]), "hs.append(h)"]
    begin = "y, hs, first = torch.zeros_like(x), [], axis_index('ep') * W.shape[0]"
    loop = "for e, (a, b) in enumerate(zip(W, V)):\n  g = G[:, e, None]\n  " + "\n  ".join(lines)
    text = f"{begin}\nn = torch.ones(3, 4, dtype=x.dtype)\n{loop}\nreturn {rng.choice(ENDS)}"
    return "def body(x, W, V, G):\n  " + text.replace("\n", "\n  ")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.fuzz) for n in range(2, 20))]
)
def test_random_loops_that_are_accepted_equal_one_device(seed: int, size: int) -> None:
    rng, accepted = random.Random(f"{seed} {size}"), 0
    for _ in range(4 if seed == 1 else 60):
        text = random_body(rng)
        names = dict(globals())
        exec(text, names)
        try:
            compare(names["body"], size)
        except (ShardMapError, RuntimeError, IndexError):
            continue
        except AssertionError as error:
            raise AssertionError(text) from error
        accepted += 1
    assert accepted
