"""Each row of the table by itself: calls, reference meaning per rank, and wrong transposes.

Everything here is keyed by the rows, so that a new row without a test fails.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardmap_torch import Mesh, P, shard_map
from shardmap_torch.collectives import table
from shardmap_torch.collectives.autograd import bind
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import scope_of
from shardmap_torch.collectives.table import Key
from shardmap_torch.types import AxisType, I, Partial, R, V
from tests.programs.support.harness import global_value

Array = npt.NDArray[Any]
Meaning = Callable[[Collective, list[Array]], list[Array]]
"""From every rank's operand to every rank's result, ranks in the order of the axes."""


# -------------------------------------------------------------- what each row does, in numpy


def _sum(c: Collective, xs: list[Array]) -> list[Array]:
    return [np.sum(np.stack(xs), axis=0)] * len(xs)


def _pieces(c: Collective, whole: Array, n: int) -> list[Array]:
    if not c.tiled:
        return [np.take(whole, r, axis=c.dim) for r in range(n)]
    if c.sizes is None:
        return list(np.split(whole, n, axis=c.dim))
    parts = np.split(whole, np.cumsum(c.sizes)[:-1], axis=c.dim)
    return [_lengthen(part, c.dim, max(c.sizes)) for part in parts]


def _lengthen(part: Array, dim: int, length: int) -> Array:
    widths = [(0, length - part.shape[d] if d == dim else 0) for d in range(part.ndim)]
    return np.pad(part, widths)


def _joined(xs: list[Array], dim: int, tiled: bool, sizes: Sequence[int] | None) -> Array:
    if not tiled:
        return np.stack(xs, axis=dim)
    if sizes is not None:
        xs = [np.take(x, range(size), axis=dim) for x, size in zip(xs, sizes, strict=True)]
    return np.concatenate(xs, axis=dim)


def _gather(c: Collective, xs: list[Array]) -> list[Array]:
    return [_joined(xs, c.dim, c.tiled, c.sizes)] * len(xs)


def _sum_scatter(c: Collective, xs: list[Array]) -> list[Array]:
    return _pieces(c, _sum(c, xs)[0], len(xs))


def _exchange(c: Collective, xs: list[Array]) -> list[Array]:
    sent = [_pieces(c, x, len(xs)) for x in xs]
    return [
        _joined([row[r] for row in sent], c.concat_dim, c.tiled, c.concat_sizes)
        for r in range(len(xs))
    ]


def _ragged(c: Collective, xs: list[Array]) -> list[Array]:
    sent = [np.split(x, np.cumsum(counts))[:-1] for x, counts in zip(xs, c.counts, strict=True)]
    joined = [np.concatenate([own[r] for own in sent]) for r in range(len(xs))]
    return [_lengthen(rows, 0, c.lengths[1]) for rows in joined]


def _permute(c: Collective, xs: list[Array]) -> list[Array]:
    out = [np.zeros_like(x) for x in xs]
    for source, target in c.perm:
        out[target] = xs[source]
    return out


def _broadcast(c: Collective, xs: list[Array]) -> list[Array]:
    return [xs[c.source]] * len(xs)


def _mask(c: Collective, xs: list[Array]) -> list[Array]:
    return [x if r == c.source else np.zeros_like(x) for r, x in enumerate(xs)]


def _sum_mask(c: Collective, xs: list[Array]) -> list[Array]:
    return _mask(c, _sum(c, xs))


def _same(c: Collective, xs: list[Array]) -> list[Array]:
    return xs


def _slice(c: Collective, xs: list[Array]) -> list[Array]:
    return [_pieces(c, x, len(xs))[r] for r, x in enumerate(xs)]


def _pad(c: Collective, xs: list[Array]) -> list[Array]:
    out = []
    for r, x in enumerate(xs):
        others = [np.zeros_like(x)] * len(xs)
        out.append(_joined([*others[:r], x, *others[r + 1 :]], c.dim, c.tiled, c.sizes))
    return out


MEANINGS: Mapping[Key, Meaning] = {
    ("all_reduce", Partial, R): _sum,
    ("all_reduce", Partial, I): _sum,
    ("all_gather", V, R): _gather,
    ("all_gather", V, I): _gather,
    ("reduce_scatter", Partial, V): _sum_scatter,
    ("all_to_all", V, V): _exchange,
    ("ragged_all_to_all", V, V): _ragged,
    ("ppermute", V, V): _permute,
    ("broadcast", V, R): _broadcast,
    ("broadcast", V, I): _broadcast,
    ("reduce", Partial, V): _sum_mask,
    ("mask", I, V): _mask,
    ("convert", I, R): _same,
    ("convert", I, V): _slice,
    ("convert", I, Partial): _mask,
    ("convert", R, I): _same,
    ("convert", R, V): _slice,
    ("convert", V, Partial): _pad,
    ("convert", R, Partial): _mask,
    ("reinterpret", R, V): _same,
    ("reinterpret", V, Partial): _same,
    ("reinterpret", R, Partial): _same,
    ("reinterpret", Partial, V): _same,
    ("reinterpret", V, V): _same,
}

BROKEN: Mapping[Key, Key] = {
    ("all_reduce", Partial, R): ("convert", I, R),  # autograd's own wrong guess: no sum
    ("all_reduce", Partial, I): ("all_reduce", Partial, R),  # n times too large
    ("all_gather", V, R): ("convert", I, V),
    ("all_gather", V, I): ("reduce_scatter", Partial, V),
    ("reduce_scatter", Partial, V): ("convert", V, Partial),
    ("all_to_all", V, V): ("reinterpret", R, V),
    ("ragged_all_to_all", V, V): ("reinterpret", R, V),
    ("ppermute", V, V): ("reinterpret", R, V),
    ("broadcast", V, R): ("mask", I, V),
    ("broadcast", V, I): ("reduce", Partial, V),
    ("reduce", Partial, V): ("convert", I, R),
    ("mask", I, V): ("convert", I, R),
    ("convert", I, R): ("convert", R, I),
    ("convert", I, V): ("convert", V, Partial),
    ("convert", I, Partial): ("convert", R, Partial),
    ("convert", R, I): ("reinterpret", R, Partial),
    ("convert", R, V): ("all_gather", V, I),
    ("convert", V, Partial): ("reduce_scatter", Partial, V),
    ("convert", R, Partial): ("reinterpret", R, Partial),
    ("reinterpret", R, V): ("convert", R, Partial),
    ("reinterpret", V, Partial): ("all_reduce", Partial, R),
    ("reinterpret", R, Partial): ("convert", R, Partial),
    ("reinterpret", Partial, V): ("all_reduce", Partial, R),
    ("reinterpret", V, V): ("all_reduce", Partial, R),
}
"""For each row, another row with the same shapes that is not its transpose."""


# ------------------------------------------------------------------------ calls to run


@dataclass(frozen=True)
class Case:
    """One call of one row, and the local shape of its operand."""

    collective: Collective
    shape: tuple[int, ...]
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.collective} {self.shape}"


def cases_of(row: table.CollectiveRow, axes: tuple[str, ...], n: int) -> list[Case]:
    """Calls of `row` that reach each of its arguments. Shapes are such that all rows fit."""
    base = Collective(row.name, row.src, row.dst, axes)
    sizes = tuple(range(1, n + 1))
    total, longest = sum(sizes), max(sizes)
    last = replace(base, source=n - 1)
    chain = replace(base, perm=tuple((r, r + 1) for r in range(n - 1)))
    ring = replace(base, perm=tuple((r, (r + 1) % n) for r in range(n)))
    exchange = replace(base, dim=1, concat_dim=0)
    by_name = {
        "all_gather": [
            Case(base, (2, 3)),
            Case(replace(base, dim=1), (2, 3)),
            Case(replace(base, dim=2, tiled=False), (2, 3)),
            Case(replace(base, tiled=False), ()),
            Case(replace(base, dim=1, sizes=sizes), (2, longest)),
        ],
        "reduce_scatter": [
            Case(base, (2 * n, 3)),
            Case(replace(base, dim=1), (2, 3 * n)),
            Case(replace(base, dim=1, tiled=False), (2, n)),
            Case(replace(base, dim=1, sizes=sizes), (2, total)),
        ],
        "all_to_all": [
            Case(exchange, (2, 3 * n)),
            Case(replace(base, dim=0, concat_dim=2), (n, 2, 3)),
            Case(replace(base, dim=0, concat_dim=1, tiled=False), (n, 2)),
            Case(replace(base, dim=1, concat_dim=0, tiled=False), (2, n, 3)),
            Case(replace(base, dim=1, concat_dim=1, tiled=False), (2, n)),
            Case(replace(exchange, sizes=sizes, concat_sizes=sizes[::-1]), (longest, total)),
            Case(replace(base, dim=1, concat_dim=1), (2, 3 * n)),
        ],
        "ragged_all_to_all": [
            Case(replace(base, lengths=(total, n * total), counts=_counts(n)), (total, 2)),
            Case(replace(base, lengths=(0, 3), counts=((0,) * n,) * n), (0, 2)),
        ],
        "ppermute": [Case(chain, (2, 3)), Case(ring, ()), Case(replace(base, perm=()), (2,))],
        "broadcast": [Case(base, ()), Case(last, (2, 3))],
        "reduce": [Case(base, ()), Case(last, (2, 3))],
        "mask": [Case(base, ()), Case(last, (2, 3))],
        "reinterpret": [Case(base, ()), Case(base, (2, 3))],
        "all_reduce": [Case(base, ()), Case(base, (2, 3)), Case(base, (0, 3))],
    }
    by_move = {
        "slice": [Case(base, (2 * n, 3)), Case(replace(base, dim=1), (2, 3 * n))],
        "pad": [Case(base, (2, 3)), Case(replace(base, dim=1), (2, 3))],
    }
    if row.name == "convert":
        return by_move.get(row.move, [Case(base, ()), Case(base, (2, 3))])
    return by_name[row.name]


def _counts(n: int) -> tuple[tuple[int, ...], ...]:
    """Returns counts of which no two ranks send the same; the last one sends nothing."""
    full = n * (n + 1) // 2
    sizes = [tuple((r + 2 * t) % n + (r == 0) for t in range(n)) for r in range(n)]
    fit = [counts if sum(counts) <= full else (1,) * n for counts in sizes]
    return (*fit[:-1], (0,) * n) if n > 1 else ((full,),)


def breakable(row: table.CollectiveRow, axes: tuple[str, ...], n: int) -> Case:
    """A call of `row` whose transpose may be replaced by that of `BROKEN`."""
    base = Collective(row.name, row.src, row.dst, axes)
    if row.name == "all_to_all":
        return Case(replace(base, concat_dim=1, tiled=False), (n, n))
    if row.name == "ragged_all_to_all":
        return Case(replace(base, lengths=(n, n), counts=((1,) * n,) * n), (n, n))
    return Case(replace(base, perm=((0, 1),)), (n, n))


# -------------------------------------------------------------------------- running them


def per_rank(mesh: Mesh, f: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Runs `f` on `[*axis sizes, *local]` tensors, of which each rank sees its own `[*local]`."""
    ones = (1,) * len(mesh.axis_names)

    def body(*locals_: Tensor) -> Tensor:
        out = f(*(x.reshape(x.shape[len(ones) :]) for x in locals_))
        return out.reshape(*ones, *out.shape)

    spec = P(*mesh.axis_names)
    specs = (spec,) * len(values)
    mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=spec, check=False)
    return global_value(mapped(*values))


def operand(mesh: Mesh, axis_type: AxisType, case: Case, shape: Sequence[int], seed: int) -> Tensor:
    """Every rank's value: equal along the collective's axes where the type says so."""
    axes = case.collective.axes
    sizes = [
        1 if axis in axes and axis_type in (I, R) else size
        for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn((*sizes, *shape), dtype=torch.float64, generator=generator)
    return drawn.expand(*mesh.axis_sizes, *shape).clone()


def apply(case: Case, x: Tensor) -> Tensor:
    collective = case.collective
    return bind(scope_of(collective.name, collective.axes).backend, collective, x)


def forward(case: Case, mesh: Mesh) -> tuple[Array, Array]:
    """Operand and result of all ranks."""
    x = operand(mesh, case.collective.src, case, case.shape, case.seed)
    return x.numpy(), per_rank(mesh, lambda x: apply(case, x), x).numpy()


ADDENDS: Key = ("reinterpret", Partial, V)
"""Reads the addends of a sum one by one, and so its cotangents differ as those of a V do."""

COTANGENT = {I: I, R: Partial, Partial: R, V: V}


def pulled_back(case: Case, mesh: Mesh, out_shape: Sequence[int]) -> tuple[Array, Array]:
    """A cotangent of the result's type, and what the row's transpose makes of it."""
    x = operand(mesh, case.collective.src, case, case.shape, case.seed)
    y_bar = operand(mesh, COTANGENT[case.collective.dst], case, out_shape, case.seed + 50)

    def pull(x: Tensor, y_bar: Tensor) -> Tensor:
        pull_back: Any = torch.func.vjp(lambda x: apply(case, x), x)[1]
        x_bar: Tensor = pull_back(y_bar)[0]
        return x_bar

    return y_bar.numpy(), per_rank(mesh, pull, x, y_bar).numpy()


def groups(mesh: Mesh, axes: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """For each group along `axes`, the coordinates of its ranks, first axis major."""
    others = [axis for axis in mesh.axis_names if axis not in axes]
    found = []
    for fixed in np.ndindex(*[mesh.shape[axis] for axis in others]):
        group = []
        for moving in np.ndindex(*[mesh.shape[axis] for axis in axes]):
            place = dict(zip((*others, *axes), (*fixed, *moving), strict=True))
            group.append(tuple(place[axis] for axis in mesh.axis_names))
        found.append(group)
    return found


def check_forward(case: Case, mesh: Mesh) -> tuple[int, ...]:
    """Compares the row's values with its meaning; returns the local shape of the result."""
    x, y = forward(case, mesh)
    for group in groups(mesh, case.collective.axes):
        expected = MEANINGS[case.collective.row.key](case.collective, [x[place] for place in group])
        for place, wanted in zip(group, expected, strict=True):
            np.testing.assert_allclose(y[place], wanted, rtol=1e-12, atol=1e-12, err_msg=str(case))
    return y.shape[len(mesh.axis_names) :]


def check_transpose(case: Case, mesh: Mesh) -> None:
    """Compares <y_bar, f(x)> with <f^T(y_bar), x>, and checks the type of f^T(y_bar)."""
    x, y = forward(case, mesh)
    y_bar, x_bar = pulled_back(case, mesh, y.shape[len(mesh.axis_names) :])
    src, dst = case.collective.src, case.collective.dst
    read_as = V if case.collective.row.key == ADDENDS else src
    for group in groups(mesh, case.collective.axes):
        xs, ys = [x[place] for place in group], [y[place] for place in group]
        x_bars, y_bars = [x_bar[place] for place in group], [y_bar[place] for place in group]
        np.testing.assert_allclose(
            _pairing(read_as, xs, x_bars), _pairing(dst, ys, y_bars), rtol=1e-10, atol=1e-10
        )
        if read_as in (I, Partial):  # cotangents of both are equal on all ranks
            for each in x_bars:
                np.testing.assert_allclose(each, x_bars[0], rtol=1e-12, atol=1e-12)


def _pairing(axis_type: AxisType, values: list[Array], cotangents: list[Array]) -> float:
    """Returns what a cotangent says of a value, by the value's type."""
    if axis_type == I:
        return float(np.sum(values[0] * cotangents[0]))
    if axis_type == R:
        return float(np.sum(values[0] * sum(cotangents)))
    if axis_type == Partial:
        return float(np.sum(sum(values) * cotangents[0]))
    return float(sum(np.sum(v * c) for v, c in zip(values, cotangents, strict=True)))
