"""Dtypes of what travels, of results and of cotangents, against torch on one device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    I,
    Mesh,
    P,
    Partial,
    R,
    S,
    TransformError,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    convert,
    make_mesh,
    redistribute,
    reduce_scatter,
    reinterpret,
    shard_map,
)
from shardmap_torch.errors import ShardTypeError
from tests.programs.support.everywhere import ON_EVERY_MESH, ON_REAL_RANKS, run_on
from tests.programs.support.harness import global_value, random
from tests.support.golden import hold_own, told
from tests.support.pool import Gloo

BF16 = torch.bfloat16
ONE_AND_A_BIT = 1 + 2.0**-12  # bfloat16 makes 1 of it

RESULTS: dict[str, tuple[Any, P]] = {
    "all_reduce": (lambda x: all_reduce(x, "tp", dst=I, out_dtype=torch.float64), P()),
    "mean": (lambda x: all_reduce(x, "tp", dst=I, op="mean", out_dtype=torch.float64), P()),
    "tree": (lambda x: all_reduce([x], "tp", dst=R, out_dtype=torch.float64)[0] * x[0, 0], P("tp")),
    "reduce_scatter": (lambda x: reduce_scatter(x, "tp", out_dtype=torch.float64), P("tp")),
    "all_gather": (lambda x: all_gather(x, "tp", dst=I, out_dtype=torch.float64), P()),
    "all_to_all": (
        lambda x: all_to_all(x, "tp", split_dim=0, concat_dim=1, out_dtype=torch.float64),
        P("tp"),
    ),
    "redistribute": (
        lambda x: redistribute(
            x, "tp", src=S(0), dst=S(1), comm_dtype=torch.float64, out_dtype=torch.float64
        ),
        P(None, "tp"),
    ),
    "converting": (
        lambda x: redistribute(
            all_gather(x, "tp", dst=R), "tp", src=R, dst=S(0), out_dtype=torch.float64
        ),
        P("tp"),
    ),
}


def results(mesh: Mesh) -> None:
    """The result is of `out_dtype`, the gradient of the operand's; both as with casts."""
    x = random((mesh.size * 4, 2), 0)
    for name, (collective, out) in RESULTS.items():
        low = x.float().requires_grad_()
        high = x.float().double().requires_grad_()
        mapped: Any = shard_map(collective, mesh=mesh, in_specs=P("tp"), out_specs=out)
        y, wanted = mapped(low), mapped(high)
        assert y.dtype == torch.float64, name
        # One rounding of the operand's dtype in the sum of n addends of unit variance.
        torch.testing.assert_close(global_value(y), global_value(wanted), rtol=1e-5, atol=1e-5)
        total: Any = loss(y) + loss(wanted)
        total.backward()
        assert low.grad is not None
        assert high.grad is not None
        assert low.grad.dtype == torch.float32, name
        torch.testing.assert_close(low.grad.double(), high.grad, rtol=1e-5, atol=1e-5)


def whole_of(y: Any) -> Any:
    return y.full_tensor() if hasattr(y, "full_tensor") else y


def loss(y: Any) -> Any:
    y = whole_of(y)
    return (y * torch.arange(1.0, 1 + y.numel()).reshape(y.shape)).sum()


@ON_EVERY_MESH
def test_a_result_has_its_out_dtype_and_the_gradient_that_of_the_operand(
    kind: str, gloo: Gloo
) -> None:
    run_on(kind, results, gloo)


def unrounded(mesh: Mesh) -> None:
    """The sum of halves in float32 is not rounded to halves on its way out."""
    x = torch.full((mesh.size, 1), 1.0, dtype=BF16)
    x[0] = 256.0  # the next number after it is 258
    total = shard_map(
        lambda x: all_reduce(x, "tp", dst=I, comm_dtype=torch.float32, out_dtype=torch.float32),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P(),
    )
    assert total(x).item() == 256.0 + mesh.size - 1


@ON_EVERY_MESH
def test_a_sum_in_a_wider_dtype_leaves_unrounded(kind: str, gloo: Gloo) -> None:
    run_on(kind, unrounded, gloo)


def backward_rounded(mesh: Mesh) -> None:
    """The backward of `redistribute` and `convert` sends in `grad_comm_dtype`."""
    x = torch.full((mesh.size,), ONE_AND_A_BIT, dtype=torch.float64)
    for move in (redistribute, convert):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)

        def body(w: Tensor, x: Tensor, move: Any = move) -> Tensor:
            shared: Tensor = move(w, "tp", src=I, dst=R, grad_comm_dtype=BF16)
            return shared * x

        y = shard_map(body, mesh=mesh, in_specs=(P(invariant="tp"), P("tp")), out_specs=P("tp"))(
            w, x
        )
        whole_of(y).sum().backward()
        assert w.grad is not None
        assert w.grad.item() == mesh.size  # each addend was rounded to 1
        # Nothing travels in the backward of R -> V, so nothing is rounded.
        z = x.clone().requires_grad_()
        sliced = shard_map(
            lambda z, move=move: move(
                z, "tp", src=R, dst=S(0) if move is redistribute else V, grad_comm_dtype=BF16,
                **({} if move is redistribute else {"dim": 0}),
            )
            * ONE_AND_A_BIT,
            mesh=mesh,
            in_specs=P(replicate="tp"),
            out_specs=P("tp"),
        )  # fmt: skip
        whole_of(sliced(z)).sum().backward()
        assert z.grad is not None
        assert z.grad.tolist() == [ONE_AND_A_BIT] * mesh.size


# A batched program adds what is equal on all ranks before it would travel: see the next test.
@ON_REAL_RANKS
def test_the_gradient_of_a_conversion_travels_in_the_dtype_that_is_named(
    kind: str, gloo: Gloo
) -> None:
    run_on(kind, backward_rounded, gloo)


ROUNDED: dict[str, tuple[Any, P, P]] = {
    "convert": (
        lambda x: convert(x, "tp", src=I, dst=R, grad_comm_dtype=BF16) * axis_index("tp").cos(),
        P(),
        P("tp"),
    ),
    "all_gather": (
        lambda x: all_gather(x, "tp", dst=R, grad_comm_dtype=BF16) * axis_index("tp").cos(),
        P("tp"),
        P("tp"),
    ),
    "reduce_scatter": (
        lambda x: reduce_scatter(x, "tp", comm_dtype=torch.float64, grad_comm_dtype=BF16).cos(),
        P("tp"),
        P("tp"),
    ),
    "all_reduce": (
        lambda x: (
            all_reduce(x, "tp", comm_dtype=BF16, grad_comm_dtype=BF16, dst=R)
            * axis_index("tp").cos()
        ),
        P("tp"),
        P("tp"),
    ),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_simulated_ranks_round_gradients_from_outside_as_processes_do(name: str) -> None:
    """One batched program would not: such a body runs as ranks, and is refused where it cannot."""
    body, spec, out = ROUNDED[name]
    x = random((4, 4), 0)

    def gradient(simulate: Any, check: bool) -> Tensor:
        mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
        entering = spec if check else P("tp") if spec == P("tp") else P(invariant="tp")
        f: Any = shard_map(body, mesh=mesh, in_specs=entering, out_specs=out, check=check)
        leaf = x.clone().requires_grad_()
        y = f(leaf) * x.sum(0)
        y.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient("ranks", True)
    assert torch.equal(gradient("auto", True), expected)
    assert torch.equal(expected, expected.bfloat16().double())
    with pytest.raises(TransformError) as caught:
        gradient("vmap", True)
    named, told = str(caught.value).split(": ", 1)
    assert named.startswith(name)
    hold_own(told)


MESH = make_mesh((2,), ("tp",), kind="simulated")


def gathered(x: Tensor, **dtypes: Any) -> Tensor:
    body = lambda x: all_gather(x, "tp", dst=R, **dtypes) * 2  # noqa: E731
    out: Tensor = shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P(replicate="tp"))(x)
    return out


def test_a_second_dtype_is_asked_for_only_where_a_rounding_backward_runs() -> None:
    x = torch.ones(4)
    assert gathered(x, comm_dtype=BF16).tolist() == [2.0] * 4  # no gradient flows
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert gathered(leaf, comm_dtype=BF16).tolist() == [2.0] * 4
    assert gathered(leaf, comm_dtype=torch.float32).requires_grad  # nothing is rounded
    with told(CollectiveError):
        gathered(leaf, comm_dtype=BF16)
    with pytest.raises(CollectiveError):
        torch.func.grad(lambda x: gathered(x, comm_dtype=BF16).sum())(x)


def test_an_out_dtype_of_no_floating_operand_is_refused() -> None:
    with told(CollectiveError):
        gathered(torch.arange(4), out_dtype=torch.float32)


def test_a_conversion_to_the_type_that_a_value_has_is_the_identity_and_requires_it() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        x = convert(x, "tp", src=V, dst=V)
        w = convert(w, "tp", src=R, dst=R)
        total = convert(reinterpret(x * w, "tp", src=V, dst=Partial), "tp", src="P", dst="P")
        return convert(all_reduce(total, "tp", dst=I), "tp", src=I, dst=I)

    f = shard_map(body, mesh=MESH, in_specs=(P("tp"), P(replicate="tp")), out_specs=P())
    w = torch.tensor(2.0, requires_grad=True)
    y = f(torch.arange(2.0), w)
    y.sum().backward()
    assert (y.tolist(), w.grad) == ([2.0], torch.tensor(1.0))


@pytest.mark.parametrize("move", [convert, redistribute])
def test_a_conversion_to_a_type_that_a_value_does_not_have_is_refused(move: Any) -> None:
    def body(x: Tensor) -> Tensor:
        out: Tensor = move(x, "tp", src=R, dst=R)
        return out

    with pytest.raises(ShardTypeError) as caught:
        shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(torch.ones(2))
    hold_own(str(caught.value))
