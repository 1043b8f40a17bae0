"""Forms that a run may take for a composition: accepted where they are typed alike, else refused.

The forms are a copy of a composition whose backward is written by hand, and wrong in one place.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    P,
    Partial,
    R,
    ShapeDtype,
    ShardTypeError,
    V,
    check_program,
    explain,
    make_mesh,
    shard_map,
    trace,
)
from shardmap_torch.checker.communication import equivalence
from shardmap_torch.checker.ir.outcomes import Traits
from shardmap_torch.collectives.autograd import TypedFunction, bind
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend, is_checker
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.caching import Memo
from shardmap_torch.kernels import matmul_reduce_scatter

MESH = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
GATHER = Collective("all_gather", V, R, ("tp",))
SCATTER, SUM = GATHER.transpose, Collective("all_reduce", Partial, R, ("tp",))


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    with mock.patch.object(equivalence, "_COMPARED", Memo[Any]()):
        yield


def product(backend: Backend, x: Tensor, w: Tensor) -> Tensor:
    return bind(backend, GATHER, x) @ w


Pull = Callable[[Backend, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]


def right(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    full = bind(backend, GATHER, x)
    return bind(backend, SCATTER, dy @ w.t()), full.t() @ dy


def form(backend: Backend, forward: Callable[..., Tensor], pull: Pull) -> Callable[..., Any]:
    """The product with another forward and a backward of its own."""

    class Own(TypedFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return forward(backend, x, w)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return pull(backend, x, w, dy)

    return lambda x, w: (Own.apply(x, w),)


def check(
    forward: Callable[..., Tensor] = product,
    pull: Pull = right,
    *,
    w_spec: P = P(None, "tp"),  # noqa: B008 - a value
    requires_grad: Sequence[bool] = (True, True),
    ask: Callable[..., Any] = trace,
) -> Any:
    """Asks about a body that compares a form with the product, and computes the product."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        scope = current_scope()
        assert scope is not None
        backend = scope.backend
        if is_checker(backend):  # as on every mesh while a body is checked
            composition = lambda x, w: (product(backend, x, w),)  # noqa: E731
            backend.check_equivalent(
                ("product, overlapped", forward, pull),
                form(backend, forward, pull),
                composition,
                (x, w),
            )
        return product(backend, x, w)

    columns = "tp" if w_spec.entries else None
    out = P(None, columns) if columns else P(partial="tp")
    mapped = shard_map(body, mesh=MESH, in_specs=(P("tp"), w_spec), out_specs=out)
    shapes = (8, 16), (16, 16)
    return ask(mapped, *map(ShapeDtype, shapes, [torch.float32] * 2, requires_grad))


def test_a_backward_that_does_what_autograd_derives_is_accepted_and_told() -> None:
    text = check(ask=explain)
    assert "  product, overlapped, typed as what follows:  # test_equivalence.py:" in text
    lines = text[text.index("collectives:") :].splitlines()
    assert lines[2:5] == [
        "    forward: all_gather('tp', V -> R) of float32[2, 16], sends 384 B",
        "    backward: all_gather('tp', V -> R) of float32[2, 16], sends 384 B",
        "    backward: reduce_scatter('tp', Partial -> V) of float32[8, 16], sends 384 B",
    ]
    assert text.count("all_gather") == 3  # The composition's own is the third.
    assert "  tp: 768" in text  # A run has one of the two.


def test_nothing_of_the_comparison_is_left_in_the_program() -> None:
    first = check()
    again = check()  # from memory
    assert first.fingerprint == again.fingerprint
    names = [equation.name for equation in first.equations if not equation.backward]
    assert names == ["product, overlapped", "all_gather('tp', V -> R)", "mm"]


def forgets_the_sum(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> Any:
    return (dy @ w.t())[: x.shape[0]], right(backend, x, w, dy)[1]


def sums_twice(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> Any:
    dx, dw = right(backend, x, w, dy)
    return bind(backend, SUM, dx), dw


def takes_the_shard(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> Any:
    return right(backend, x, w, dy)[0], x.t() @ dy[: x.shape[0]]


def forgets_w(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> Any:
    return right(backend, x, w, dy)[0], None


def sums_dw(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> Any:
    dx, dw = right(backend, x, w, dy)
    return dx, bind(backend, SUM, dw)


def has_another_shape(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> Any:
    dx, dw = right(backend, x, w, dy)
    return dx.t(), dw


PRODUCT = "body: product, overlapped: "
WHOLE = P(replicate="tp")
COLUMNS = P(None, "tp")


@pytest.mark.parametrize(
    ("pull", "w_spec", "what"),
    [
        pytest.param(
            forgets_the_sum,
            COLUMNS,
            "the gradient of operand 0 is made by no collective, and by "
            "reduce_scatter('tp', Partial -> V) in the composition.",
            id="V stands for the sum, and only the collective is missing",
        ),
        pytest.param(
            forgets_the_sum,
            WHOLE,
            "the gradient of operand 0 is Partial over 'tp', and V in the composition.",
            id="of a whole w",
        ),
        pytest.param(
            sums_twice,
            COLUMNS,
            "the gradient of operand 0 is made by all_reduce('tp', Partial -> R), "
            "reduce_scatter('tp', Partial -> V), and by reduce_scatter('tp', Partial -> V) in "
            "the composition.",
            id="summed twice",
        ),
        pytest.param(
            takes_the_shard,
            COLUMNS,
            "the gradient of operand 1 is made by no collective, and by "
            "all_gather('tp', V -> R) in the composition.",
            id="the shard in place of the gathered",
        ),
        pytest.param(
            forgets_w,
            COLUMNS,
            "the gradient of operand 1 is missing, and there in the composition.",
            id="no gradient",
        ),
        pytest.param(
            sums_dw,
            WHOLE,
            "the gradient of operand 1 is R over 'tp', and V in the composition.",
            id="a sum that is another's to take",
        ),
        pytest.param(
            has_another_shape,
            COLUMNS,
            "it fails (RuntimeError: Function OwnBackward returned an invalid gradient at index 0 "
            "- got [16, 2] but expected shape compatible with [2, 16]), which nothing does in the "
            "composition.",
            id="a shape that autograd refuses",
        ),
    ],
)
def test_a_wrong_backward_is_refused(pull: Pull, w_spec: P, what: str) -> None:
    with pytest.raises(ShardTypeError) as caught:
        check(pull=pull, w_spec=w_spec)
    first, site, fix = str(caught.value).splitlines()
    assert first == PRODUCT + what
    assert site.startswith("  at test_equivalence.py:")
    assert fix == 'Fix: pass overlap="off", and report it: this is a defect of the kernel.'


def repeats(backend: Backend, x: Tensor, w: Tensor) -> Tensor:
    return x.repeat(4, 1) @ w


def doubles(backend: Backend, x: Tensor, w: Tensor) -> Tensor:
    return product(backend, x, w).double()


@pytest.mark.parametrize(
    ("forward", "w_spec", "what"),
    [
        (repeats, COLUMNS, "result 0 is made by no collective, and by all_gather('tp', V -> R)"),
        (repeats, WHOLE, "result 0 is V over 'tp', and R"),
        (
            doubles,
            COLUMNS,
            "it fails (ShardTypeError: body: mm of float32 and float64: torch multiplies tensors "
            "of one dtype only.), which nothing does",
        ),
    ],
)
def test_a_wrong_forward_is_refused(forward: Callable[..., Tensor], w_spec: P, what: str) -> None:
    with pytest.raises(ShardTypeError) as caught:
        check(forward, w_spec=w_spec)
    first, *_ = str(caught.value).splitlines()
    assert first == f"{PRODUCT}{what} in the composition."


def test_a_backward_is_held_only_where_a_gradient_flows() -> None:
    check(pull=forgets_w, requires_grad=(True, False))
    check(pull=forgets_the_sum, requires_grad=(False, True))
    check(pull=forgets_the_sum, requires_grad=(False, False))
    with pytest.raises(ShardTypeError, match="operand 1 is missing"):
        check(pull=forgets_w, requires_grad=(False, True))


def doubled(backend: Backend, x: Tensor, w: Tensor, dy: Tensor) -> Any:
    dx, dw = right(backend, x, w, dy)
    return 2 * dx, dw


def test_a_wrong_factor_is_for_numbers_to_find() -> None:
    check(pull=doubled)


def test_a_comparison_leaves_no_traits_of_its_own_on_the_program() -> None:
    """The kernel's own Functions, and gradients that the comparison takes, are not the body's."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return matmul_reduce_scatter(x, w, "tp")

    mapped = shard_map(layer, mesh=MESH, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
    x = ShapeDtype((8, 8), torch.float32, requires_grad=True)
    first, second = [check_program(mapped, x, x).traits for _ in range(2)]
    assert first == second == Traits()
