"""Random positions that a body counts from its rank's index, most of them nearly right."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import (
    Mesh,
    P,
    ShardTypeError,
    axis_index,
    axis_size,
    check_program,
    make_mesh,
    shard_map,
)

_AXES: Final = ("a", "b")
_SIZES: Final = ((2, 2), (2, 4), (4, 2))
_SPECS: Final = (P("a"), P(None, "a"), P("a", "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a")))


class _Drawn:
    """The draws of one program, the same in each interpretation of it."""

    def __init__(self, seed: int, spec: P) -> None:
        self.random, self._spec = random.Random(seed), spec

    def often(self, usual: Any, others: Sequence[Any], chance: float = 0.85) -> Any:
        """Draws the usual value most of the time."""
        drawn = self.random.random() < chance
        other = self.random.choice(others)
        return usual if drawn else other

    def number(self, x: Tensor, dim: int) -> int:
        n = x.shape[dim]
        near = (0, 1, 2, -1, n + 1, n - 1, 2 * n, n * axis_size("a"), x.shape[1 - dim], 4, 8)
        return int(self.often(n, near))

    def index(self, dim: int) -> Tensor:
        own = self._spec.entries[dim] if dim < len(self._spec.entries) else None
        axes: Any = self.often(own or "a", ("a", "b", ("a", "b"), ("b", "a")))
        index, size = axis_index(axes), axis_size(axes)
        kind = self.often(0, (1, 2), 0.93)
        return index if kind == 0 else (index + 1) % size if kind == 1 else size - 1 - index

    def positions(self, x: Tensor, dim: int) -> Tensor:
        """Draws numbers for the entries of a dim."""
        n, kind = x.shape[dim], self.often(0, (1, 2, 3), 0.8)
        made = (
            torch.arange(n),
            torch.arange(0, 2 * n, 2),
            torch.arange(n, dtype=x.dtype),
            torch.arange(1, n + 1),
        )[kind]
        for _ in range(self.often(1, (0, 2))):
            offset = self.index(dim) * self.number(x, dim)
            made = self.often(made + offset, (made - offset, offset - made), 0.92)
        change = self.random.randrange(8)
        by = self.number(x, dim)
        if change < 3:
            made = (made * by, made + by, by - made)[change]
        return made[:, None] if dim == 0 else made

    def result(self, x: Tensor, table: Tensor, dim: int) -> Tensor:
        """Draws what is done with positions."""
        at, use = self.positions(x, dim), self.random.randrange(6)
        if use == 0:
            return x * at.to(x.dtype).sin()
        if use == 1:
            return x * (at >= self.positions(x, self.often(1 - dim, (dim,), 0.6)))
        if use == 2:
            return x * (at < self.number(x, dim))
        if use == 3:
            return x * table[at.long().reshape(-1) % 8].reshape(at.shape)
        if use == 4:
            return torch.where(at % 3 == 0, x, 0.0)
        return x * torch.nn.functional.one_hot(at.long() % 8, 8).select(-1, 3)


@cache
def _mesh(sizes: tuple[int, int], kind: Any) -> Mesh:
    return make_mesh(sizes, _AXES, kind=kind)


def outcome_of(seed: int) -> str:
    """Checks a random program, and runs it if it is accepted: "refused", "right" or "wrong"."""
    draws = random.Random(seed)
    spec, sizes = draws.choice(_SPECS), draws.choice(_SIZES)
    dim = 0 if spec.entries[0] is not None else 1

    def body(x: Tensor, table: Tensor) -> Tensor:
        return _Drawn(seed, spec).result(x, table, dim)

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 8, dtype=torch.float64, generator=generator)
    table = torch.randn(8, dtype=torch.float64, generator=generator)
    specs: dict[str, Any] = {"in_specs": (spec, P()), "out_specs": spec}
    try:
        check_program(
            shard_map(body, mesh=_mesh(sizes, "abstract"), check="global", **specs), x, table
        )
    except ShardTypeError:
        return "refused"
    got = shard_map(body, mesh=_mesh(sizes, "simulated"), check="global", **specs)(x, table)
    expected = shard_map(body, mesh=_mesh((1, 1), "simulated"), check=False, **specs)(x, table)
    return "right" if torch.allclose(got, expected) else "wrong"
