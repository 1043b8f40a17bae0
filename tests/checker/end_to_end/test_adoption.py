"""Programs of people who tried the library, by the files they came in, against one device.

Those whose files are not named here have tests of their own: repairs in `verify/test_repairs.py`,
closures in `test_transform.py`, mixed trees in `optim/test_norm.py`, random numbers in
`run/test_drawing.py`, custom backwards and hooks in `spmd/test_user_code.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, ShardTypeError, all_reduce, axis_index, shard_map
from tests.checker.support.one_device import ONE, RANKS, assert_is_refused, numbers
from tests.checker.support.outcomes import outcome
from tests.support.fuzzing import sampled

# torch's own forward mode scripts some decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Body = Callable[..., Any]

X: Final = numbers(4, 8)
W: Final = numbers(8)
SQUARE: Final = numbers(8, 8)
CACHE: Final = (numbers(1, 2, 8, 4), numbers(1, 2, 1, 4), torch.tensor(2))
HEADS: Final = P(None, "a")


def squares(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().mean()


def mlp_loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = functional.gelu(x @ p["w1"]) @ p["w2"]
    return all_reduce(h, "b", dst=I).square().mean()


def by_backward(p: dict[str, Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    leaves: Any = {k: w.detach().requires_grad_() for k, w in p.items()}
    for part in parts:
        (mlp_loss(leaves, part.detach()) / len(parts)).backward()  # Not into x.grad.
    return [w.grad for w in leaves.values()]


def in_place(p: dict[str, Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    total = {k: torch.zeros_like(w) for k, w in p.items()}
    for part in parts:
        found = torch.func.grad(mlp_loss)(p, part)
        for k in total:
            total[k] += found[k]
    for k in total:
        total[k] /= len(parts)
    return list(total.values())


def by_vmap(p: dict[str, Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    found = torch.func.vmap(torch.func.grad(mlp_loss), (None, 0))(p, torch.stack([*parts]))
    return [g.mean(0) for g in found.values()]


def accumulation(style: Body) -> tuple[Body, Sequence[Tensor], Any, Any]:
    def body(w1: Tensor, w2: Tensor, x: Tensor) -> list[Tensor]:
        found = style({"w1": w1, "w2": w2}, x.chunk(2))
        return [all_reduce(g, "a", op="mean", dst=I) for g in found]

    weights = [P(None, "b"), P("b")]
    return body, (numbers(8, 4), numbers(4, 8), numbers(8, 8)), (*weights, P("a")), weights


def microbatches(w: Tensor, x: Tensor) -> Tensor:
    found = torch.zeros_like(w)
    for part in x.chunk(2):
        found = found + torch.func.grad(lambda w, part=part: (part @ w).square().sum())(w)
    return all_reduce(found, "a", dst=I)


def one_hot_in_a_gradient(x: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return (functional.one_hot(x.topk(1, -1)[1], 8)[:, 0] * x * x).sum()

    found: Tensor = torch.func.grad(loss)(x)
    return found


def counters(x: Tensor, seed: Tensor) -> Tensor:
    """Draws a mask from the position of each entry among all."""
    at = torch.arange(x.numel()).view(x.shape) + axis_index("a") * x.numel() + seed * 7919
    drawn = (at * 2654435761) % 4294967296
    drawn = ((drawn ^ (drawn >> 16)) * 2246822519) % 4294967296
    return x * ((drawn % 1000) < 500) * 2


def cache_in_place(c: Tensor, k: Tensor, pos: Tensor) -> Tensor:
    c = c.clone()
    c[:, :, pos : pos + 1] = k
    return c


def cache_by_index(c: Tensor, k: Tensor, pos: Tensor) -> Tensor:
    c = c.clone()
    c[:, :, pos + torch.arange(k.shape[2])] = k
    return c


def cache_by_mask(c: Tensor, k: Tensor, pos: Tensor) -> Tensor:
    return torch.where((torch.arange(c.shape[2]) == pos)[:, None], k, c)


def attend_to_cache(c: Tensor, k: Tensor, pos: Tensor) -> Tensor:
    seen = (torch.arange(c.shape[2]) <= pos)[None]
    return functional.scaled_dot_product_attention(k, c, c, attn_mask=seen)


def repeated_heads(c: Tensor, k: Tensor, pos: Tensor) -> Tensor:
    k = k.repeat_interleave(3, 1)
    return functional.scaled_dot_product_attention(k, c, c, enable_gqa=True)


def centroids(x: Tensor, centers: Tensor) -> Tensor:
    """Takes a step of k-means."""
    nearest = torch.cdist(x, centers).argmin(1)
    chosen = functional.one_hot(nearest, centers.shape[0]).to(x.dtype)
    total, count = all_reduce((chosen.T @ x, chosen.sum(0)), "a", dst=I)
    return total / count.clamp(min=1)[:, None]


def autoencoder(encoder: Tensor, decoder: Tensor, x: Tensor) -> Tensor:
    """Adds a reconstruction and a divergence from a prior, each summed for a sample."""
    code = x @ encoder
    rebuilt = (code.tanh() @ decoder - x).square().sum(-1).mean()
    prior = (code.square() - 1 - (code.square() + 0.1).log()).sum(-1).mean()
    return all_reduce(rebuilt + 0.1 * prior, "a", op="mean", dst=I)


OWN: Final = P(replicate={"a"})
DP: Final = ((W, X), (OWN, P("a")), P())
ROWS: Final = (P("a"), OWN)
WRITES: Final = (CACHE, (HEADS, HEADS, P()), HEADS)

TARGETS: Final = torch.tensor([0, 7, 3, 3])
QUERIES, KEYS, VALUES = numbers(2, 4, 4, 4), numbers(2, 2, 4, 4), numbers(2, 2, 4, 4) + 1

PROGRAMS: Final[dict[str, tuple[Body, Sequence[Tensor], Any, Any]]] = {
    "accumulation by backward": accumulation(by_backward),
    "accumulation in place": accumulation(in_place),
    "accumulation by vmap": accumulation(by_vmap),
    "ce_mean_global": (
        lambda x, t: all_reduce(functional.cross_entropy(x, t), "a", op="mean", dst=I),
        *((X, TARGETS), P("a"), P()),
    ),
    "gqa_global": (
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
        *((QUERIES, KEYS, VALUES), HEADS, HEADS),
    ),
    "ddp_pattern_global": (
        lambda w, x: all_reduce(torch.func.grad(squares)(w, x), "a", op="mean", dst=I),
        *DP,
    ),
    "microbatch_chunk_global": (microbatches, *DP),
    "one_hot": (lambda t: functional.one_hot(t, 8), (TARGETS,), P("a"), P("a")),
    "one_hot of topk": (lambda x: functional.one_hot(x.topk(2, -1)[1], 8), (X,), P("a"), P("a")),
    "one_hot in a gradient": (one_hot_in_a_gradient, (X,), P("a"), P("a")),
    "one_hot of an input in a gradient": (
        lambda x, t: torch.func.grad(lambda x: (functional.one_hot(t, 8) * x * x).sum())(x),
        *((X, TARGETS), P("a"), P("a")),
    ),
    "narrow_tensor_start": (
        lambda w, x: x * torch.narrow(w, 0, axis_index("a") * x.shape[1], x.shape[1]),
        (W, X),
        (OWN, HEADS),
        HEADS,
    ),
    "narrow_tensor_start by index_select": (
        lambda w, x: x * w.index_select(0, axis_index("a") * x.shape[1] + torch.arange(x.shape[1])),
        *((W, X), (OWN, HEADS), HEADS),
    ),
    "dropout": (counters, (X, torch.tensor(3)), (P("a"), P()), P("a")),
    "cache_write_global by index_copy": (
        lambda c, k, pos: c.index_copy(2, pos + torch.arange(k.shape[2]), k),
        *WRITES,
    ),
    "cache_write_global in place": (cache_in_place, *WRITES),
    "cache_write_global by index": (cache_by_index, *WRITES),
    "cache_write_global by mask": (cache_by_mask, *WRITES),
    "cache_write_global attends": (attend_to_cache, *WRITES),
    "gqa_sdpa_global": (repeated_heads, *WRITES),
    "k-means": (centroids, (numbers(8, 3), numbers(4, 3)), (P("a"), P()), P()),
    "autoencoder": (autoencoder, (SQUARE, SQUARE.sin(), X), (P(), P(), P("a")), P()),
    "Jacobian by columns": (
        lambda x, w: torch.func.jacfwd(lambda w: (x @ w).tanh())(w),
        *((X, W), (P("a"), P()), P("a")),
    ),
}


def add_to_row(x: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    x[axis_index("a")] += w
    return x


def replace_row(x: Tensor, w: Tensor) -> Tensor:
    x, at = x.clone(), axis_index("a")
    x[at] = x[at] + w
    return x


def add_to_rows(x: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    x[axis_index("a").reshape(1)] += w
    return x


def index_add(x: Tensor, w: Tensor) -> Tensor:
    return x.index_add(0, axis_index("a").reshape(1), w[None])


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.sample(13)
@pytest.mark.parametrize("check", sampled([True, "global"], "global"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_a_user_is_accepted_and_right(name: str, check: Any) -> None:
    body, args, in_specs, out_specs = PROGRAMS[name]
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    found = outcome(shard_map(body, mesh=RANKS, check=check, **specs), args)
    assert_equal(found, outcome(shard_map(body, mesh=ONE, **specs), args))


def test_a_slice_scatter_at_the_position_of_a_tensor_is_refused_with_another_way() -> None:
    """`cache[:, :, pos : pos + 1] = k` does the same, and is accepted."""
    _, args, in_specs, out_specs = PROGRAMS["cache_write_global in place"]
    f = shard_map(
        lambda c, k, pos: torch.slice_scatter(c, k, 2, pos, pos + 1),
        mesh=RANKS,
        in_specs=in_specs,
        out_specs=out_specs,
    )
    with pytest.raises(ShardTypeError, match="asks for a plain Python number from a tensor"):
        f(*args)


@pytest.mark.parametrize("body", [add_to_row, replace_row, add_to_rows, index_add])
def test_index_iadd_is_each_rank_s_own_row_and_is_no_program_of_one_device(body: Body) -> None:
    """Runs what docs/limits.md names: writes by index at positions of a sharded dim."""
    rows = torch.tensor([1, 0, 0, 1])[:, None]  # The first of rank 0, the second of rank 1.
    found = outcome(shard_map(body, mesh=RANKS, in_specs=ROWS, out_specs=P("a")), (X, W))
    assert_equal(found, outcome(lambda x, w: x + rows * w, (X, W)))
    assert_is_refused(body, (X, W), ROWS, P("a"), "every rank has a value of its own")


class Trainer:
    step = 0


@pytest.mark.parametrize("check", [True, "global"])
def test_static_step_is_the_step_of_each_call(check: Any) -> None:
    options: Any = {"mesh": RANKS, "out_specs": P(), "check": check}
    passed = shard_map(
        lambda w, step: all_reduce((w * step).sum(), "a", dst=I), in_specs=(P("a"), None), **options
    )
    held = shard_map(
        lambda w: all_reduce((w * Trainer.step).sum(), "a", dst=I), in_specs=P("a"), **options
    )
    for step in range(3):  # a fourth number would earn the warning that it is another one each time
        Trainer.step, expected = step, outcome(lambda w, step=step: (w * step).sum(), (W,))
        assert_equal(outcome(lambda w, step=step: passed(w, step), (W,)), expected)
        assert_equal(outcome(held, (W,)), expected)
