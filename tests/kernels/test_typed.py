"""The kernels as the checker interprets them: what they do is compared with their composition.

That the formulas are right in numbers as well is tried on simulated ranks, which run the same code
on the same typed collectives.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    ShardTypeError,
    checkpoint,
    explain,
    make_mesh,
    shard_map,
    trace,
)
from shardmap_torch.kernels import (
    all_gather_matmul,
    dispatch,
    last_plan,
    matmul_all_reduce,
    matmul_reduce_scatter,
    symmetric,
)
from tests.kernels.support.typed import (
    ABSTRACT,
    COLUMN,
    GATHER,
    ROW,
    SCATTER,
    SHAPES,
    SUM,
    WHOLE,
    Body,
    Forget,
    column,
    float32,
    held_in,
    reduced,
    row,
    told,
)
from tests.support.fuzzing import sampled


@pytest.mark.parametrize("check", ["local", "global"])
@pytest.mark.parametrize(
    ("body", "specs", "found"),
    [
        pytest.param(
            lambda x, w: all_gather_matmul(x, w, "tp", dim=1),
            COLUMN,
            [GATHER, f"back: {SCATTER}"],
            id="all_gather_matmul",
        ),
        pytest.param(
            lambda x, w: all_gather_matmul(x, w, "tp", dim=1, save_gathered=False),
            COLUMN,
            [GATHER, f"back: {SCATTER}", f"back: {GATHER}"],
            id="all_gather_matmul, gathered again",
        ),
        pytest.param(
            lambda x, w: matmul_reduce_scatter(x, w, "tp", dim=1),
            ROW,
            [SCATTER, f"back: {GATHER}"],
            id="matmul_reduce_scatter",
        ),
        pytest.param(reduced(R), WHOLE, [SUM, f"back: {SUM}"], id="matmul_all_reduce to R"),
        pytest.param(
            reduced(I),
            WHOLE,
            ["all_reduce('tp', Partial -> I)", "back: convert('tp', I -> R)"],
            id="matmul_all_reduce to I",
        ),
    ],
)
def test_what_the_kernel_does_is_verified_and_told(
    body: Body, specs: Any, found: list[str], check: Any
) -> None:
    (equation,) = held_in(body, *specs, *SHAPES, check=check)
    assert sorted(told(equation)) == sorted(found)


def test_a_required_overlap_is_verified_on_an_abstract_mesh() -> None:
    body = lambda x, w: all_gather_matmul(x, w, "tp", dim=1, overlap="require")  # noqa: E731
    assert held_in(body, *COLUMN, *SHAPES)
    plan = last_plan()
    assert plan is not None
    assert (plan.choice, plan.reason) == (None, "the body is being checked, not run")


def test_a_report_has_the_kernel_and_its_composition() -> None:
    body = lambda x, w: all_gather_matmul(x, w, "tp", dim=1, save_gathered=False)  # noqa: E731
    text = explain(shard_map(body, mesh=ABSTRACT, in_specs=COLUMN[0], out_specs=COLUMN[1]), *SHAPES)
    lines = [line.split("  #")[0].removesuffix(", as specified") for line in text.splitlines()]
    start = lines.index("collectives:")
    assert lines[start + 1 : start + 7] == [
        "  all_gather_matmul, overlapped, typed as what follows:",
        "    forward: all_gather('tp', V -> R) of float32[4, 16], sends 768 B",
        "    backward: all_gather('tp', V -> R) of float32[4, 16], sends 768 B",
        "    backward: reduce_scatter('tp', Partial -> V) of float32[16, 16], sends 768 B",
        "  all_gather('tp', V -> R) of float32[2, 2, 16], sends 768 B",
        "    backward: reduce_scatter('tp', Partial -> V) of float32[2, 8, 16], sends 768 B",
    ]


def in_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return all_gather_matmul(x, w, "tp", dim=1)


def batched(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(lambda x: all_gather_matmul(x, w, "tp"))(x)


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    with mock.patch.object(dispatch, "_may_be_fused", return_value=True):
        yield


@pytest.mark.usefixtures("as_on_a_gpu")
def test_operators_on_symmetric_memory_are_held_where_a_run_may_have_them() -> None:
    def column(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        first, second = all_gather_matmul(x, (w, v), "tp", dim=1, bias=(b, None))
        return first * second

    specs = (*COLUMN[0], P(None, "tp"), P("tp")), COLUMN[1]
    plain, fused = held_in(column, *specs, *SHAPES, SHAPES[1], float32(32))
    assert [plain.name, fused.name] == [
        "all_gather_matmul, overlapped",
        "all_gather_matmul, on symmetric memory",
    ]
    assert told(plain) == told(fused) == [GATHER, f"back: {SCATTER}"]
    _, fused = held_in(row, *ROW, *SHAPES)
    assert told(fused) == [SCATTER, f"back: {GATHER}"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_mistake_on_symmetric_memory_is_caught(forget: Forget) -> None:
    right = symmetric.Symmetric.gather_backward

    def forgets_the_scatter(self: Any, x: Any, full: Any, ws: Any, dys: Any, *rest: Any) -> Any:
        dx, dws = right(self, x, full, ws, dys, *rest)
        return (dys[0] @ ws[0].t()).narrow(1, 0, dx.shape[1]), dws

    forget()
    with (
        mock.patch.object(symmetric.Symmetric, "gather_backward", forgets_the_scatter),
        pytest.raises(ShardTypeError, match="on symmetric memory: the gradient of operand 0 is"),
    ):
        held_in(column(), *COLUMN, *SHAPES)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda x, w: all_gather_matmul(x, w, "tp", dim=1, overlap="off"), id="off"),
        pytest.param(in_bfloat16, id="autocast"),
        pytest.param(batched, id="vmap"),
    ],
)
def test_a_call_that_no_run_overlaps_is_not_held(body: Body) -> None:
    assert held_in(body, *COLUMN, *SHAPES) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("body", [column(), column(save_gathered=False), row])
def test_operands_that_are_whole_over_another_axis_are_held_in_any_dtype(
    body: Body, dtype: torch.dtype
) -> None:
    specs = (
        ((P(None, "tp"), COLUMN[0][1]), P(None, None, "tp"))
        if body is not row
        else ((P(None, None, "tp"), P("tp")), P(None, "tp"))
    )
    x, w = (ShapeDtype(each.shape, dtype, requires_grad=True) for each in SHAPES)
    assert held_in(body, *specs, x, w)


def test_weights_that_are_cut_in_different_ways_are_held_together() -> None:
    def body(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return all_gather_matmul(x, (w, v), "tp", dim=1, bias=(None, b))

    specs = (
        (P(None, "tp"), P(), P(None, "dp"), P("dp")),
        (P(partial="tp"), P(None, None, "dp", partial="tp")),
    )
    assert held_in(body, *specs, *SHAPES, SHAPES[1], float32(32))


@pytest.mark.parametrize(
    ("x", "w"), [((4, 8, 0), (0, 32)), ((4, 8, 16), (16, 0)), ((4, 0, 16), (16, 32))]
)
def test_operands_without_elements_are_held_like_any(
    x: tuple[int, ...], w: tuple[int, ...]
) -> None:
    assert held_in(column(), *COLUMN, float32(*x), float32(*w))
    assert held_in(row, *ROW, float32(*x), float32(*w))
    assert held_in(reduced(I), *WHOLE, float32(*x), float32(*w))


def test_nothing_is_held_over_axes_of_one_rank() -> None:
    mesh = make_mesh((2, 1), ("dp", "tp"), kind="abstract")
    body = lambda x, w: all_gather_matmul(x, w, "tp", dim=1)  # noqa: E731
    mapped = shard_map(body, mesh=mesh, in_specs=COLUMN[0], out_specs=COLUMN[1])
    assert not any(equation.compared for equation in trace(mapped, *SHAPES).equations)


def inner_gradient(x: Tensor, w: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        return all_gather_matmul(x, w, "tp", dim=1).square().sum()

    found: Tensor = torch.func.grad(loss)(w)
    return found


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    call = lambda x, w: all_gather_matmul(x, w, "tp", dim=1)  # noqa: E731
    out: Tensor = checkpoint(call, x, w)
    return out


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return all_gather_matmul(x, w, "tp", dim=1)


@pytest.mark.parametrize(
    ("body", "out", "backwards"),
    [
        pytest.param(inner_gradient, P(None, "tp", partial="dp"), [1], id="torch.func.grad"),
        pytest.param(recomputed, COLUMN[1], [0, 1], id="checkpoint"),
        pytest.param(without_gradient, COLUMN[1], [0], id="no_grad"),
    ],
)
def test_the_backward_is_held_where_the_gradient_flows(
    body: Body, out: P, backwards: list[int]
) -> None:
    found = held_in(body, COLUMN[0], out, *SHAPES)
    assert [sum(each.backward for each in equation.compared) for equation in found] == backwards


# Over 'tp'; 'K' is a whole operand through which no gradient flows.
KINDS = {
    "I": P(invariant="tp"),
    "R": P(replicate="tp"),
    "V": P("tp"),
    "P": P(partial="tp"),
    "K": P(),
}
OUTS = (P("tp"), P(), P(partial="tp"))


def operand(kind: str, rows: int, columns: int) -> ShapeDtype:
    return float32(rows * 4 if kind == "V" else rows, columns, requires_grad=kind != "K")


def verdict(body: Body, kinds: Sequence[str], out: P, rows: Sequence[int]) -> str:
    """Returns what is wrong, or nothing."""
    specs = tuple(KINDS[kind] for kind in kinds)
    shapes = [
        operand(kind, *size) for kind, size in zip(kinds, ((rows[0], 4), (4, 4)), strict=True)
    ]
    mapped = shard_map(body, mesh=ABSTRACT, in_specs=specs, out_specs=out)
    try:
        trace(mapped, *shapes)
    except ShardTypeError as error:
        return str(error)
    return ""


OPERATIONS: dict[str, Callable[[Any], Body]] = {
    "gather": lambda overlap: lambda x, w: all_gather_matmul(x, w, "tp", overlap=overlap),
    "gather again": lambda overlap: (
        lambda x, w: all_gather_matmul(x, w, "tp", overlap=overlap, save_gathered=False)
    ),
    "scatter": lambda overlap: lambda x, w: matmul_reduce_scatter(x, w, "tp", overlap=overlap),
    "reduce R": lambda overlap: lambda x, w: matmul_all_reduce(x, w, "tp", dst=R, overlap=overlap),
    "reduce I": lambda overlap: lambda x, w: matmul_all_reduce(x, w, "tp", dst=I, overlap=overlap),
}


@pytest.mark.parametrize("name", sampled(OPERATIONS, "gather", "scatter"))
def test_operands_of_all_types_have_the_verdict_of_the_composition(name: str) -> None:
    found = []
    for x, w in itertools.product(KINDS, KINDS):
        if name.startswith("gather") and x != "V":
            continue  # Refused at once: what is gathered varies.
        for out in OUTS:
            texts = [
                verdict(OPERATIONS[name](overlap), (x, w), out, (4,)) for overlap in ("auto", "off")
            ]
            assert texts[0] == texts[1]
            found.append(texts[0])
    assert "" in found
    assert any(found)


def drawn(draw: random.Random) -> tuple[Callable[[str], Body], Any, P, list[ShapeDtype]]:
    """A program that adds up the results of one call, its specs, and its operands."""
    axes = draw.choice([("tp",), ("dp", "tp")])
    num_ranks = 8 if "dp" in axes else 4
    leading = [draw.choice([8, 16]) for _ in range(draw.randint(0, 2))]
    dim, count = draw.randint(0, len(leading)), draw.randint(1, 3)
    name = draw.choice(["gather", "scatter", "reduce"])
    inner = 8 * num_ranks if name == "gather" and dim == len(leading) else 8
    shapes = [(*leading, 8), *[(inner, draw.choice([8, 16]))] * (count if name == "gather" else 1)]
    dst, save = draw.choice([R, I]), draw.random() < 0.5

    def body_of(overlap: Any) -> Body:
        def body(x: Tensor, *ws: Tensor) -> Tensor:
            outs: Any
            if name == "gather":
                options = {"dim": dim, "save_gathered": save, "overlap": overlap}
                outs = all_gather_matmul(x, ws, axes, **options)
            elif name == "scatter":
                outs = [matmul_reduce_scatter(x, ws[0], axes, dim=dim, overlap=overlap)]
            else:
                outs = [matmul_all_reduce(x, ws[0], axes, dst=dst, overlap=overlap)]
            return torch.stack([out.float().sum() for out in outs]).sum()

        return body

    specs, operands = [], []
    dtype = draw.choice([torch.float32, torch.bfloat16])
    for shape in shapes:
        entries: list[list[str]] = [[] for _ in shape]
        types: dict[str, Any] = {}
        whole = list(shape)
        for axis in ABSTRACT.axis_names:
            kind = draw.choice(["V", "V", "V", "K", "R", "I", "P"] if axis in axes else ["V", "K"])
            if kind == "V":
                at = draw.randrange(len(shape))
                entries[at].append(axis)
                whole[at] *= ABSTRACT.shape[axis]
            elif kind != "K":
                key = {"R": "replicate", "I": "invariant", "P": "partial"}[kind]
                types[key] = {*types.get(key, ()), axis}
        specs.append(P(*(tuple(entry) or None for entry in entries), **types))
        operands.append(ShapeDtype(tuple(whole), dtype, requires_grad=draw.random() < 0.8))
    out = P(partial={"dp", "tp"}) if draw.random() < 0.8 else P()
    return body_of, tuple(specs), out, operands


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(4), 0))
def test_random_calls_have_the_verdict_of_the_composition(seed: int) -> None:
    draw, accepted = random.Random(seed), 0
    for _ in range(40):
        body_of, specs, out, operands = drawn(draw)
        found = []
        for overlap in ("auto", "off"):
            mapped = shard_map(body_of(overlap), mesh=ABSTRACT, in_specs=specs, out_specs=out)
            try:
                trace(mapped, *operands)
                found.append("")
            except ShardTypeError as error:
                found.append(str(error))
        assert found[0] == found[1], (specs, out, operands)
        accepted += not found[0]
    assert accepted > 5
