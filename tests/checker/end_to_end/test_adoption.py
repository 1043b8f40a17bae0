"""Programs of people who tried the library, by the files they came in, against one device.

Those whose files are not named here have tests of their own: accumulation in
`test_accumulation_programs.py`, losses in `spmd/ops/test_losses.py`, attention in
`spmd/ops/test_attention.py`, custom backwards and hooks in `spmd/test_user_code.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, all_reduce, axis_index, make_mesh, shard_map
from tests.checker.support.one_device import numbers

Body = Callable[..., Tensor]

RANKS: Final = make_mesh((2,), ("a",), kind="simulated", simulate="ranks")
ONE: Final = make_mesh((1,), ("a",), kind="simulated", simulate="ranks")

X: Final = numbers(4, 8)
W: Final = numbers(8)
CACHE: Final = (numbers(1, 2, 8, 4), numbers(1, 2, 1, 4), torch.tensor(2))
HEADS: Final = P(None, "a")


def squares(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().mean()


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


OWN: Final = P(replicate={"a"})
DP: Final = ((W, X), (OWN, P("a")), P())
WRITES: Final = (CACHE, (HEADS, HEADS, P()), HEADS)

PROGRAMS: Final[dict[str, tuple[Body, Sequence[Tensor], Any, P]]] = {
    "ddp_pattern_global": (
        lambda w, x: all_reduce(torch.func.grad(squares)(w, x), "a", op="mean", dst=I),
        *DP,
    ),
    "microbatch_chunk_global": (microbatches, *DP),
    "one_hot": (one_hot_in_a_gradient, (X,), P("a"), P("a")),
    "narrow_tensor_start": (
        lambda w, x: x * torch.narrow(w, 0, axis_index("a") * x.shape[1], x.shape[1]),
        (W, X),
        (OWN, HEADS),
        HEADS,
    ),
    "dropout": (counters, (X, torch.tensor(3)), (P("a"), P()), P("a")),
    "cache_write_global by index_copy": (
        lambda c, k, pos: c.index_copy(2, pos + torch.arange(k.shape[2]), k),
        *WRITES,
    ),
    "cache_write_global in place": (cache_in_place, *WRITES),
    "cache_write_global by index": (cache_by_index, *WRITES),
    "cache_write_global by mask": (cache_by_mask, *WRITES),
    "cache_write_global by slice": (
        lambda c, k, pos: torch.slice_scatter(c, k, 2, pos, pos + 1),
        *WRITES,
    ),
    "cache_write_global attends": (attend_to_cache, *WRITES),
    "gqa_sdpa_global": (repeated_heads, *WRITES),
}


def outcome(name: str, mesh: Any, check: Any) -> list[Tensor]:
    """The value, and the gradients of all inputs that can have one."""
    body, args, in_specs, out_specs = PROGRAMS[name]
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
    mapped = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)
    y = mapped(*leaves)
    if not y.requires_grad:
        return [y]
    weights = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
    smooth = [x for x in leaves if x.requires_grad]
    return [y, *torch.autograd.grad((y * weights).sum(), smooth, materialize_grads=True)]


@pytest.mark.parametrize("check", [True, "global"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_a_user_is_accepted_and_right(name: str, check: Any) -> None:
    found, expected = outcome(name, RANKS, check), outcome(name, ONE, False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
