"""Promises of a `local_region`, compared with the same function on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    Row,
    ShardTypeError,
    SpecError,
    all_reduce,
    assert_type,
    axis_index,
    axis_size,
    local_region,
    register_rule,
    validate_rule,
)
from tests.run.trials.support.regions import TABLE, TOKENS, lookup, random, ring, weigh
from tests.support.golden import hold_own


@torch.library.custom_op("validate_test::wrong_relu", mutates_args=())
def rectify(x: Tensor) -> Tensor:
    return x.relu()


rectify.register_fake(lambda x: torch.empty_like(x))
rectify.register_autograd(lambda ctx, grad: grad)
register_rule(torch.ops.validate_test.wrong_relu.default, Row(linear=(("x",),)))


def message(*args: Any, **kwargs: Any) -> str:
    """The text of the error that `validate_rule` raises."""
    with pytest.raises((ShardTypeError, SpecError)) as caught:
        validate_rule(*args, **kwargs)
    return str(caught.value)


def test_right_lookup_is_shown_forward_and_backward() -> None:
    found = validate_rule(lookup(), TABLE, TOKENS)
    assert found.shown == ("result is P(partial={'tp'})", "gradient of argument[0], P('tp')")


def test_region_that_forgets_the_mask_is_found() -> None:
    head, result, gradient = message(lookup(mask=False), TABLE, TOKENS).splitlines()
    assert head == "validate_rule: rows: 2 claims do not hold:"
    assert result.startswith("  result is P(partial={'tp'}): with ")
    assert "the worst difference is " in gradient
    assert gradient.startswith("  gradient of argument[0], P('tp'): with ")


def test_region_that_forgets_the_offset_is_found() -> None:
    assert "result is P(partial={'tp'}): with " in message(lookup(offset=False), TABLE, TOKENS)


def test_region_whose_backward_alone_is_wrong_is_found() -> None:
    head, gradient = message(weigh, random(6)).splitlines()
    assert head == "validate_rule: weigh: 1 claim does not hold:"
    assert gradient.startswith(
        "  gradient of argument[0], P('cp'): with 2 ranks it is not what it is with one; "
    )


def test_a_ring_is_shown_to_be_the_product_on_one_device() -> None:
    assert len(validate_rule(ring(-1), random(6, 4), random(4, 6), num_ranks=3).shown) == 3


def test_a_ring_that_goes_round_the_other_way_is_found() -> None:
    found = message(ring(1), random(6, 4), random(4, 6), num_ranks=3)
    assert "result is P(None, 'tp'): with 3 ranks it is not what it is with one" in found


def test_argument_that_is_a_sum_enters_as_random_addends() -> None:
    @local_region(in_types=(P(partial={"tp"}),), out_types=P(partial={"tp"}))
    def rectified(x: Tensor) -> Tensor:  # right where the first rank has the whole sum
        y: Tensor = rectify(x)
        return y

    @local_region(in_types=(P(partial={"tp"}),), out_types=P())
    def finish(x: Tensor) -> Tensor:
        return all_reduce(assert_type(x, {"tp": Partial}), "tp", dst=I)

    assert len(validate_rule(finish, random(4)).shown) == 2
    assert "result is P(partial={'tp'}): with" in message(rectified, random(4))


def test_axes_that_no_type_of_an_argument_mentions_are_typed_by_the_checker() -> None:
    @local_region(in_types=(P(), P("tp")), out_types=P("tp"))
    def scaled(scale: Tensor, x: Tensor) -> Tensor:
        return scale * x

    assert validate_rule(scaled, random(1), random(6)).shown[1:] == (
        "gradient of argument[0], P()",
        "gradient of argument[1], P('tp')",
    )


def test_two_axes_in_one_dim_and_trees_and_static_arguments() -> None:
    @local_region(
        in_types=({"w": P(("a", "b")), "n": None}, None), out_types=(P(("a", "b")), P("a"))
    )
    def region(params: dict[str, Any], power: int) -> tuple[Tensor, Tensor]:
        w = params["w"] ** power
        return w, all_reduce(w.sum(), "b", dst=I).unsqueeze(0)

    text = message(region, {"w": random(36), "n": "name"}, 2, num_ranks=(2,))
    assert "result[1] is P('a'): with 2 x 2 ranks it is not what it is with one: shapes" in text
    assert "result[0]" not in text


def test_region_that_the_checker_refuses_is_refused_here_too() -> None:
    @local_region(in_types=(P("tp"),), out_types=P())
    def region(x: Tensor) -> Tensor:
        return x.sum()

    assert "'tp'" in message(region, random(6))


def test_dims_that_do_not_divide_are_an_error_with_the_arithmetic() -> None:
    hold_own(message(lookup(), random(10, 3), TOKENS, num_ranks=4))


def test_arguments_that_do_not_fit_the_types_are_an_error() -> None:
    hold_own(message(lookup(), TABLE))

    @local_region(in_types=(None,), out_types=P("tp"))
    def region(x: Tensor) -> Tensor:
        return x

    hold_own(message(region, random(2)), 2)


def test_not_a_number_on_some_ranks_is_found() -> None:
    @local_region(in_types=(P("tp"),), out_types=P("tp"))
    def region(x: Tensor) -> Tensor:
        return x.masked_fill(axis_index("tp") > 0, torch.nan)

    assert "result is P('tp'): with 2 ranks it is not what it is with one in what is" in message(
        region, random(6)
    )


def test_integers_that_are_a_sum_are_an_error() -> None:
    @local_region(in_types=(P(partial={"tp"}),), out_types=P(partial={"tp"}))
    def region(x: Tensor) -> Tensor:
        return x

    hold_own(message(region, TOKENS))


def test_gradient_that_flows_on_some_meshes_only_is_found() -> None:
    @local_region(in_types=(P("tp"), P("tp")), out_types=(P("tp"), P("tp")))
    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (2 * x.detach() if axis_size("tp") > 1 else 2 * x), 3 * y

    lines = message(region, random(6), random(6)).splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["  gradient of argument[0], P('tp')"]


def test_region_whose_types_name_no_axis_is_an_error() -> None:
    @local_region(in_types=(P(),), out_types=P())
    def region(x: Tensor) -> Tensor:
        return x

    assert message(region, random(2)) == "validate_rule: region: its types name no axis."
