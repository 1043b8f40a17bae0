"""Typings of an operator, its decomposition, or a local function, compared with numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    Row,
    ShardTypeError,
    SpecError,
    register_decomposition,
    register_rule,
    validate_rule,
)
from tests.support.golden import hold_own

aten = torch.ops.aten


def elementwise(name: str, f: Callable[[Tensor], Tensor]) -> Any:
    """A new operator of `x`."""
    made = torch.library.custom_op(
        f"validate_test::{name}", f, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    made.register_fake(torch.empty_like)
    return made


rectify = elementwise("rectify", torch.relu)
noisy = elementwise("noisy", lambda x: x + torch.randn_like(x))
half_zero = elementwise("half_zero", lambda x: 0.5 * x)
cube = elementwise("cube", lambda x: x**3)
unknown = elementwise("unknown", torch.clone)
never = elementwise("never", torch.clone)


@torch.library.custom_op("validate_test::affine", mutates_args=())
def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


@torch.library.custom_op("validate_test::affine_linear", mutates_args=())
def affine_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


@torch.library.custom_op("validate_test::ignore", mutates_args=())
def ignore(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@torch.library.custom_op("validate_test::cube_backward", mutates_args=())
def cube_backward(grad: Tensor, x: Tensor) -> Tensor:
    return 3 * grad * x**2


@torch.library.custom_op("validate_test::pick", mutates_args=())
def pick(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cube_gradient(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
    made: Tensor = cube_backward(grad, x)
    return made


cube.register_autograd(_cube_gradient, setup_context=_save)
for each in (ignore, cube_backward):
    each.register_fake(lambda x, y: torch.empty_like(x))
for each in (affine, affine_linear):
    each.register_fake(lambda x, w, b: x.new_empty(x.shape[0], w.shape[1]))
pick.register_fake(lambda table, ids: table.new_empty(*ids.shape, *table.shape[1:]))

test = torch.ops.validate_test
register_rule(test.affine.default, Row(linear=(("x", "w"), ("b",))))
register_rule(test.affine_linear.default, Row(linear=(("x", "w"),)))
register_rule(test.rectify.default, Row(linear=(("x",),)))
register_rule(test.noisy.default, Row())
register_rule(test.ignore.default, Row(unread=("y",)))
register_rule(test.half_zero.default, Row(zero=True))
register_rule(test.cube.default, Row())
register_rule(test.cube_backward.default, Row(linear=(("grad", "x"),)))
register_rule(test.never.default, Row(refuse="it is never right"))
register_rule(test.pick.default, Row(linear=(("table",),)))

X, W, B = torch.ones(2, 3), torch.ones(3, 4), torch.zeros(4)
SCALE = torch.ones(3)


def message(*args: object, **kwargs: object) -> str:
    """The text of the error that `validate_rule` raises."""
    with pytest.raises((ShardTypeError, SpecError)) as caught:
        validate_rule(*args, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def test_right_rule_of_an_affine_operator_is_shown_for_every_linear_argument() -> None:
    found = validate_rule(test.affine.default, X, W, B)
    assert set(found.shown) == {
        "(x: R, w: R, b: R): result is K",
        "(x: Partial, w: R, b: Partial): result is Partial",
        "(x: R, w: Partial, b: Partial): result is Partial",
        "(x: V, w: R, b: Partial): result is Partial",
        "(x: R, w: V, b: Partial): result is Partial",
        "(x: Partial, w: R, b: V): result is Partial",
        "(x: R, w: Partial, b: V): result is Partial",
    }
    assert "(x: Partial, w: R, b: R)" in found.refused
    assert "(x: Partial, w: Partial, b: R)" in found.refused


def test_bias_that_a_rule_forgets_is_found_though_the_example_is_zero() -> None:
    lines = message(test.affine_linear.default, X, W, B, num_ranks=2).splitlines()
    assert lines[0].startswith("validate_rule: validate_test.affine_linear.default: ")
    assert any(
        line.startswith(
            "  (x: Partial, w: R, b: R): result is Partial: the sum is not the operation on "
            "the sums; "
            "the worst difference is "
        )
        for line in lines
    )


def test_relu_that_a_rule_calls_linear_is_found() -> None:
    head, claim = message(test.rectify.default, X).splitlines()
    assert head == "validate_rule: validate_test.rectify.default: 1 claim does not hold:"
    assert claim.startswith(
        "  (x: Partial): result is Partial: the sum depends on how the operands are split; "
        "the worst difference is "
    )


def test_draw_that_a_rule_keeps_quiet_about_is_found() -> None:
    assert "(x: R): result is K: the ranks differ; the worst" in message(test.noisy.default, X)


def test_operand_that_a_rule_wrongly_calls_unread_is_found() -> None:
    text = message(test.ignore.default, X, X)
    assert "(x: R, y: V): result is K: the ranks differ; the worst difference" in text
    assert "(x: R, y: R)" not in text


def test_result_that_a_rule_wrongly_calls_zero_is_found() -> None:
    text = message(test.half_zero.default, X)
    assert "(x: R): result is Z: it is not zero; the worst difference is " in text


def test_rule_that_is_wrong_only_in_the_backward_is_found_through_the_gradient() -> None:
    text = message(test.cube_backward.default, X, X)
    assert (
        "(grad: R, x: Partial): result is Partial: the sum depends on how the operands are split"
        in text
    )
    shown = validate_rule(test.cube.default, X).shown
    assert "(x: R), cotangent Partial: gradient of x is Partial" in shown


def test_gradients_are_taken_with_cotangents_of_the_dual_type() -> None:
    shown = validate_rule(aten.mm.default, torch.ones(2, 3), torch.ones(3, 2), num_ranks=3).shown
    assert "(self: Partial, mat2: R): result is Partial" in shown
    assert "(self: Partial, mat2: R), cotangent R: gradient of self is K" in shown
    assert "(self: Partial, mat2: R), cotangent R: gradient of mat2 is Partial" in shown
    assert "(self: R, mat2: R), cotangent Partial: gradient of self is Partial" in shown


def test_integers_are_drawn_in_the_range_of_the_example() -> None:
    found = validate_rule(test.pick.default, torch.ones(5, 2), torch.tensor([[0, 4], [2, 1]]))
    assert found.shown == (
        "(table: R, ids: R): result is K",
        "(table: Partial, ids: R): result is Partial",
    )
    without = "gradients: Trying to backward through validate_test.pick.default but no autograd"
    assert found.refused[0].startswith(without)
    assert found.refused[1:] == ("(table: Partial, ids: V)",)


def test_function_of_built_in_operations_holds() -> None:
    def attend(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        scores = functional.softmax(q @ k.mT, -1)
        return scores, scores @ k

    found = validate_rule(attend, torch.ones(2, 3), k=torch.ones(4, 3))
    assert "(q: R, k: R), cotangent Partial, Partial: gradient of k is Partial" in found.shown
    assert "(q: Partial, k: R)" in found.refused


def test_scaled_sum_of_three_addends_is_tried_with_all_of_them_partial() -> None:
    found = validate_rule(lambda a, b, c, w: (a + b + c) * w, X, X, X, X, num_ranks=2)
    assert "(a: Partial, b: Partial, c: Partial, w: R): result is Partial" in found.shown


def test_function_that_writes_into_its_arguments_holds() -> None:
    found = validate_rule(lambda x: x.mul_(2), X)
    assert "(x: Partial), cotangent R: gradient of x is K" in found.shown


def test_report_prints_one_claim_a_line() -> None:
    found = validate_rule(aten.relu.default, X, num_ranks=2)
    hold_own(str(found))


def test_operator_without_a_rule_is_an_error() -> None:
    hold_own(message(test.unknown.default, X))


def test_function_that_calls_an_operator_without_a_rule_is_an_error() -> None:
    lines = message(lambda x: unknown(x), X).splitlines()
    hold_own(lines[0])
    assert "validate_test.unknown.default is refused: nothing is known about" in lines[1]


def test_rule_that_refuses_everything_is_an_error() -> None:
    assert "it is never right" in message(test.never.default, X)


def test_packet_of_overloads_is_an_error_that_lists_them() -> None:
    hold_own(message(test.affine, X, W, B))


def test_what_cannot_be_called_is_an_error() -> None:
    assert message(3, X) == "validate_rule takes an operator or a function, not 3."


def test_example_without_a_tensor_is_an_error() -> None:
    hold_own(message(test.rectify.default, 1.0))
    assert "needs an example call" in message(test.rectify.default, torch.ones(0))


def test_function_without_a_tensor_result_is_an_error() -> None:
    assert message(lambda x: 3, X) == "validate_rule: <lambda> returns no tensor."


@pytest.mark.parametrize("num_ranks", [1, (), (2, 1), 2_049, 10**18])
def test_too_few_and_too_many_ranks_are_an_error(num_ranks: int | tuple[int, ...]) -> None:
    hold_own(message(test.rectify.default, X, num_ranks=num_ranks))


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


def test_right_decomposition_is_shown_with_its_types() -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)

    def meaning(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack([x[0] * w, w * x[1]])

    op = operator("scaled", lambda x, w: x * w, meaning, backward=backward)
    found = validate_rule(op, X, SCALE)
    assert "(x: Partial, w: R): result is Partial" in found.shown
    assert "(x: V, w: R), cotangent V: gradient of w is V" not in found.shown  # V claims nothing
    assert "(x: R, w: R), cotangent Partial: gradient of x is Partial" in found.shown
    assert "(x: Partial, w: Partial)" in found.refused
    assert "result is that of the decomposition" in found.shown


def test_decomposition_that_computes_something_else_is_found_where_ones_would_hide_it() -> None:
    op = operator("weighed", lambda x, w: x * w, lambda x, w: x * w.square())
    (*_, claim) = message(op, X, SCALE, num_ranks=2).splitlines()
    assert claim.startswith(
        "  result is that of the decomposition: the operator gives something else; "
        "the worst difference is "
    )


def test_type_that_does_not_hold_of_the_operator_is_found() -> None:
    """The checker sees a sum pass; the operator's own rectifier is no linear function."""
    op = operator("rectified", lambda x, w: x.relu() * w, lambda x, w: x * w)
    lines = message(op, X, SCALE, num_ranks=2).splitlines()
    assert any(
        "(x: Partial, w: R): result is Partial: the sum depends on" in line for line in lines
    )


def test_each_of_several_results_is_compared() -> None:
    op = operator(
        "both", lambda x, w: (x * w, x + w), lambda x, w: (x * w, x - w), "(Tensor, Tensor)"
    )
    (*_, claim) = message(op, X, SCALE, num_ranks=2).splitlines()
    assert claim.startswith("  result[1] is that of the decomposition: ")


def test_another_dtype_is_found() -> None:
    """Shapes and dtypes are compared on fake tensors; a kernel may differ from its fake."""
    op = operator(
        "wide", lambda x, w: (x * w).double(), lambda x, w: x * w, fake=lambda x, w: x * w
    )
    (*_, claim) = message(op, X, SCALE, num_ranks=2).splitlines()
    assert "the dtypes are torch.float64 and torch.float32" in claim


def test_an_operator_of_integers_is_compared() -> None:
    def picked(x: Tensor, w: Tensor) -> Tensor:
        return x[w]

    op = operator("picked", picked, lambda x, w: torch.index_select(x, 0, w))
    found = validate_rule(op, torch.randn(4, 2), torch.tensor([0, 3, 1]))
    assert "result is that of the decomposition" in found.shown
