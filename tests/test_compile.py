"""shard_mapped functions under torch.compile(fullgraph=True) on process groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    TransformError,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    broadcast,
    convert,
    full,
    make_mesh,
    ppermute,
    reduce_scatter,
    shard_map,
)
from tests.support.fuzzing import sampled
from tests.support.pool import Gloo

# Dynamo itself instantiates the class, and torch warns of that.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning"
)

Body = Callable[..., Tensor]

X = P("tp")
WEIGHTS = P(None, "tp"), P("tp")


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = torch.relu(convert(x, "tp", src=I, dst=R) @ w1)
    return all_reduce(h @ w2, "tp", dst=I)


def sequence_parallel_mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = torch.relu(all_gather(x, "tp", dim=0, dst=R) @ w1)
    return reduce_scatter(h @ w2, "tp", dim=0)


def summed(x: Tensor) -> Tensor:
    return all_reduce(x.sin(), "tp", dst=R) * x


def averaged(x: Tensor) -> Tensor:
    return all_reduce(x.sin(), "tp", dst=R, op="mean") * x


def highest(x: Tensor) -> Tensor:
    return all_reduce(x.sin(), "tp", dst=R, op="max") * x


def gathered(x: Tensor) -> Tensor:
    return all_gather(x.sin(), "tp", dim=1, dst=R).sum(1, keepdim=True) * x


def exchanged(x: Tensor) -> Tensor:
    return all_to_all(x.sin(), "tp", split_dim=1, concat_dim=0).reshape(x.shape) * x


def passed_on(x: Tensor) -> Tensor:
    return ppermute(x.sin(), "tp", [(0, 1)]) * x


def told(x: Tensor) -> Tensor:
    return broadcast(x.sin(), "tp", 1, dst=R) * x


# What each body sends, as the functional collective that its graph must hold.
ONE_OPERAND: dict[Body, str] = {
    summed: "all_reduce",
    averaged: "all_reduce",
    highest: "all_reduce",
    gathered: "all_gather_into_tensor",
    exchanged: "all_to_all_single",
    passed_on: "all_to_all_single",
    told: "broadcast",
}


def mapped(body: Body) -> Callable[..., Tensor]:
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    if body is mlp:
        specs: Any = (P(invariant="tp"), *WEIGHTS)
        return shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    if body is sequence_parallel_mlp:
        return shard_map(body, mesh=mesh, in_specs=(X, *WEIGHTS), out_specs=X)
    return shard_map(body, mesh=mesh, in_specs=X, out_specs=X)


def operands(body: Body) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6)] if body in ONE_OPERAND else [(4, 6), (6, 8), (8, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def value_and_gradients(f: Callable[..., Tensor], xs: list[Tensor]) -> list[Tensor]:
    xs = [x.clone().requires_grad_() for x in xs]
    y = f(*xs)
    y.cos().sum().backward()
    return [y.detach(), *(x.grad for x in xs if x.grad is not None)]


def compare(body: Body, backend: str = "") -> list[str]:
    """Compares the compiled function with the eager one; returns the code of its graphs."""
    torch._dynamo.reset()
    f, found = mapped(body), list[str]()

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(graph.code)
        return make_boxed_func(graph.forward)

    def local(*xs: Tensor) -> Tensor:
        # The result as this rank has it: a plain loss of a DTensor is DTensor's own affair.
        y = f(*xs)
        return y.to_local() if isinstance(y, DTensor) else y

    noting = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(local, backend=backend or noting, fullgraph=True)
    eager = value_and_gradients(local, operands(body))
    assert len(eager) == 1 + len(operands(body))
    found_values = value_and_gradients(compiled, operands(body))
    torch.testing.assert_close(found_values, eager, rtol=1e-10, atol=1e-10)
    return found


@pytest.mark.parametrize(
    "body", sampled([mlp, sequence_parallel_mlp, *ONE_OPERAND], mlp, passed_on)
)
def test_a_compiled_function_has_the_values_and_gradients_of_the_eager_one(
    gloo: Gloo, body: Body
) -> None:
    for forward, backward in gloo(2).run(compare, body, timeout=120):
        if body in ONE_OPERAND:
            assert f"_c10d_functional.{ONE_OPERAND[body]}" in forward
        if body in (mlp, passed_on):
            # A rank that receives nothing sends in its backward too: torch's default partitioner
            # drops what no result needs, and the other ranks would hang.
            name = ONE_OPERAND.get(body, "all_reduce")
            for code in (forward, backward):
                assert code.count(f"_c10d_functional.{name}") == 1
                assert "_c10d_functional.wait_tensor" in code


def refused_wrong_spec(fullgraph: bool) -> str:
    """The error of a compiled first call whose gradient would differ between the ranks."""
    torch._dynamo.reset()
    mesh = make_mesh((2,), ("tp",), kind="process_group")

    def local(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce((x @ w).sum(1), "tp", dst=I)

    specs = P(invariant="tp"), P(None, "tp")
    f = shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    x, w, _ = operands(mlp)
    try:
        torch.compile(f, backend="aot_eager", fullgraph=fullgraph)(x.requires_grad_(), w)
    except ShardTypeError as error:
        return str(error)
    return "accepted"


@pytest.mark.usefixtures("repairs")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_call_is_checked_before_it_runs(gloo: Gloo, fullgraph: bool) -> None:
    for text in gloo(2).run(refused_wrong_spec, fullgraph, timeout=120):
        assert text.startswith(
            "local: mm over axis 'tp' of I and V: the I operand's gradient would differ between "
            "ranks and never be summed."
        )
        assert "accepted also by check='global': replicate={'tp'} in the spec of input x" in text


def dropped(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x)


def branched(x: Tensor) -> Tensor:
    own = x * axis_index("tp")
    branch = all_reduce(own, "tp", dst=R) if x.detach().sum().item() > 0 else x.cos()
    return branch.sin()


def cannot_compile(body: Body) -> tuple[str, bool, int]:
    """The error of compiling what only uncompiled runs compare with the checked program.

    And whether a call that may break graphs is as an uncompiled one, and how many graphs it has.
    """
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    f = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
    torch._dynamo.reset()
    text = ""
    try:
        torch.compile(f, backend="aot_eager", fullgraph=True)(torch.ones(64))
    except TransformError as error:
        text = str(error)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    torch.manual_seed(0)
    expected = [f(torch.ones(64)) for _ in range(2)]
    torch.manual_seed(0)
    compiled = torch.compile(f, backend=counter)
    is_equal = all(torch.equal(compiled(torch.ones(64)), each) for each in expected)
    return text, is_equal, counter.frame_count


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        (
            dropped,
            "it draws from torch's default generator, which ranks share by their types when they "
            "run uncompiled only; draw from a key of shardmap_torch.random",
        ),
        (branched, "it branches on numbers taken from tensors"),
    ],
)
def test_what_uncompiled_runs_alone_can_compare_is_not_compiled(
    gloo: Gloo, body: Body, obstacle: str
) -> None:
    text, is_equal, num_graphs = gloo(2).run(cannot_compile, body, timeout=120)[0]
    assert text.startswith(
        f"{body.__name__}: torch.compile cannot compile what was checked: {obstacle}. Call it "
        "uncompiled, or write its types and pass check=False."
    )
    assert (is_equal, num_graphs) == (True, 0)


def placed_otherwise() -> list[list[Tensor]]:
    """Eager and compiled gradients of DTensors that are redistributed, by one compiled function."""
    torch._dynamo.reset()
    f = mapped(sequence_parallel_mlp)
    compiled = torch.compile(f, backend="aot_eager", dynamic=False)
    mesh, found = make_mesh((2,), ("tp",), kind="process_group").device_mesh, []
    for placements in ((Shard(1), Replicate(), Shard(0)), (Replicate(), Shard(0), Shard(1))):
        pairs = zip(operands(sequence_parallel_mlp), placements, strict=True)
        placed: list[Tensor] = [distribute_tensor(x, mesh, [at]) for x, at in pairs]
        for run in (f, compiled):
            whole = value_and_gradients(lambda *xs, run=run: full(run(*xs)), placed)
            found.append(full(whole))
    return found


def test_dtensors_of_other_placements_compile_for_sizes_that_are_fixed(gloo: Gloo) -> None:
    def alone(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return torch.relu(x @ w1) @ w2

    expected = value_and_gradients(alone, operands(sequence_parallel_mlp))
    for outcomes in gloo(2).run(placed_otherwise, timeout=120):
        for found in outcomes:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def refusal(f: Callable[..., Any], *xs: Tensor) -> str:
    """Returns what compiling `f` says, which must leave no transform active."""
    torch._dynamo.reset()
    expected = full(f(*xs))
    try:
        torch.compile(f, backend="eager", fullgraph=True)(*xs)
    except Exception as error:
        torch.testing.assert_close(full(f(*xs)), expected)
        return str(error)
    return "accepted"


def transformed_outside() -> str:
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    f = shard_map(total, mesh=mesh, in_specs=X, out_specs=P())
    return refusal(torch.func.grad(f), *operands(summed))


def transformed_inside() -> str:
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    return refusal(
        shard_map(torch.func.vmap(summed), mesh=mesh, in_specs=X, out_specs=X), *operands(summed)
    )


def total(x: Tensor) -> Tensor:
    return all_reduce((x**2).sum(), "tp", dst=I)


@pytest.mark.parametrize("run", [transformed_outside, transformed_inside])
def test_compiling_under_a_functorch_level_is_refused(gloo: Gloo, run: Callable[[], str]) -> None:
    """Dynamo would give wrong gradients: it leaves the backward of Functions out."""
    for text in gloo(2).run(run, timeout=120):
        assert (
            "TransformError: A collective, or the boundary of a shard_mapped function, cannot be "
            "compiled under a torch.func transform: torch.compile does not differentiate or batch "
            "autograd Functions there. Compile with .backward() outside; or take first derivatives "
            "in a checked body, with respect to what does not require gradients, by grad, "
            "value_and_grad or vjp of shardmap_torch; or do not compile." in text
        )


def other_programs() -> tuple[str, float]:
    """Compiles one program on rank 0 and another on rank 1; then both compile the same."""
    torch._dynamo.reset()
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    shift = 1.0 if mesh.rank == 0 else 2.0

    def local(x: Tensor) -> Tensor:
        y = all_reduce(x, "tp", dst=I)
        return y + all_reduce(x, "tp", dst=I) if shift == 2 else y

    f = shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P())
    try:
        torch.compile(f, backend="eager", fullgraph=True)(torch.ones(4))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "accepted"
    g = shard_map(total, mesh=mesh, in_specs=X, out_specs=P())
    compiled = torch.compile(g, backend="eager", fullgraph=True)
    return text, float(compiled(*operands(summed)) - g(*operands(summed)))


def test_ranks_that_compile_different_programs_are_told(gloo: Gloo) -> None:
    for text, difference in gloo(2).run(other_programs, timeout=120):
        assert text.startswith(
            "CollectiveMismatchError: local: processes run different programs. The first "
            "difference:\n  rank 0: x: P('tp')\n  rank 1: all_reduce('tp', Partial -> I)  # "
            "test_compile.py:"
        )
        assert "\nwhere: ranks 0, 1 at test_compile.py:" in text
        assert difference == 0.0


def nested() -> bool:
    torch._dynamo.reset()
    mesh = make_mesh((1, 2), ("dp", "tp"), kind="process_group")

    def outer(x: Tensor) -> Tensor:
        return shard_map(summed, in_specs=X, out_specs=X)(x)

    f = shard_map(
        outer, mesh=mesh, axis_names={"dp"}, in_specs=P("dp"), out_specs=P("dp"), check=False
    )
    (x,) = operands(summed)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(full(compiled), full(f(x)), rtol=1e-10, atol=1e-10)
    return True


def test_a_shard_map_made_in_a_compiled_body_compiles(gloo: Gloo) -> None:
    assert gloo(2).run(nested, timeout=120) == [True, True]
