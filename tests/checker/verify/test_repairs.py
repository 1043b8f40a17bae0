"""Repairs that are printed are right: values and gradients are those of one device."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    ShardMapError,
    ShardTypeError,
    V,
    all_gather,
    all_reduce,
    check_program,
    convert,
    make_mesh,
    reduce_scatter,
    shard_map,
    shift,
)
from shardmap_torch.checker.ir.repairs import Insert, Repair, rejection_of, shortened
from shardmap_torch.optim import adamw
from shardmap_torch.run.trials.comparison import Comparison, RefutedError
from tests.checker.support import repair_trials
from tests.checker.support.rejected import CASES, MESH
from tests.checker.support.repaired import outcome
from tests.support.fuzzing import sized
from tests.support.golden import hold_own, told

pytestmark = pytest.mark.usefixtures("repairs")

RANKS: Final = make_mesh((2, 4), ("dp", "tp"), kind="simulated", simulate="ranks")
ONE: Final = make_mesh((1, 1), ("dp", "tp"), kind="simulated", simulate="ranks")
X: Final = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
W: Final = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()

Case = tuple[Callable[..., Any], P, Any]


def forgotten_sum(x: Tensor, w: Tensor) -> Tensor:
    g: Tensor = torch.func.grad(lambda w: all_reduce((x @ w).square().sum(), "dp", dst=I))(w)
    return w - 0.1 * g


def forgotten_sum_and_second_moment(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    g: Tensor = torch.func.grad(lambda w: all_reduce((x @ w).square().sum(), "dp", dst=I))(w)
    moment = 0.1 * g * g
    return w - 0.1 * g / (moment.sqrt() + 1e-8), moment


def mean_of_parts(x: Tensor, w: Tensor) -> Tensor:
    g: Tensor = torch.func.grad(lambda w: (x @ w).square().mean())(w)
    return w - 0.1 * g


def replicated_use(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).sum(), "dp", dst=I)


def sum_over_an_axis_too_many(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).sum(), ("dp", "tp"), dst=I)


def gathered_without_need(x: Tensor, w: Tensor) -> Tensor:
    return x @ all_gather(w, "tp", dim=1, dst=I)


def converted_twice(x: Tensor, w: Tensor) -> Tensor:
    twice = convert(convert(w, "dp", src=I, dst=R), "dp", src=I, dst=R)
    return x @ twice


INSTEAD: Final[tuple[Case, ...]] = (
    (sum_over_an_axis_too_many, P(), P()),
    (gathered_without_need, P(), P("dp")),
    (converted_twice, P(), P("dp")),
)
"""Collectives of operands that they do not take."""

FORGOTTEN: Final[Case] = (forgotten_sum, P(), P())
MORE: Final[tuple[Case, ...]] = (
    *INSTEAD,
    FORGOTTEN,
    (forgotten_sum_and_second_moment, P(), (P(), P())),
    (mean_of_parts, P(), P()),
    (replicated_use, P(invariant={"dp", "tp"}), P()),
)


TRAINING: Final = (forgotten_sum, forgotten_sum_and_second_moment, mean_of_parts)
"""Bodies that take gradients, and whose results nobody differentiates."""


@cache
def rejection(case: Case) -> ShardTypeError | None:
    body, w_spec, out_specs = case
    mapped = shard_map(body, mesh=MESH, in_specs=(P("dp"), w_spec), out_specs=out_specs)
    try:
        grad = body not in TRAINING
        check_program(mapped, X.clone().requires_grad_(grad), W.clone().requires_grad_(grad))
    except ShardTypeError as error:
        return error
    except ShardMapError:
        return None
    return None


ALL: Final = (*CASES, *MORE)


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", ALL, ids=[case[0].__name__ for case in ALL])
def test_a_printed_repair_gives_what_one_device_gives(case: Case) -> None:
    error = rejection(case)
    body, w_spec, out_specs = case
    repair = None if error is None else rejection_of(error).tried
    if repair is None:
        return
    assert repair.text in str(error)
    specs = P("dp"), w_spec
    grad = body not in TRAINING
    found = outcome(body, RANKS, specs, out_specs, repair, (X, W), grad)
    expected = outcome(body, ONE, specs, out_specs, None, (X, W), grad)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def repair_of(error: ShardTypeError | None) -> Repair:
    assert error is not None
    repair = rejection_of(error).tried
    assert repair is not None, error
    return repair


@pytest.mark.parametrize("case", INSTEAD, ids=[case[0].__name__ for case in INSTEAD])
def test_a_collective_of_another_operand_is_replaced_or_left_out(case: Case) -> None:
    hold_own(repair_of(rejection(case)).text)


def test_the_programs_get_repairs_of_every_sort() -> None:
    errors = [error for error in map(rejection, ALL) if error is not None]
    found = [repair for repair in (rejection_of(error).tried for error in errors) if repair]
    assert len(found) >= 8
    for sort in ("collectives", "replicate", "exits", "gradients", "operands"):
        assert any(getattr(repair, sort) for repair in found), sort


def test_the_check_of_repairs_sees_a_wrong_one() -> None:
    """The repair of an earlier release: to sum the updated weights."""
    body, w_spec, out_specs = FORGOTTEN
    assert repair_of(rejection(FORGOTTEN)).gradients
    wrong = Repair("", exits={0: (Insert("all_reduce", "dp", (("dst", I),)),)})
    with pytest.raises(ShardTypeError):
        outcome(body, RANKS, (P("dp"), w_spec), out_specs, wrong, (X, W), False)


def test_the_gradient_of_a_mean_is_to_be_averaged() -> None:
    repair = repair_of(rejection((mean_of_parts, P(), P())))
    assert repair.text.startswith("all_reduce over 'dp' with dst=I and op='mean' of the gradients")


COUNTS: Final = {"tables": 0, "training steps with a mistake": sized(3, 200)}
"""Numbers of seeds that are tried; tables have none."""


@pytest.mark.parametrize("name", sized([*COUNTS][1:], repair_trials.SOURCES))
def test_every_repair_that_is_printed_is_right(name: str) -> None:
    found = repair_trials.tally(name, COUNTS.get(name, 40))
    assert found.rejections > 0
    assert [note for note in found.notes if note.startswith(("wrong", "refused"))] == []


def test_a_wrong_repair_is_found_out() -> None:
    body, w_spec, out_specs = FORGOTTEN
    mapped = shard_map(body, mesh=MESH, in_specs=(P("dp"), w_spec), out_specs=out_specs)
    (found,) = repair_trials.rejections_of(lambda: check_program(mapped, X, W))
    right = repair_of(found.error)
    (line,) = right.gradients
    wrong = Repair("", gradients={line: Insert("all_reduce", "dp", (("dst", I), ("op", "mean")))})
    assert repair_trials.fate_of(found, right) == repair_trials.RIGHT
    assert repair_trials.fate_of(found, wrong) == repair_trials.WRONG


# ------------------------------------------------------------------- under global strictness


def rooted(x: Tensor, w: Tensor) -> Tensor:
    return (x.T @ x).sqrt().sum() * w.sum()


def divided(x: Tensor, w: Tensor) -> Tensor:
    return x / x.sum(0)


def shared_code(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = x - x.sum(0)
    return x


def shards_of_a_whole(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def sum_of_means(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).square().mean(), "dp", dst=I)


def mean_of_sums(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).square().sum(), "dp", dst=I, op="mean")


def mean_of_scattered_sums(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x.T @ x @ w, "dp", op="mean")


def scattered_along_another_dim(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x.T @ x @ w, "dp").relu() * 2


def cut_along_another_dim(x: Tensor, w: Tensor) -> Tensor:
    return convert(w * 2, "dp", src=I, dst=V, dim=0)


def mean_of_equal(x: Tensor, w: Tensor) -> Tensor:
    mean: Tensor = all_reduce(w * w, "dp", dst=R, op="mean")
    return x @ mean


def mean_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(x @ w, "dp", dst=I, op="mean")


def shifted_equal(x: Tensor, w: Tensor) -> Tensor:
    return x @ shift(w, "dp", 1)


def mean_of_sum(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(all_reduce((x @ w).sum(), "dp", dst=I), ("dp", "tp"), dst=I, op="mean")


def centred(x: Tensor, w: Tensor) -> Tensor:
    x.sub_(x.mean(0))
    return x * 1


def scaled_by_a_view(x: Tensor, w: Tensor) -> Tensor:
    rows = x.view(-1, 2)
    rows.mul_(3.0)
    return x + 0


def scaled_by_what_may_be_a_copy(x: Tensor, w: Tensor) -> Tensor:
    x.contiguous().mul_(3.0)
    return x + 0


def set_by_an_index(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = y.mean(0)[0]
    return y.relu()


def written_by_out(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    torch.mul(y.mean(0), 2.0, out=y[0])
    return y.relu()


def written_after_a_gather(x: Tensor, w: Tensor) -> Tensor:
    v = w * 1
    y = all_gather(v, "dp", dim=1, dst=I)
    y.mul_(2.0)
    return x @ v


WRITING: Final = (
    *(centred, scaled_by_a_view, scaled_by_what_may_be_a_copy, set_by_an_index),
    *(written_by_out, written_after_a_gather),
)


@pytest.mark.parametrize("body", WRITING, ids=lambda body: body.__name__)
def test_no_repair_leaves_a_write_to_a_copy(body: Callable[..., Any]) -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")
    specs = P("dp"), P()
    mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("dp"), check="global")
    with pytest.raises(ShardTypeError) as error:
        mapped(X.clone(), W)
    assert "Tried, and accepted" not in str(error.value)


def test_a_repair_names_what_it_changes_as_the_body_does() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")

    def own(x: Tensor, bias: Tensor) -> Tensor:
        return all_reduce(x.sum(0) + bias, "dp", dst=I)

    with told(ShardTypeError):
        shard_map(own, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P(), check="global")(X, W[0])


def test_a_repair_with_which_numbers_differ_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts accept it; whatever they miss, its gradients are compared before it is printed."""

    def refute(comparison: Comparison) -> None:
        raise RefutedError("the gradient of x differs")

    monkeypatch.setattr(Comparison, "run", refute)
    rejection.cache_clear()
    error = rejection(FORGOTTEN)
    rejection.cache_clear()
    assert error is not None
    assert rejection_of(error).tried is None
    assert "Tried" not in str(error)


def test_a_repair_of_a_spec_is_checked_and_compared_with_the_gradient_of_that_spec() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks")

    def rows(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(x @ w, "tp", dst=I)

    specs = P("dp", "tp"), P("tp")
    with told(ShardTypeError):
        shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P("tp"))(X.clone().requires_grad_(), W)


def test_a_repair_is_printed_without_numbers_where_they_cannot_tell_but_in_own_backwards() -> None:
    def scaled(x: Tensor, w: Tensor, function: Any) -> Any:
        return function(x) * (x @ w).sum().item()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    texts = []
    for function in (torch.sin, Twice.apply):
        body = partial(scaled, function=function)
        with pytest.raises(ShardTypeError) as error:
            shard_map(body, mesh=MESH, in_specs=(P("dp"), P()), out_specs=P("dp"))(
                X.clone().requires_grad_(), W
            )
        texts.append(str(error.value))
    assert texts[0].splitlines()[-1].startswith("Tried, and accepted also by check='global': ")
    assert "Tried" not in texts[1]


INSERTED: Final[tuple[Case, ...]] = (
    (rooted, P(), P()),
    (divided, P(), P("dp")),
    (shared_code, P(), P("dp")),
    (shards_of_a_whole, P(), P()),
    (mean_of_equal, P(), P("dp")),
    (shifted_equal, P(), P("dp")),
    (mean_of_rows, P(), P()),
    (sum_of_means, P(), P()),
    (mean_of_sums, P(), P()),
    (mean_of_scattered_sums, P(), P("dp")),
    (scattered_along_another_dim, P(), P(None, "dp")),
    (cut_along_another_dim, P(), P(None, "dp")),
)
"""Rejected by global strictness, and repaired by a collective."""


@pytest.mark.parametrize("case", INSERTED, ids=[case[0].__name__ for case in INSERTED])
def test_a_collective_is_inserted_where_types_do_not_match(case: Case) -> None:
    body, w_spec, out_specs = case
    specs = P("dp"), w_spec
    mapped = shard_map(body, mesh=MESH, in_specs=specs, out_specs=out_specs, check="global")
    args = X.abs().requires_grad_(), W.clone().requires_grad_()
    (found,) = repair_trials.rejections_of(lambda: check_program(mapped, *args))
    repair = repair_of(found.error)
    hold_own(repair.text)
    assert repair_trials.fate_of(found, repair) == repair_trials.RIGHT


def test_the_gradients_of_a_step_are_summed_though_its_inputs_require_gradients() -> None:
    def step(w: tuple[Tensor, Tensor], x: Tensor) -> Any:
        def loss(w: tuple[Tensor, Tensor]) -> Tensor:
            return all_reduce((x @ w[0] + w[1]).square().mean(), "dp", op="mean", dst=I)

        return optimizer.update(w, torch.func.grad(loss)(w), optimizer.init(w))

    optimizer = adamw(0.1)
    ws = W.clone().requires_grad_(), torch.zeros(4, dtype=W.dtype, requires_grad=True)
    mapped = shard_map(step, mesh=MESH, in_specs=(P(), P("dp")), out_specs=P())
    (found,) = repair_trials.rejections_of(lambda: check_program(mapped, ws, X))
    repair = repair_of(found.error)
    assert repair.text.startswith("all_reduce over 'dp' with dst=I of the gradients taken at")
    assert repair_trials.fate_of(found, repair) == repair_trials.RIGHT
    assert len(re.findall(r"tensor\d: .*, Partial, .*, and 1 more\n", str(found.error))) == 2


def logged(x: Tensor, w: Tensor) -> Tensor:
    loss = (x @ w).square().mean()
    return all_reduce(loss, "dp", op="mean", dst=I) * (loss.item() > 1)


def test_the_number_of_a_mean_is_to_be_averaged() -> None:
    repair = repair_of(rejection((logged, P(), P())))
    assert repair.text.startswith(
        "all_reduce(loss, 'dp', dst=I, op='mean') in place of loss in item"
    )


def test_no_repair_is_printed_that_leaves_the_division_of_a_mean() -> None:
    mapped = shard_map(mean_of_sum, mesh=MESH, in_specs=(P("dp"), P()), out_specs=P())
    (found,) = repair_trials.rejections_of(lambda: check_program(mapped, X, W))
    repair = repair_of(found.error)
    assert repair.text.startswith("leave out all_reduce at")
    assert repair_trials.fate_of(found, repair) == repair_trials.RIGHT


def again(x: Tensor, w: Tensor) -> Tensor:
    return x @ convert(convert(w, "tp", src=I, dst=R), "tp", src=I, dst=R)


def from_another(x: Tensor, w: Tensor) -> Tensor:
    return x * convert(convert(w.sum(), "tp", src=I, dst=R), "tp", src=I, dst=Partial)


def largest_of_equal(x: Tensor, w: Tensor) -> Tensor:
    return x * all_reduce(w.sum(), "tp", dst=I, op="max")


@pytest.mark.parametrize("body", [again, from_another, largest_of_equal])
def test_a_collective_of_equal_values_gets_the_advice_that_suits_it(body: Any) -> None:
    hold_own(str(rejection((body, P(invariant={"tp"}), P("dp")))))


# ----------------------------------------------------------------------------- long messages


def unreduced(x: Tensor, w: Tensor) -> dict[str, Tensor]:
    def loss(ws: dict[str, Tensor]) -> Tensor:
        total = torch.stack([(x @ w).square().sum() for w in ws.values()]).sum()
        return all_reduce(total, "dp", dst=I)

    found: dict[str, Tensor] = torch.func.grad(loss)({f"w{i}": w + i for i in range(24)})
    return found


def test_one_cause_is_one_paragraph_and_everything_is_in_findings() -> None:
    error = rejection((unreduced, P(), P()))
    assert error is not None
    hold_own(str(error))
    assert len(error.findings) == 24
    assert {each.split(":")[0][2:] for each in error.findings} == {
        f"out['w{i}']" for i in range(24)
    }


@pytest.mark.parametrize("spec", [P(None, None, "dp"), P("other"), P("tp")])
def test_an_error_of_three_hundred_leaves_has_at_most_forty_lines(spec: P) -> None:
    leaves = {f"w{i}": torch.ones(6, 4) for i in range(300)}
    with told(ShardMapError):
        shard_map(lambda w: w, mesh=MESH, in_specs=(spec,), out_specs=spec)(leaves)


def test_a_message_has_at_most_forty_lines() -> None:
    error = shortened(ShardTypeError("\n".join(map(str, range(100)))))
    assert len(str(error).splitlines()) == 40
    assert str(error).endswith("... and 61 more lines")
    assert error.findings[0].splitlines()[-1] == "99"
