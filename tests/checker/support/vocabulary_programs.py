"""Random lookups in a vocabulary that ranks have parts of, most of them nearly right."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import Mesh, P, R, ShardTypeError, all_reduce, axis_index, axis_size, shard_map
from tests.checker.support.one_device import ONE, RANKS
from tests.checker.support.outcomes import outcome

TABLE = P("a", invariant={"b"})
TRANSPOSED = P(None, "a", invariant={"b"})


class _Draws:
    """The draws of one program: the usual choice most of the time, and then another."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def any(self, choices: Sequence[Any]) -> Any:
        """Draws one of several that are all right."""
        return self._random.choice(choices)

    def often(self, *choices: Any) -> Any:
        """Draws the first one most of the time; calls functions, so that others are not run."""
        drawn = choices[0] if self._random.random() < 0.96 else self._random.choice(choices)
        return drawn() if callable(drawn) else drawn


def _bounds(draws: _Draws, n: int) -> tuple[Tensor, Tensor]:
    size = draws.often(n, n - 1, n + 1, lambda: n * axis_size("a"), 4)
    index = axis_index(draws.often("a", "b", ("a", "b")))
    start = draws.often(
        lambda: index * size,
        lambda: index * size + 1,
        index,
        lambda: index * 0,
        lambda: -index * size,
    )
    return start, start + draws.often(n, n - 1, n + 1, 2 * n, lambda: n * axis_size("a"))


def _mask(draws: _Draws, ids: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The ids that a rank has."""
    lower = draws.often(
        lambda: ids >= start, lambda: ids > start, lambda: ids <= start, lambda: ids >= end
    )
    upper = draws.often(lambda: ids < end, lambda: ids <= end, lambda: ids > end)
    if draws.any((True, False)):
        both: Tensor = draws.often(
            lambda: lower & upper, lower, upper, lambda: lower | upper, lambda: lower & ~upper
        )
        return both
    either: Tensor = draws.often(
        lambda: (
            ~(
                draws.often(lambda: ids < start, lambda: ids <= start)
                | draws.often(lambda: ids >= end, lambda: ids > end)
            )
        ),
        lambda: lower & upper,
    )
    return either


def _of_local(draws: _Draws, local: Tensor, n: int) -> Tensor:
    lower = draws.often(lambda: local >= 0, lambda: local > 0, lambda: local >= 1)
    both: Tensor = lower & draws.often(
        lambda: local < n, lambda: local <= n, lambda: local < n - 1, lambda: local < 4
    )
    return both


def _local(draws: _Draws, ids: Tensor, start: Tensor, mask: Tensor, n: int) -> Tensor:
    """The ids counted from a rank's first one, and 0 for others."""
    local = draws.often(
        lambda: ids - start,
        lambda: start - ids,
        lambda: ids - start - 1,
        ids,
        lambda: ids - start + 1,
    )
    kind = draws.any(range(5))
    if kind == 0:
        chosen: Tensor = torch.where(draws.often(mask, lambda: ~mask), local, 0)
        return chosen
    if kind == 1:
        clamped: Tensor = local.clamp(0, draws.often(n - 1, n - 2, 3))
        return clamped
    if kind == 2:
        product: Tensor = local * draws.often(mask, lambda: ~mask)
        return product
    if kind == 3:
        filled: Tensor = local.masked_fill(draws.often(lambda: ~mask, mask), draws.often(0, 1))
        return filled
    written: Tensor = local.clone()
    written[draws.often(lambda: ~mask, mask)] = 0
    return written


def _looked_up(draws: _Draws, w: Tensor, local: Tensor) -> Tensor:
    local = draws.often(local, lambda: local.flip(0), lambda: local.flip(-1))
    kind = draws.any(range(3))
    if kind == 0:
        rows = w[local]
    elif kind == 1:
        rows = functional.embedding(local, w, padding_idx=draws.often(None, 1))
    else:
        rows = w.index_select(0, local.reshape(-1)).view(*local.shape, -1)
    scaled: Tensor = draws.any((rows, rows * 2.0, rows + 1.0, rows.clone(), -rows))
    return scaled


def _kept(draws: _Draws, rows: Tensor, mask: Tensor) -> Tensor:
    """The rows of the ids that a rank has, and zeros for others."""
    mask = draws.often(
        mask,
        lambda: ~mask,
        lambda: mask.flip(0),
        lambda: mask.transpose(0, 1),
        lambda: mask | ~mask,
    )
    wide, kind = mask[..., None], draws.any(range(5))
    if kind == 0:
        kept = draws.often(lambda: rows * wide, rows, lambda: rows * ~wide)
    elif kind == 1:
        kept = torch.where(wide, rows, draws.often(0.0, 1.0))
    elif kind == 2:
        kept = rows.masked_fill(draws.often(lambda: ~wide, wide), draws.often(0.0, 1.0))
    elif kind == 3:
        kept = rows * wide.to(rows.dtype)
    else:
        kept = rows.clone()
        kept[draws.often(lambda: ~mask, mask)] = draws.often(0.0, 1.0)
    chosen: Tensor = kept
    return chosen


def program(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the body of that number, the same in each interpretation."""

    def body(w: Tensor, ids: Tensor) -> Tensor:
        draws, n = _Draws(seed), w.shape[0]
        start, end = _bounds(draws, n)
        mask = _mask(draws, ids, start, end)
        local = _local(draws, ids, start, mask, n)
        if draws.any((False, False, True)):
            mask = _of_local(draws, ids - start, n)
        kept = _kept(draws, _looked_up(draws, w, local), mask)
        total = all_reduce(kept, "a", op=draws.often("sum", "mean", "max"), dst=R)
        out: Tensor = draws.often(total, kept, lambda: total * 2)
        return out

    return body


def targets(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a body that picks the logits of targets, of classes that ranks have parts of."""

    def body(x: Tensor, ids: Tensor) -> Tensor:
        draws, n = _Draws(seed), x.shape[1]
        target = ids[:, 0]
        start, end = _bounds(draws, n)
        mask = _mask(draws, target, start, end)
        local = _local(draws, target, start, mask, n)
        if draws.any((True, False)):
            picked = x.gather(draws.often(1, -1), local[:, None]).squeeze(1)
        else:
            rows = draws.often(lambda: torch.arange(4), lambda: torch.arange(4).flip(0))
            picked = x[rows, local]
        mask = draws.often(mask, lambda: ~mask, lambda: mask.flip(0))
        kept = torch.where(mask, picked, draws.often(0.0, 1.0))
        out: Tensor = draws.often(lambda: all_reduce(kept, "a", dst=R), kept)
        return out

    return body


def outcome_of(seed: int) -> str:
    """Checks a random program, and runs it if it is accepted: "refused", "right" or "wrong"."""
    generator = torch.Generator().manual_seed(seed)
    body, spec = (targets(seed), TRANSPOSED) if seed % 3 == 2 else (program(seed), TABLE)
    w = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    w = w.T.contiguous() if seed % 3 == 2 else w
    out = 2 * (seed % 2)  # also ids that no rank has, which nothing is looked up for
    ids = torch.randint(-out, 8 + out, (4, 4), generator=generator)

    def on(mesh: Mesh) -> list[Tensor]:
        mapped = shard_map(body, mesh=mesh, in_specs=(spec, P()), out_specs=P(), check="global")
        return outcome(mapped, (w, ids))

    try:
        found, expected = on(RANKS), on(ONE)
    except (ShardTypeError, IndexError):  # no rank has an id, and it is looked up
        return "refused"
    pairs = zip(found, expected, strict=True)
    return "right" if all(torch.allclose(a, b) for a, b in pairs) else "wrong"
