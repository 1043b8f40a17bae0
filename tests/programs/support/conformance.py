"""The same numbers on every mesh: cells of collective, dtype, memory and derivative.

The collectives are all calls of `cases_of`, that is every row of the table with each of its
arguments, and those of the public functions that add something. Each runs on values that hurt. What
should come out is computed here from the values of all ranks, on bytes and in wide numbers, and not
by the reference that simulated ranks run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch import (
    CollectiveError,
    I,
    Mesh,
    P,
    Partial,
    R,
    V,
    all_reduce,
    reduce_scatter,
    shard_map,
)
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.table import ROWS
from shardmap_torch.run import vmap
from shardmap_torch.types import AxisType
from tests.programs.support.rows import MEANINGS, Case, apply, cases_of

Array: TypeAlias = npt.NDArray[Any]
Call: TypeAlias = Callable[[Tensor], Tensor]

HALVES: Final = (torch.float16, torch.bfloat16)
WIDE: Final = (torch.float32, torch.float64)
COMPLEX: Final = (torch.complex64, torch.complex128)
INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
ONLY_MOVED: Final = (
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
"""Dtypes that torch does not add, and so no mesh."""
DTYPES: Final = (*WIDE, *HALVES, *COMPLEX, *INTEGERS, torch.bool, *ONLY_MOVED)
DIFFERENTIABLE: Final = (*WIDE, *HALVES, *COMPLEX)

MODES: Final = ("forward", "gradient", "jvp", "vmap")

MEMORY: Final[Mapping[str, Call]] = {
    "dense": lambda x: x.clone(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "column": lambda x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "no columns": lambda x: x[..., :0],
}
"""Tensors of the values of another one, or of some of them, in other memory; scalars are dense."""

COLUMNS: Final = 16
"""Length of a dim behind those of a case, which nothing moves: so each cell has many values."""


# ------------------------------------------------------------------------------- the cells


@dataclass(frozen=True)
class Cell:
    """One call, and what it is.

    Attributes:
        name: what the page and errors call it.
        call: the call, on a rank's value.
        case: the row and its arguments, and the shape of an operand.
        op: that of a public function; empty for a row, which says itself.
    """

    name: str
    call: Call
    case: Case
    op: str = ""

    @property
    def collective(self) -> Collective:
        return self.case.collective

    @property
    def src(self) -> AxisType:
        return self.collective.src

    def promise(self, dtype: torch.dtype) -> str:
        """Says how the results of meshes agree."""
        if not self.runs(dtype, "forward", "gloo"):
            return "refused"
        if self.op in ("max", "min"):
            return "equal"
        if not (self.op or self.collective.movement.adds):
            return "bits"
        if dtype in HALVES:
            return "one rounding"
        return "each addition rounds" if dtype in DIFFERENTIABLE else "equal"

    def runs(self, dtype: torch.dtype, mode: str, kind: str) -> bool:
        """Returns whether there is such a cell; others are refused, or no mathematics."""
        collective, combines = self.collective, bool(self.op) or self.collective.movement.adds
        unordered = self.op in ("max", "min") and dtype.is_complex
        whole = self.op == "mean" and not (dtype.is_floating_point or dtype.is_complex)
        if unordered or whole or (combines and dtype in ONLY_MOVED):
            return False
        if mode in ("gradient", "jvp") and dtype not in DIFFERENTIABLE:
            return False
        if collective.movement.ragged:  # its sizes are data
            return kind != "vmap" and mode in ("forward", "gradient")
        return not (kind == "ranks" and mode == "jvp")  # threads share the levels of forward mode


def cells(num_ranks: int) -> Iterator[Cell]:
    """Yields all cells of a mesh of so many ranks along "tp"."""
    for row in ROWS:
        for case in cases_of(row, ("tp",), num_ranks):
            yield Cell(f"{case.collective} {_told(case)}", partial(apply, case), case)
    for case in cases_of(ROWS[1], ("tp",), num_ranks):
        for op in ("sum", "mean", "max", "min"):
            call = partial(all_reduce, axis="tp", dst=I, op=op)
            yield Cell(f"all_reduce(op={op!r}) {_told(case)}", call, case, op)
    scatter = Case(Collective("reduce_scatter", *ROWS[4].key[1:], ("tp",)), (2 * num_ranks, 3))
    call = partial(reduce_scatter, axis="tp", op="mean")
    yield Cell(f"reduce_scatter(op='mean') {_told(scatter)}", call, scatter, "mean")


def _told(case: Case) -> str:
    c = case.collective
    options = {k: v for k, v in c.options.items() if k not in ("dim", "counts", "lengths") or v}
    return f"of {list(case.shape)}" + "".join(f", {k}={v}" for k, v in options.items())


# ------------------------------------------------------------------------------ the values


def hurting(dtype: torch.dtype) -> list[float | int]:
    """Returns numbers that are lost or rounded where something is done otherwise."""
    if dtype == torch.bool:
        return [0, 1]
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        return [0, 1, 2, info.max, info.min, info.max - 1, info.max // 2 + 1]
    limits = torch.finfo(dtype)
    some: list[float] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1 + limits.eps,
        3.0,
        256.0,
        limits.smallest_normal / 2,
    ]
    infinite = dtype != torch.float8_e4m3fn
    return [*some, torch.nan, *([torch.inf, -torch.inf] if infinite else []), limits.max]


POOL: Final = 2048
"""Numbers of a rank."""


def values(dtype: torch.dtype, num_ranks: int, seed: int = 0) -> Tensor:
    """Returns numbers [n, POOL] of all ranks: what hurts alone, in ties, and by lot together."""
    numbers = hurting(dtype)
    draw = np.random.default_rng(seed)
    columns = [[number] * num_ranks for number in numbers]
    columns += [[*[1] * rank, number, *[1] * (num_ranks - rank - 1)]
                for number in numbers for rank in (0, num_ranks - 1)]  # fmt: skip
    draws = draw.choice(len(numbers) - 1, (POOL, num_ranks))  # the largest overflows by the order
    columns += [[numbers[at] for at in row] for row in draws]
    own = dtype.to_real() if dtype.is_complex else dtype
    made = torch.stack([torch.tensor(column, dtype=_wide(own)) for column in columns[:POOL]], 1)
    made = made.to(own)
    return torch.complex(made, made.roll(7, 1)) if dtype.is_complex else made


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64
    return torch.uint64 if dtype == torch.uint64 else torch.int64


def shaped(pool: Tensor, shape: Sequence[int]) -> Tensor:
    """Takes the first numbers of a rank's pool in a shape."""
    return pool[: int(np.prod(shape))].reshape(tuple(shape))


# ----------------------------------------------------------------------- what should come


@dataclass(frozen=True)
class Wanted:
    """Numbers of one rank, and by how much a result may differ, entry by entry; or bytes."""

    numbers: Array
    within: Array | None = None


def wanted(c: Collective, op: str, xs: Sequence[Tensor]) -> list[Wanted]:
    """Returns each rank's result of a movement of all ranks' operands."""
    if op not in ("max", "min") and not c.movement.adds:
        raw = [x.resolve_conj().contiguous().unsqueeze(-1).view(torch.uint8).numpy() for x in xs]
        return [Wanted(y) for y in MEANINGS[c.row.key](c, raw)]
    stacked = torch.stack(list(xs))
    if op == "sum" and stacked.dtype == torch.bool:  # as `Tensor.sum` does
        stacked = stacked.to(torch.int64)
    if stacked.is_complex():
        numbers, within = _combined("sum", torch.view_as_real(stacked))
        if op == "mean":  # torch divides infinite parts as complex numbers
            parts = torch.from_numpy(numbers.astype(np.float64)).unbind(-1)
            divided = torch.complex(*parts).to(xs[0].dtype) / len(xs)
            numbers, within = _numbers(torch.view_as_real(divided)), within / len(xs)
    else:
        numbers, within = _combined(op, stacked)
    if c.movement.equal:
        return [Wanted(numbers, within)] * len(xs)
    after = MEANINGS["convert", I, V] if c.move == "sum_scatter" else MEANINGS["mask", I, V]
    both = [after(c, [each] * len(xs)) for each in (numbers, within)]
    return [Wanted(*pair) for pair in zip(*both, strict=True)]


def _combined(op: str, stacked: Tensor) -> tuple[Array, Array]:
    """Combines along dim 0; returns the numbers, and how far those of a mesh may be from them."""
    count, dtype = len(stacked), stacked.dtype
    if op in ("max", "min"):
        whole = stacked.amax(0) if op == "max" else stacked.amin(0)
        return _numbers(whole), np.zeros(whole.shape)
    if not dtype.is_floating_point:
        total = stacked.to(torch.int64).sum(0)
        return _numbers(total.to(dtype)), np.zeros(total.shape)
    if dtype in HALVES:  # added in float32 and rounded once
        running = stacked[0].float()
        for addend in stacked[1:]:
            running = running + addend.float()
        half = running.to(dtype)
        half = half / count if op == "mean" else half
        return _numbers(half), np.zeros(half.shape)
    addends = stacked.numpy().astype(np.longdouble)
    with np.errstate(all="ignore"):
        exact = addends.sum(0).astype(stacked.numpy().dtype).astype(np.longdouble)
        sizes = np.nan_to_num(np.abs(addends), nan=0, posinf=0).sum(0)
        exact = exact / count if op == "mean" else exact
    return exact, sizes * torch.finfo(dtype).eps * (count / 2 if op != "mean" else 1)


def _numbers(x: Tensor) -> Array:
    if x.dtype.is_floating_point:
        return x.double().numpy().astype(np.longdouble)
    return x.numpy()


def difference(want: Wanted, got: Tensor) -> str | None:
    """Says where a result is not what was wanted; None where it is.

    Bytes are equal. Of sums and extrema a zero may have either sign, and a NaN any bits.
    """
    got = got.detach().resolve_conj()
    if want.within is None:
        found = got.contiguous().unsqueeze(-1).view(torch.uint8).numpy()
        wrong = np.not_equal(found, want.numbers) if found.shape == want.numbers.shape else None
    else:
        found = _numbers(torch.view_as_real(got) if got.is_complex() else got)
        if found.shape != want.numbers.shape:
            wrong = None
        else:
            with np.errstate(all="ignore"):
                near = np.abs(found - want.numbers) <= want.within if found.dtype != bool else False
            both_nan = (found != found) & (want.numbers != want.numbers)
            wrong = ~((found == want.numbers) | both_nan | near)
    if wrong is None:
        return f"shape {found.shape}, not {want.numbers.shape}"
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"at {list(at)}: {found[at]}, not {want.numbers[at]} ({wrong.sum()} of {wrong.size})"


# ------------------------------------------------------------------------------ running


@dataclass(frozen=True)
class Pools:
    """Numbers of operands, and others of tangents and cotangents: of a rank, or of all of them.

    Attributes:
        varying: each rank's own.
        equal: the same on all ranks, for what the row's types say is equal.
    """

    varying: tuple[Tensor, Tensor]
    equal: tuple[Tensor, Tensor]

    def of(self, axis_type: AxisType) -> tuple[Tensor, Tensor]:
        """Returns those of values of this type."""
        return self.equal if axis_type in (I, R) else self.varying


@dataclass(frozen=True)
class Run:
    """One cell in one memory and one mode.

    Attributes:
        cell: the call.
        memory: where operands and cotangents lie.
        mode: the derivative.
    """

    cell: Cell
    memory: str
    mode: str

    def __str__(self) -> str:
        return f"{self.cell.name}, {self.memory}, {self.mode}"

    def operand(self, pool: Tensor) -> Tensor:
        """Returns the operand of a rank from its numbers."""
        shape = self.cell.case.shape
        return MEMORY[self.memory](shaped(pool, (*shape, COLUMNS) if shape else ()))

    def cotangent(self, pool: Tensor, like: Tensor) -> Tensor:
        """Returns a cotangent of a result."""
        bar = shaped(pool, like.shape)
        same = like.ndim < 2 or self.memory in ("expanded", "no columns")
        return bar if same else MEMORY[self.memory](bar)

    def on_rank(self, pools: Pools) -> Tensor:
        """Runs it as one rank."""
        call, collective = self.cell.call, self.cell.collective
        own, others = map(self.operand, pools.of(self.cell.src))
        if self.mode == "forward":
            return call(own)
        if self.mode == "vmap":
            batch = torch.stack([own, others], -1)
            mapped: Call = torch.func.vmap(call, in_dims=-1, out_dims=-1)
            return mapped(batch)
        if self.mode == "jvp":
            pushed: Tensor = torch.func.jvp(call, (own,), (others,))[1]
            return pushed
        pull_back: Any
        y, pull_back = torch.func.vjp(call, own)  # type: ignore[misc]  # two without has_aux
        bar = self.cotangent(pools.of(COTANGENT[collective.dst])[1], y)
        pulled: Tensor = pull_back(bar)[0]
        return pulled

    def wanted(self, pools: Pools) -> list[list[Wanted]]:
        """Returns what each rank should have, from the numbers of all of them.

        Of a batch this is one result for each of its two examples.
        """
        c, op = self.cell.collective, self.cell.op
        xs, ts = (list(map(self.operand, each)) for each in pools.of(self.cell.src))
        if self.mode in ("forward", "vmap"):
            every = [wanted(c, op, each) for each in (xs, ts)[: 1 + (self.mode == "vmap")]]
            return [list(each) for each in zip(*every, strict=True)]
        if op in ("max", "min"):
            shares = _shares(op, xs)
        if self.mode == "jvp":
            if op in ("max", "min"):
                ts, op = [t * share for t, share in zip(ts, shares, strict=True)], ""
            return [[each] for each in wanted(c, op, ts)]
        bars = pools.of(COTANGENT[c.dst])[1]
        back = [self.cotangent(bar, y) for bar, y in zip(bars, self._results(xs), strict=True)]
        if op in ("max", "min"):
            return [[_exactly(bar * s)] for bar, s in zip(back, shares, strict=True)]
        if op == "mean":
            back = [bar / len(back) for bar in back]
        return [[each] for each in wanted(c.transpose, "", back)]

    def _results(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors of the shapes of the results."""
        collective, shape = self.cell.collective, tuple(xs[0].shape)
        return [xs[0].new_empty(collective.movement.shape(collective, shape, len(xs)))] * len(xs)


COTANGENT: Final = {I: I, R: Partial, Partial: R, V: V}


def _shares(op: str, xs: Sequence[Tensor]) -> list[Tensor]:
    stacked = torch.stack(list(xs))
    holds = (stacked == (stacked.amax(0) if op == "max" else stacked.amin(0))).to(stacked.dtype)
    return list(holds / holds.sum(0).clamp(min=1))


def _exactly(x: Tensor) -> Wanted:
    return Wanted(_numbers(x), np.zeros(x.shape))


def runs_of(
    num_ranks: int, kind: str, dtype: torch.dtype, memory: Sequence[str], modes: Sequence[str]
) -> list[Run]:
    """Returns the runs of all cells of a dtype."""
    return [
        Run(cell, layout, mode)
        for cell in cells(num_ranks)
        for mode in modes
        for layout in memory
        if cell.runs(dtype, mode, kind) and (cell.case.shape or layout == "dense")
    ]


def differences(
    mesh: Mesh, kind: str, dtype: torch.dtype, memory: Sequence[str], modes: Sequence[str]
) -> list[str]:
    """Runs all cells of a dtype in one body; returns what came out otherwise, by its cell."""
    n = mesh.size
    runs = runs_of(n, kind, dtype, memory, modes)
    drawn = values(dtype, n), values(dtype, n, 1)
    equal = drawn[0][:1].expand_as(drawn[0]), drawn[1][:1].expand_as(drawn[1])

    def body(*locals_: Tensor) -> list[Tensor]:
        a, b, c, d = (x.squeeze(0) for x in locals_)
        found = []
        for run in runs:
            try:
                found.append(run.on_rank(Pools((a, b), (c, d))).unsqueeze(0))
            except Exception as error:
                error.add_note(f"in {dtype} {run}")
                raise
        return found

    spec = P("tp")
    mapped: Any = shard_map(body, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check=False)
    operands = (*drawn, *equal)
    # As after a check, which no body that takes V for I would pass.
    is_batched = mesh.simulate == "vmap"
    results = vmap.run(mapped._shardmap_call(operands)) if is_batched else mapped(*operands)
    pools = Pools(drawn, equal)
    return [
        f"{str(dtype).removeprefix('torch.')}, {run}, rank {rank} of {n}: {told}"
        for run, result in zip(runs, results, strict=True)
        for rank, told in _compared(mesh, run, result, run.wanted(pools))
    ]


def _compared(
    mesh: Mesh, run: Run, result: Any, want: list[list[Wanted]]
) -> Iterator[tuple[int, str]]:
    here = isinstance(result, DTensor)
    rows = {mesh.rank: result.to_local()[0]} if here else dict(enumerate(result.unbind(0)))
    for rank, row in rows.items():
        examples = row.unbind(-1) if run.mode == "vmap" else [row]
        for one, got in zip(want[rank], examples, strict=True):
            told = difference(one, got)
            if told is not None:
                yield rank, told
                break


REFUSED: Final[Mapping[str, tuple[Call, Sequence[torch.dtype]]]] = {
    "all_reduce": (partial(all_reduce, axis="tp", dst=I), ONLY_MOVED),
    "maximum": (partial(all_reduce, axis="tp", dst=I, op="max"), (*ONLY_MOVED, *COMPLEX)),
    "mean": (partial(all_reduce, axis="tp", dst=I, op="mean"), (*INTEGERS, torch.bool)),
    "reduce_scatter": (partial(reduce_scatter, axis="tp"), ONLY_MOVED),
    "mean by reduce_scatter": (partial(reduce_scatter, axis="tp", op="mean"), INTEGERS),
}
"""Calls that no mesh runs, and the dtypes for which."""


def refusals(mesh: Mesh, check: bool) -> list[str]:
    """Returns what each of them says, a line each."""
    told = []
    for name, (call, dtypes) in REFUSED.items():
        out = P("tp") if "scatter" in name else P()
        for dtype in dtypes:
            mapped = shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=out, check=check)
            try:
                mapped(torch.ones(mesh.size * 4).to(dtype))
                told.append(f"{name} of {dtype}: accepted")
            except CollectiveError as error:
                told.append(f"{name} of {dtype}: {str(error).splitlines()[0]}")
    return told
