"""An operator compared with the function that the checker interprets in its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import ShardTypeError, register_decomposition, validate_rule

X, W = torch.ones(2, 3), torch.ones(3)


def operator(
    name: str,
    f: Callable[..., Any],
    meaning: Callable[..., Any],
    results: str = "Tensor",
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """A new operator of `x` and `w`."""
    made = torch.library.custom_op(
        f"validate_test::{name}", f, mutates_args=(), schema=f"(Tensor x, Tensor w) -> {results}"
    )
    made.register_fake(f if fake is None else fake)
    if backward is not None:
        made.register_autograd(
            backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
    op = getattr(torch.ops.validate_test, name).default
    register_decomposition(op, meaning)
    return op


def message(op: Any, *args: Any) -> list[str]:
    with pytest.raises(ShardTypeError) as caught:
        validate_rule(op, *args, num_ranks=2)
    return str(caught.value).splitlines()


def test_right_decomposition_is_shown_with_its_types() -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)

    def meaning(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([x[0] * w, w * x[1]])

    op = operator("scaled", lambda x, w: x * w, meaning, backward=backward)
    found = validate_rule(op, X, W)
    assert "(x: Partial, w: R): result is Partial" in found.shown
    assert "(x: V, w: R), cotangent V: gradient of w is V" not in found.shown  # V claims nothing
    assert "(x: R, w: R), cotangent Partial: gradient of x is Partial" in found.shown
    assert "(x: Partial, w: Partial)" in found.refused
    assert "result is that of the decomposition" in found.shown


def test_decomposition_that_computes_something_else_is_found_where_ones_would_hide_it() -> None:
    op = operator("weighed", lambda x, w: x * w, lambda x, w: x * w.square())
    (*_, claim) = message(op, X, W)
    assert claim.startswith(
        "  result is that of the decomposition: the operator gives something else; "
        "the worst difference is "
    )


def test_type_that_does_not_hold_of_the_operator_is_found() -> None:
    """The checker sees a sum pass; the operator's own rectifier is no linear function."""
    op = operator("rectified", lambda x, w: x.relu() * w, lambda x, w: x * w)
    lines = message(op, X, W)
    assert any(
        "(x: Partial, w: R): result is Partial: the sum depends on" in line for line in lines
    )


def test_each_of_several_results_is_compared() -> None:
    op = operator(
        "both", lambda x, w: (x * w, x + w), lambda x, w: (x * w, x - w), "(Tensor, Tensor)"
    )
    (*_, claim) = message(op, X, W)
    assert claim.startswith("  result[1] is that of the decomposition: ")


def test_another_dtype_is_found() -> None:
    """Shapes and dtypes are compared on fake tensors; a kernel may differ from its fake."""
    op = operator(
        "wide", lambda x, w: (x * w).double(), lambda x, w: x * w, fake=lambda x, w: x * w
    )
    (*_, claim) = message(op, X, W)
    assert "the dtypes are torch.float64 and torch.float32" in claim


def test_an_operator_of_integers_is_compared() -> None:
    def picked(x: Tensor, w: Tensor) -> Tensor:
        return x[w]

    op = operator("picked", picked, lambda x, w: torch.index_select(x, 0, w))
    found = validate_rule(op, torch.randn(4, 2), torch.tensor([0, 3, 1]))
    assert "result is that of the decomposition" in found.shown
