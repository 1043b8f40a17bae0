"""Each of torch's collectives runs as the typed one: values and derivatives, on every mesh."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ReduceOp
from torch.nn.functional import linear

from shardmap_torch import (
    CollectiveError,
    I,
    Mesh,
    P,
    R,
    ShardTypeError,
    axis_group,
    convert,
    full,
    make_mesh,
    shard_map,
)
from tests.programs.support.everywhere import KINDS, run_on
from tests.support.golden import hold_own, told
from tests.support.pool import Gloo

# torch 2.13 renames some of them, and has no gradient of others, as it says.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:FutureWarning", "ignore:.*:UserWarning", "ignore:.*torch.jit:DeprecationWarning"
)

Body = Callable[[Any, Tensor], Any]


class Row(NamedTuple):
    """A name of torch's: its call in a body, the same on the global tensor, the result's spec."""

    call: Body
    expected: Callable[[Tensor], Tensor]
    spec: P = P()
    differentiable: bool = True


def ranks(x: Tensor) -> Tensor:
    """Returns the values of both ranks, stacked."""
    return x.view(2, -1, *x.shape[1:])


def blocks(x: Tensor, op: Callable[[Tensor, int], Tensor]) -> Tensor:
    return op(ranks(x), 0)


def gathered(x: Tensor, dim: int) -> Tensor:
    return torch.cat(list(ranks(x)), dim)


def exchanged(x: Tensor) -> Tensor:
    return x[[0, 1, 4, 5, 2, 3, 6, 7]]


def scattered_columns(x: Tensor) -> Tensor:
    """Rank r gets column block r of the sum: both, one below the other."""
    return torch.cat(blocks(x, torch.sum).chunk(2, 1))


def mean(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim)


LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "dense": lambda x: x,
    "columns": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.mT.contiguous().mT,
}
layouts: Final = [LAYOUTS["dense"]]
"""The last makes the memory of operands."""


def in_place(function: Callable[..., Any], **options: Any) -> Body:
    """Makes a body of a call that writes into its operand."""

    def body(group: Any, x: Tensor) -> Tensor:
        own = layouts[-1](x * 1)
        work = function(own, group=group, **options)
        if options.get("async_op"):
            work.wait()
        return own

    return body


def into(function: Callable[..., Any], rows: int, **options: Any) -> Body:
    """Makes a body of a call that writes into a tensor of so many rows."""

    def body(group: Any, x: Tensor) -> Tensor:
        out = layouts[-1](x.new_zeros(rows, x.shape[1]))
        function(out, layouts[-1](x * 1), group=group, **options)
        return out

    return body


def from_list(function: Callable[..., Any], **options: Any) -> Body:
    def body(group: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(2, x.shape[1])
        function(out, [*layouts[-1](x * 1).chunk(2)], group=group, **options)
        return out

    return body


def to_list(group: Any, x: Tensor) -> Tensor:
    out = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(out, layouts[-1](x * 1), group=group)
    return torch.cat(out)


def lists(group: Any, x: Tensor) -> Tensor:
    sent = [*layouts[-1](x * 1).chunk(2)]
    out = [torch.zeros_like(part) for part in sent]
    dist.all_to_all(out, sent, group=group)
    return torch.cat(out)


def called(function: Callable[..., Any], *args: Any) -> Body:
    """Makes a body of a functional collective."""
    return lambda group, x: function(layouts[-1](x * 1), *args, group) * 1


def together(function: Callable[..., Any], *args: Any) -> Body:
    """Makes a body of one of several tensors."""

    def body(group: Any, x: Tensor) -> Any:
        first, second = function([layouts[-1](x * 1), x * 2], *args, group)
        return torch.cat([first[:1], second[1:] / 2])

    return body


def of_functions(function: Callable[..., Any], **options: Any) -> Body:
    """Makes a body of a function of `torch.distributed.nn.functional`."""
    return lambda group, x: function(layouts[-1](x * 1), group=group, **options) * 1


def cut(function: Callable[..., Any], **options: Any) -> Body:
    def body(group: Any, x: Tensor) -> Any:
        parts = [*layouts[-1](x * 1).chunk(2)]
        return function(torch.zeros_like(parts[0]), parts, group=group, **options) * 1

    return body


def exchange_parts(group: Any, x: Tensor) -> Tensor:
    parts = [*layouts[-1](x * 1).chunk(2)]
    out = [torch.zeros_like(part) for part in parts]
    return torch.cat(differentiable.all_to_all(out, parts, group=group))


def by_name(group: Any, x: Tensor) -> Tensor:
    out = torch.ops._c10d_functional.all_reduce.default(x * 1, "sum", group.group_name)
    made: Tensor = torch.ops._c10d_functional.wait_tensor.default(out)
    return made * 1


SUM, MEAN = partial(blocks, op=torch.sum), partial(blocks, op=mean)
MAX, MIN = partial(blocks, op=torch.amax), partial(blocks, op=torch.amin)
SHARD: Final = P("tp")
HALF: Final[Any] = partial(gathered, dim=0)
IN_PLACE: Final[dict[str, Row]] = {
    "all_reduce": Row(in_place(dist.all_reduce), SUM),
    "all_reduce AVG": Row(in_place(dist.all_reduce, op=ReduceOp.AVG), MEAN),
    "all_reduce MAX": Row(in_place(dist.all_reduce, op=ReduceOp.MAX), MAX),
    "all_reduce MIN": Row(in_place(dist.all_reduce, op=ReduceOp.MIN), MIN),
    "all_reduce async_op": Row(in_place(dist.all_reduce, async_op=True), SUM),
    "broadcast": Row(in_place(dist.broadcast, group_src=1), lambda x: ranks(x)[1]),
    "all_gather": Row(to_list, HALF),
    "all_gather_into_tensor": Row(into(dist.all_gather_into_tensor, 8), HALF),
    "reduce_scatter": Row(from_list(dist.reduce_scatter), SUM, SHARD),
    "reduce_scatter AVG": Row(from_list(dist.reduce_scatter, op=ReduceOp.AVG), MEAN, SHARD),
    "reduce_scatter_tensor": Row(into(dist.reduce_scatter_tensor, 2), SUM, SHARD),
    "reduce_scatter_tensor AVG": Row(
        into(dist.reduce_scatter_tensor, 2, op=ReduceOp.AVG), MEAN, SHARD
    ),
    "all_to_all": Row(lists, exchanged, SHARD),
    "all_to_all_single": Row(into(dist.all_to_all_single, 4), exchanged, SHARD),
}
FUNCTIONAL: Final[dict[str, Row]] = {
    **{
        f"all_reduce {op}": Row(called(functional.all_reduce, op), expected)
        for op, expected in (("sum", SUM), ("avg", MEAN), ("max", MAX), ("min", MIN))
    },
    "all_reduce by name": Row(by_name, SUM),
    "broadcast": Row(called(functional.broadcast, 1), lambda x: ranks(x)[1]),
    "all_gather_tensor": Row(called(functional.all_gather_tensor, 0), HALF),
    "all_gather_tensor of columns": Row(
        called(functional.all_gather_tensor, 1), partial(gathered, dim=1)
    ),
    "all_gather_tensor_autograd": Row(called(functional.all_gather_tensor_autograd, 0), HALF),
    "reduce_scatter_tensor": Row(called(functional.reduce_scatter_tensor, "sum", 0), SUM, SHARD),
    "reduce_scatter_tensor avg": Row(
        called(functional.reduce_scatter_tensor, "avg", 0), MEAN, SHARD
    ),
    "reduce_scatter_tensor of columns": Row(
        called(functional.reduce_scatter_tensor, "sum", 1), scattered_columns, SHARD
    ),
    "all_to_all_single": Row(called(functional.all_to_all_single, None, None), exchanged, SHARD),
    "all_reduce_coalesced": Row(together(functional.all_reduce_coalesced, "sum"), SUM),
    "all_gather_into_tensor_coalesced": Row(
        together(functional.all_gather_into_tensor_coalesced), HALF
    ),
    "reduce_scatter_tensor_coalesced": Row(
        together(functional.reduce_scatter_tensor_coalesced, "sum", [0, 0]), SUM, SHARD
    ),
}
NN: Final[dict[str, Row]] = {
    **{
        f"all_reduce {op}": Row(
            of_functions(differentiable.all_reduce, op=getattr(ReduceOp, op)), expected
        )
        for op, expected in (("SUM", SUM), ("AVG", MEAN), ("MAX", MAX), ("MIN", MIN))
    },
    "all_gather": Row(
        lambda group, x: torch.cat(differentiable.all_gather(layouts[-1](x * 1), group=group)),
        HALF,
    ),
    "_all_gather_base": Row(
        lambda group, x: differentiable._all_gather_base(x.new_zeros(8, 2), x * 1, group=group) * 1,
        HALF,
    ),
    "broadcast": Row(
        lambda group, x: differentiable.broadcast(layouts[-1](x * 1), 1, group=group) * 1,
        lambda x: ranks(x)[1],
    ),
    "reduce_scatter": Row(cut(differentiable.reduce_scatter), SUM, SHARD),
    "reduce_scatter AVG": Row(cut(differentiable.reduce_scatter, op=ReduceOp.AVG), MEAN, SHARD),
    "all_to_all": Row(exchange_parts, exchanged, SHARD),
    "all_to_all_single": Row(
        lambda group, x: (
            differentiable.all_to_all_single(x.new_zeros(4, 2), layouts[-1](x * 1), group=group) * 1
        ),
        exchanged,
        SHARD,
    ),
}
ROWS: Final = {
    **{f"torch.distributed.{name}": row for name, row in IN_PLACE.items()},
    **{f"functional.{name}": row for name, row in FUNCTIONAL.items()},
    **{f"nn.functional.{name}": row for name, row in NN.items()},
}

X: Final = torch.arange(16.0, dtype=torch.float64).sin().view(8, 2)
HURT: Final = X.clone()
HURT[1, 0], HURT[4, 1], HURT[6, 0] = torch.nan, torch.inf, torch.nan
"""A NaN on each rank, and an infinity on one."""


def same(actual: Any, expected: Tensor) -> None:
    """Compares bits, but for one rounding."""
    found = full(actual)
    assert type(found) is Tensor
    assert found.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps, equal_nan=True)


def values(name: str, check: Any, mesh: Mesh) -> None:
    """Compares the values of a row for all dtypes and memory layouts."""
    row, group = ROWS[name], axis_group(mesh, "tp")
    for layout in LAYOUTS.values():
        layouts[-1] = layout
        # A column of a larger tensor has that one's type, which varies.
        varies = row.spec == P() and name in WITHOUT and layout is LAYOUTS["columns"]
        f = mapped(row._replace(spec=SHARD) if varies else row, group, mesh, check)
        for x in (X, HURT, X.to(torch.bfloat16)):
            expected = row.expected(x.double()).to(x.dtype)
            same(f(x), torch.cat([expected, expected]) if varies else expected)
    layouts[-1] = LAYOUTS["dense"]


def mapped(row: Row, group: Any, mesh: Mesh, check: Any) -> Callable[..., Any]:
    body = partial(row.call, group)
    return shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=row.spec, check=check)


def gradients(name: str, check: Any, mesh: Mesh) -> None:
    """Compares gradients with those of the same on the global tensor."""
    row = ROWS[name]
    if check is False and row.spec == P():  # nobody else says that a result is R
        row = row._replace(call=lambda *args: convert(ROWS[name].call(*args), "tp", src=R, dst=I))
    f = mapped(row, axis_group(mesh, "tp"), mesh, check)
    for dtype in (torch.float64, torch.bfloat16):
        found = []
        for function in (f, row.expected):
            x = X.detach().clone().to(dtype).requires_grad_()
            y = full(function(x))
            (grad,) = torch.autograd.grad((y * weights(y)).sum(), x)
            found.append(grad)
        same(*found)


def weights(y: Tensor) -> Tensor:
    """Returns another cotangent for each entry."""
    return torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y)


def transforms(name: str, check: Any, mesh: Mesh) -> None:
    """Compares tangents, and rows of a vmap outside, with those of the global tensor's."""
    row = ROWS[name]
    f = mapped(row, axis_group(mesh, "tp"), mesh, check)
    tangent = X.cos()

    functions: Any = (f, row.expected)
    if row.spec == P() or mesh.device_mesh is None:  # torch has no forward mode for DTensors
        same(*[torch.func.jvp(g, (X,), (tangent,))[1] for g in functions])
    several = torch.stack([X, 2 * X, X.cos()])
    same(*[torch.vmap(g)(several) for g in functions])


WITHOUT: Final = tuple(name for name in ROWS if name.startswith("torch.distributed"))
"""Calls that write into their operands, which autograd does not see."""
WITH: Final = tuple(name for name in ROWS if name not in WITHOUT)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_typed_collective(kind: Any, gloo: Gloo) -> None:
    for name in ROWS if kind != "vmap" else WITH:
        run_on(kind, partial(values, name, True), gloo)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_typed_collective(kind: Any, gloo: Gloo) -> None:
    for name in WITH:
        run_on(kind, partial(gradients, name, True), gloo)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_unchecked_calls_run_as_the_typed_collective_too(kind: Any, gloo: Gloo) -> None:
    for name in ROWS:
        run_on(kind, partial(values, name, False), gloo)
    for name in WITH:
        run_on(kind, partial(gradients, name, False), gloo)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_tangents_and_rows_of_vmap_are_those_of_the_typed_collective(kind: Any, gloo: Gloo) -> None:
    for name in WITH:
        run_on(kind, partial(transforms, name, True), gloo)


def refused(check: Any, mesh: Mesh) -> None:
    """Requires that what no type describes is refused at its line, with the name to use."""
    group: Any = axis_group(mesh, "tp")
    calls: dict[str, Callable[[Tensor], object]] = {
        "shardmap_torch.all_reduce": lambda x: dist.reduce(x * 1, group_dst=0, group=group),
        "shardmap_torch.all_gather": lambda x: differentiable.gather(x * 1, 0, group=group),
    }
    for instead, call in calls.items():

        def body(x: Tensor, call: Callable[[Tensor], object] = call) -> Tensor:
            call(x)
            return x

        f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check=check)
        with pytest.raises((ShardTypeError, CollectiveError)) as caught:
            f(X)
        assert "of torch.distributed is called in the body" in str(caught.value)
        assert f"Fix: use {instead}" in str(caught.value)
        assert "  at test_torch_names.py:" in str(caught.value)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_no_type_describes_is_refused_on_every_mesh(kind: Any, check: Any, gloo: Gloo) -> None:
    run_on(kind, partial(refused, check), gloo)


def test_a_tensor_that_vmap_has_not_batched_is_not_written() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="vmap")
    group: Any = axis_group(mesh, "tp")

    def body(x: Tensor) -> Tensor:
        out = torch.zeros(8, 2, dtype=x.dtype)
        dist.all_gather_into_tensor(out, x * 1, group=group)
        return out

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    same(f(X), X)
    with told(CollectiveError):
        torch.vmap(f)(torch.stack([X, X]))


def columns(mesh: Mesh) -> None:
    """Requires that columns are gathered as one device has them, with a gradient and without."""
    group: Any = axis_group(mesh, "tp")

    def whole(x: Tensor) -> Any:
        return functional.all_gather_tensor(x.contiguous(), 1, group) * 1

    f = shard_map(whole, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(), check="global")
    for rows in (2, 8):  # as many as ranks: torch compares the two
        x = X.detach()[:rows].repeat(1, 2)
        same(f(x), x)
        same(f(x.clone().requires_grad_()).detach(), x)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_columns_are_gathered_under_global_strictness(kind: Any, gloo: Gloo) -> None:
    run_on(kind, columns, gloo)


def test_an_output_argument_is_not_read() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    group: Any = axis_group(mesh, "tp")

    def body(x: Tensor) -> Tensor:
        out = x.new_zeros(2, 2)
        differentiable.reduce_scatter(out, [*x.chunk(2)], group=group)
        return out * 2

    with pytest.raises(ShardTypeError, match="and not its output argument"):
        shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(X)


def test_a_group_is_asked_for_its_rank_outside_of_a_body() -> None:
    group: Any = axis_group(make_mesh((1, 1), ("dp", "tp"), kind="simulated"), "tp")
    assert (dist.get_rank(group), dist.get_world_size(group), group.rank()) == (0, 1, 0)
    assert dist.get_global_rank(group, 0) == dist.get_group_rank(group, 0) == 0
    assert dist.get_process_group_ranks(group) == [0]
    assert not dist.is_initialized()


def test_a_product_is_contiguous_so_that_its_sum_is_written_into_it() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
    group: Any = axis_group(mesh, "tp")

    class Sum(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            dist.all_reduce(x.contiguous(), group=group)
            return x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    apply: Any = Sum.apply
    x, w = X.detach().reshape(2, 2, 4), X.detach().reshape(4, 4)
    specs: Any = {"mesh": mesh, "in_specs": (P(None, None, "tp"), P(None, "tp")), "out_specs": P()}
    for make in (linear, lambda x, w: x.mT.contiguous().mT @ w.mT):
        f = shard_map(lambda x, w, make=make: apply(make(x, w)), check="global", **specs)
        torch.testing.assert_close(f(x, w), linear(x, w))

    def unknown(x: Tensor, w: Tensor) -> Any:
        return apply(linear(x, w).mT * 2)  # which has the strides that its operand has

    with pytest.raises(ShardTypeError, match="depends on strides"):
        shard_map(unknown, **specs)(x, w)


def test_a_rank_that_is_kept_is_refused_at_its_line() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
    group: Any = axis_group(mesh, "tp")
    get_rank = cache(lambda group: dist.get_rank(group))

    def own_rows(x: Tensor) -> Tensor:
        return x.chunk(2)[get_rank(group)] * 2

    f = shard_map(own_rows, mesh=mesh, in_specs=P(), out_specs=P("tp"))
    with pytest.raises(ShardTypeError) as caught:
        f(X)
    hold_own(str(caught.value))


COMPILED: Final[dict[str, Callable[[Tensor, Any], Any]]] = {
    "broadcast": lambda x, group: functional.broadcast(x * 1, 1, group),
    "a mean": lambda x, group: functional.all_reduce(x * 1, "avg", group),
    "a maximum": lambda x, group: functional.all_reduce(x * 1, "max", group),
    "a differentiable broadcast": lambda x, group: differentiable.broadcast(x * 1, 1, group),
    "a differentiable maximum": lambda x, group: differentiable.all_reduce(
        x * 1, dist.ReduceOp.MAX, group
    ),
}
"""Calls whose derivative torch lacks, or has otherwise."""


def compiled(mesh: Mesh) -> None:
    """Requires of each in torch.compile the gradient that it has outside of it."""
    group: Any = axis_group(mesh, "tp")
    for name, call in COMPILED.items():
        f = shard_map(
            lambda x, call=call: call(x, group) * 2, mesh=mesh, in_specs=P("tp"), out_specs=P()
        )
        grads: list[Tensor] = []
        for run in (f, torch.compile(f)):
            x = X.detach().clone().requires_grad_()
            grads += torch.autograd.grad(run(x).square().sum(), x)
        assert torch.equal(*grads), name


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # Dynamo's own
def test_torch_compile_has_the_derivatives_of_the_typed_collectives(gloo: Gloo) -> None:
    run_on("gloo", compiled, gloo)
