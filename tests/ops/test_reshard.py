"""reshard: for any two specs the result is the global tensor sharded by the second."""

from fractions import Fraction
from math import lcm, prod
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    P,
    SpecError,
    all_gather,
    all_reduce,
    convert,
    make_mesh,
    reshard,
    shard_map,
)
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.reshard import ReshardStep, plan
from tests.support.golden import hold_own, told
from tests.support.pool import Gloo

Strategy = Literal["vmap", "ranks"]
Case = tuple[P, P, tuple[int, ...]]

AXES = ("a", "b", "c", "d")
MESH = make_mesh((2, 4, 2, 2), AXES, kind="simulated")


@st.composite
def specs(draw: st.DrawFn, axes: tuple[str, ...], num_dims: int) -> P:
    """Any spec: every axis shards a dim, at any place of its tuple, or has a type."""
    entries: list[list[str]] = [[] for _ in range(num_dims)]
    typed: dict[str, list[str]] = {"replicate": [], "partial": [], "invariant": []}
    for axis in draw(st.permutations(axes)):
        choice = draw(st.sampled_from([*range(num_dims), *range(num_dims), *typed]))
        (entries[choice] if isinstance(choice, int) else typed[choice]).append(axis)
    return P(*[tuple(entry) or None for entry in entries], **typed)


@st.composite
def cases(draw: st.DrawFn, sizes: dict[str, int], max_dims: int = 3) -> Case:
    num_dims = draw(st.integers(1, max_dims))
    src, dst = (draw(specs(tuple(sizes), num_dims)) for _ in range(2))
    counts = [1] * num_dims
    for spec in (src, dst):
        for dim, axes in spec.sharded_dims:
            counts[dim] = lcm(counts[dim], prod(sizes[axis] for axis in axes))
    # Often just what is needed, so that not every detour can be sharded evenly.
    factors = draw(st.tuples(*[st.sampled_from([1, 1, 2]) for _ in counts]))
    return src, dst, tuple(n * f for n, f in zip(counts, factors, strict=True))


def joined(x: Tensor, spec: P) -> Tensor:
    """Whole on every rank, by plain collectives.

    Outside, the gradient of a DTensor whose order is not the mesh's would not have that order.
    """
    for axis in sorted(spec.replicate):
        x = convert(x, axis, src="R", dst="I")
    for axis in sorted(spec.partial):
        x = all_reduce(x, axis, dst="I")
    for dim, axes in spec.sharded_dims:
        x = all_gather(x, axes, dim=dim, dst="I")
    return x


def check(mesh: Mesh, case: Case) -> None:
    src, dst, shape = case
    out_specs = dst if mesh.kind == "simulated" else P()

    @shard_map(mesh=mesh, in_specs=src, out_specs=out_specs)
    def f(x: Tensor) -> Tensor:
        y = reshard(x, src, dst)
        return y if mesh.kind == "simulated" else joined(y, dst)

    x = torch.arange(1, prod(shape) + 1, dtype=torch.float64).reshape(shape).requires_grad_()
    y = f(x)
    weights = torch.cos(x.detach())
    torch.testing.assert_close(y, x, rtol=0, atol=1e-10)
    (grad,) = torch.autograd.grad((y * weights).sum(), x)
    torch.testing.assert_close(grad, weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
@given(data=st.data())
def test_reshard_gives_what_cutting_by_the_target_gives(
    strategy: Strategy, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=3))
    names = AXES[: len(counts)]
    mesh = make_mesh(counts, names, kind="simulated", simulate=strategy)
    check(mesh, data.draw(cases(dict(mesh.shape))))


FIXED: list[Case] = [
    (P("a", "b", invariant="c"), P("b", "a"), (4, 4)),
    (P(("a", "b"), invariant="c"), P(("b", "a")), (4, 4)),
    (P(("a", "b", "c")), P("a", ("c", "b")), (8, 4)),
    (P(partial={"a", "b"}, replicate="c"), P(("c", "a"), partial="b"), (4, 4)),
    (P("a", partial={"b"}, invariant="c"), P("b", replicate={"a", "c"}), (4, 4)),
    (P(None, ("a", "c"), replicate="b"), P(partial={"a"}, replicate={"b"}), (4, 4)),
    (P(invariant={"a", "b", "c"}), P("c", ("a", "b")), (4, 4)),
]


def check_on_rank(fixed: list[Case]) -> None:
    mesh = make_mesh((2, 2, 1), ("a", "b", "c"))
    for case in fixed:
        check(mesh, case)


def test_reshard_gives_the_same_on_processes(gloo: Gloo) -> None:
    gloo(4).run(check_on_rank, FIXED)


@given(case=cases(dict(MESH.shape), max_dims=2))
def test_a_plan_sends_no_more_than_gathering_what_differs_and_slicing(case: Case) -> None:
    src, dst, shape = case
    sent = sum((step.sent for step in plan(src, dst, MESH, shape)), Fraction(0))
    assert sent <= naive(src, dst)


def naive(src: P, dst: P) -> Fraction:
    """Bytes of: all-reduce what is partial, gather each dim's axes that do not stay."""
    sizes, size, sent = MESH.shape, Fraction(1), Fraction(0)
    summed = prod(sizes[axis] for axis in src.partial - dst.partial)
    sent += 2 * Fraction(summed - 1, summed) * size
    wanted = dict(dst.sharded_dims)
    for dim, axes in src.sharded_dims:
        stays = 0
        while stays < len(axes) and wanted.get(dim, ())[stays : stays + 1] == (axes[stays],):
            stays += 1
        count = prod(sizes[axis] for axis in axes[stays:])
        sent += (count - 1) * size
        size *= count
    return sent


def lines(steps: tuple[ReshardStep, ...]) -> list[str]:
    return [str(step) for step in steps]


PLANS: list[tuple[P, P, tuple[int, ...] | None, list[str]]] = [
    (P("a"), P("a"), None, []),
    (
        P(("a", "b", "c")),
        P("a", ("b", "c")),
        None,
        ["all_to_all(('b', 'c'), V -> V) dim 0 to 1, sends 7/8 x, back 7/8"],
    ),
    (P(("a", "b")), P(("b", "a")), None, ["ppermute(('a', 'b'), V -> V), sends 1 x, back 1"]),
    (P(("a", "b"), None), P("a", None), None, ["all_gather('b', V -> I) dim 0, sends 3 x, back 0"]),
    (
        P("a", replicate={"b"}),
        P(("a", "b")),
        None,
        ["convert('b', R -> V) dim 0, sends 0 x, back 0"],
    ),
    (
        P("a", partial={"b"}),
        P(("a", "b")),
        None,
        ["reduce_scatter('b', Partial -> V) dim 0, sends 3/4 x, back 3/4"],
    ),
    (
        P(partial={"a", "b"}),
        P(replicate={"a", "b"}),
        None,
        ["all_reduce(('a', 'b'), Partial -> R), sends 7/4 x, back 7/4"],
    ),
    (
        # One sum over both axes, though they end with different types.
        P(partial={"c", "d"}),
        P(replicate={"c"}),
        None,
        [
            "all_reduce(('c', 'd'), Partial -> I), sends 3/2 x, back 0",
            "convert('c', I -> R), sends 0 x, back 1",
        ],
    ),
    (P(replicate={"a"}), P(partial={"a"}), None, ["convert('a', R -> Partial), sends 0 x, back 0"]),
    (P("a"), P(partial={"a"}), None, ["convert('a', V -> Partial) dim 0, sends 0 x, back 0"]),
    (
        # Neither dim is known to divide by both axes, so one has to be whole on the way.
        P("a", "b"),
        P("b", "a"),
        None,
        [
            "all_gather('a', V -> I) dim 0, sends 1 x, back 0",
            "all_to_all('b', V -> V) dim 1 to 0, sends 3/2 x, back 3/2",
            "convert('a', I -> V) dim 1, sends 0 x, back 1",
        ],
    ),
    (
        P("a", "b"),
        P("b", "a"),
        (8, 8),
        [
            "all_to_all('a', V -> V) dim 0 to 1, sends 1/2 x, back 1/2",
            "all_to_all(('b', 'a'), V -> V) dim 1 to 0, sends 7/8 x, back 7/8",
            "all_to_all('a', V -> V) dim 0 to 1, sends 1/2 x, back 1/2",
        ],
    ),
    (P("a", "c"), P("c", "a"), None, ["ppermute(('a', 'c'), V -> V), sends 1 x, back 1"]),
]


@pytest.mark.parametrize(("src", "dst", "shape", "wanted"), PLANS, ids=[str(p[:3]) for p in PLANS])
def test_plan_is_cheapest(src: P, dst: P, shape: tuple[int, ...] | None, wanted: list[str]) -> None:
    assert lines(plan(src, dst, MESH, shape)) == wanted


def reshard_on(src: P, dst: P, x: Tensor) -> Tensor:
    mesh = make_mesh((2, 4), ("a", "b"), kind="simulated", simulate="vmap")
    y: Tensor = shard_map(
        lambda x: reshard(x, src, dst), mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )(x)
    return y


def test_axes_that_neither_spec_names_are_left_alone() -> None:
    mesh = make_mesh((2, 2), ("a", "b"), kind="simulated", simulate="vmap")
    f = shard_map(
        lambda x: reshard({"x": x}, P("a"), P(None, "a"))["x"],
        mesh=mesh,
        in_specs=P(("b", "a")),
        out_specs=P("b", "a"),
    )
    x = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(f(x), x)


def test_a_target_that_does_not_divide_is_rejected_with_the_arithmetic() -> None:
    with told(SpecError):
        reshard_on(P("a"), P("b"), torch.zeros(6))


def test_a_spec_with_more_entries_than_dims_is_rejected() -> None:
    with told(SpecError):
        reshard_on(P("a"), P("a", None, "b"), torch.zeros(8))


def test_an_unknown_axis_is_rejected() -> None:
    with told(CollectiveError):
        reshard_on(P("a"), P("z"), torch.zeros(8))
    with told(SpecError, 2):
        plan(P("a"), P("z"), MESH)


def test_specs_that_name_nothing_are_rejected() -> None:
    with told(CollectiveError):
        reshard_on(P(), P(None), torch.zeros(8))


def test_reshard_outside_a_body_is_rejected() -> None:
    with told(CollectiveError):
        reshard(torch.zeros(2), P("a"), P())


def test_what_travels_is_rounded_to_comm_dtype_and_the_rest_is_not() -> None:
    mesh = make_mesh((2,), ("a",), kind="simulated", simulate="ranks")
    x = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64, requires_grad=True)

    def run(src: P, dst: P, **dtypes: torch.dtype) -> tuple[Tensor, Tensor]:
        f = shard_map(
            lambda x: reshard(x, src, dst, **dtypes),
            mesh=mesh,
            in_specs=src,
            out_specs=dst,
            check=False,
        )
        y = f(x)
        return y.detach(), torch.autograd.grad(y @ x.detach(), x)[0]

    rounded = x.detach().float().double()
    y, grad = run(P("a"), P(invariant="a"), comm_dtype=torch.float32)
    assert torch.equal(y, rounded)
    assert torch.equal(grad, x.detach())
    y, grad = run(P(invariant="a"), P("a"), grad_comm_dtype=torch.float32)
    assert torch.equal(y, x.detach())
    assert torch.equal(grad, rounded)


def test_a_rounded_way_whose_backward_adds_needs_its_dtype_as_well() -> None:
    mesh = make_mesh((2,), ("a",), kind="simulated", simulate="vmap")
    f = shard_map(
        lambda x: reshard(x, P("a"), P(replicate="a"), comm_dtype=torch.bfloat16),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(replicate="a"),
        check=False,
    )
    with pytest.raises(CollectiveError) as error:
        f(torch.zeros(2, requires_grad=True))
    assert f(torch.ones(2)).tolist() == [1.0, 1.0]  # no gradient flows
    hold_own(str(error.value))
