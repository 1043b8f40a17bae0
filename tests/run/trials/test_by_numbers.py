"""check="global" where one device has no such steps: tried with random numbers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    ShardTypeError,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    convert,
    explain,
    lax,
    make_mesh,
    ppermute,
    shard_map,
    shift,
    value_and_grad,
)
from shardmap_torch.checker.verify import repairing
from shardmap_torch.mesh import Mesh
from shardmap_torch.run.trials import by_numbers
from tests.programs.support.everywhere import run_on
from tests.run.trials.support.programs import CASES, Case, Mutant
from tests.support.fuzzing import sampled
from tests.support.golden import told
from tests.support.pool import Gloo

WRONG: Final = [(case, wrong) for case in CASES for wrong in case.wrong]
RING: Final = next(case for case in CASES if case.body.__name__ == "ring_attention")


def named(value: object) -> str | None:
    return value.body.__name__ if isinstance(value, Case) else None


def computed(f: Callable[..., Tensor], arguments: list[Tensor]) -> list[Tensor]:
    """Computes the result, and the gradients of a function of it."""
    y = f(*arguments)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    return [y, *torch.autograd.grad(y.sin().sum(), arguments)]


def same(mine: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_right_programs_pass_without_a_region_and_equal_one_device(case: Case) -> None:
    arguments = case.arguments(torch.float64)
    same(computed(case.mapped(), arguments), computed(case.one_device(), arguments))


@pytest.mark.sample(4)
@pytest.mark.sample(12)
@pytest.mark.parametrize(("case", "wrong"), WRONG, ids=named)
def test_wrong_programs_that_are_well_typed_are_refused(case: Case, wrong: Mutant) -> None:
    with pytest.raises(ShardTypeError, match="ried with numbers over"):  # being well-typed
        check_program(case.mapped(wrong), *case.arguments())


def on_each_mesh(mesh: Mesh) -> None:
    for case in CASES:
        if set(case.mesh[1]) == set(mesh.axis_names):
            arguments = case.arguments(torch.float64)
            same(computed(case.on(mesh), arguments), computed(case.one_device(), arguments))
            with pytest.raises(ShardTypeError, match="ried with numbers over"):
                case.on(mesh, case.wrong[-1])(*arguments)


@pytest.mark.sample(1)
@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_processes_run_them_and_agree_on_the_verdict(case: Case, gloo: Gloo) -> None:
    names = case.mesh[1]
    run_on("gloo", on_each_mesh, gloo, (1,) * (len(names) - 1) + (2,), names)


X, W = torch.randn(6, 4), torch.randn(4, 4)
LEARNED: Final = X.clone().requires_grad_(), W.clone().requires_grad_()

Change = Callable[[Tensor], Tensor]

EQUAL: Final = P()


def gathered(x: Tensor, w: Tensor, change: Change = lambda x: x) -> Tensor:
    """Adds up x @ w over all rows, [n/r, d] each, which go round and are changed in each hop."""
    total = x.new_zeros(w.shape[1])
    for step in range(axis_size("cp")):
        if step:
            x = change(shift(x, "cp", 1))
        total = total + (x @ w).sum(0)
    return all_reduce(total, "cp", dst=I, op="mean")


def mapped(body: Callable[..., Any], out: Any = EQUAL, **options: Any) -> Callable[..., Any]:
    mesh = make_mesh((3,), ("cp",), kind="simulated")
    keywords = {"mesh": mesh, "in_specs": (P("cp"), P()), "out_specs": out, "check": "global"}
    f: Callable[..., Any] = shard_map(body, **(keywords | options))
    return f


def around(change: Change) -> Callable[..., Any]:
    return mapped(lambda x, w: gathered(x, w, change))


class Halved(torch.autograd.Function):
    """The identity, whose backward is wrong for large gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.where(grad.abs() > 1e9, grad / 2, grad)


PIECES: Final[list[tuple[Change, str]]] = [
    (torch.relu, "relu"),
    (torch.abs, "abs"),
    (lambda m: m.clamp(max=0.0), "clamp"),
    (lambda m: torch.where(m > 0, m, -m), "gt"),
    (lambda m: torch.maximum(m, torch.zeros_like(m)), "maximum"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("change", "name"), PIECES)
def test_what_all_ranks_decide_alike_but_for_rare_numbers_is_refused(
    change: Change, name: str
) -> None:
    """Each rank's number is its own, and has the sign of the same large one."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(change(x.mean() + 1e3 * w.sum()), "cp", dst=I, op="mean")

    with pytest.raises(ShardTypeError, match=f"{name} is not what it is on one device"):
        check_program(mapped(body), X, W)


SMALLER: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "gt": lambda own, large: torch.where(own > large, large, own),
    "clamp": lambda own, large: own.clamp(max=large),
    "minimum": lambda own, large: torch.minimum(own, large.expand(2)),
    "sort": lambda own, large: torch.stack([own, large.expand(2)]).sort(0).values[0],
    "topk": lambda own, large: torch.stack([own, large.expand(2)]).topk(1, 0, largest=False)[0],
}


@pytest.mark.sample(2, "sort")
@pytest.mark.parametrize("name", SMALLER)
def test_numbers_of_which_each_rank_has_others_with_the_same_sum_differ(name: str) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        own = torch.stack([x.mean(), -x.mean()])
        return all_reduce(SMALLER[name](own, 1e3 * w.sum()).sum(), "cp", dst=I, op="mean")

    with pytest.raises(ShardTypeError, match=f"{name} is not what it is on one device"):
        check_program(mapped(body), X, W)


JOINS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "columns": lambda x, own: torch.cat([x, own.expand(len(x), 1)], 1),
    "a dim": lambda x, own: torch.stack([x, own.expand(x.shape)]),
}


@pytest.mark.parametrize("name", JOINS)
def test_a_condition_has_to_be_met_in_each_part_of_its_entries(name: str) -> None:
    """The others are right; so would be this one, if its sign were not that of a large one."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(JOINS[name](x @ w, x.mean() + 1e3 * w.sum()))
        return all_reduce(y.mean(), "cp", dst=I, op="mean")

    with pytest.raises(ShardTypeError, match=r"(cat|stack) is not what it is on one device"):
        check_program(mapped(body), X, W)


SATURATED: Final[dict[str, Change]] = {
    "softplus": functional.softplus,
    "silu": functional.silu,
    "tanh": lambda m: m * m.tanh(),
    "logsumexp": lambda m: torch.stack([m, -m]).logsumexp(0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SATURATED)
def test_what_a_large_number_hides_is_seen_where_arguments_are_of_other_sizes(name: str) -> None:
    """Each rank's number is its own, and lost in a large one, of which it is nearly linear."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        own = (x @ w).tanh().square().mean()
        return all_reduce(SATURATED[name](own + 1e3 * w.sum()), "cp", dst=I, op="mean")

    with pytest.raises(ShardTypeError, match="is not what it is on one device"):
        check_program(mapped(body), X, W)


COUNTED: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "gt": lambda n, x: torch.where(n > 224, x, -x),
    "clamp": lambda n, x: (n - 224).clamp(0, 1) * x,
}


@pytest.mark.parametrize("name", COUNTED)
def test_integers_of_which_each_rank_has_others_are_told_apart_too(name: str) -> None:
    """On one device the sum may be 36, and that of a rank 18: in rare draws alone this matters."""

    def body(large: Tensor, ids: Tensor, x: Tensor) -> Tensor:
        n = (ids % 4).sum() + 64 * (large % 8)
        return all_reduce(COUNTED[name](n, x).sum(), "cp", dst=I)

    mesh = make_mesh((2,), ("cp",), kind="simulated")
    f = mapped(body, mesh=mesh, in_specs=(P(), P("cp"), P("cp")))
    with pytest.raises(ShardTypeError, match=f"the condition of {name} is the same on all ranks"):
        check_program(f, torch.tensor(3), torch.arange(12), X[0])


BIAS: Final = torch.zeros(4)
NEVER: Final = "on the ranks the condition of {} is never {} for random inputs, at test_by"
UNSEEN: Final[dict[str, tuple[Change, str]]] = {
    "a threshold": (lambda x: torch.where(x > 1e6, 0.0, x), NEVER.format("gt", "true")),
    "a limit": (lambda x: x.clamp(-1e6), NEVER.format("clamp", "false")),
    "in place": (lambda x: x.clone().clamp_(-1e6), NEVER.format("clamp", "false")),
    "a smooth threshold": (
        lambda x: x * torch.sigmoid(100 * (1e6 - x)),
        NEVER.format("sigmoid", "true"),
    ),
    "a softmax of one": (
        lambda x: x * torch.softmax(torch.stack([0 * x + 1e6, x]), 0)[0],
        NEVER.format("_softmax", "true"),
    ),
    "underflow": (lambda x: x + torch.exp(-1e6 * (1 + x * x)), NEVER.format("exp", "true")),
    "a sum's logarithm": (
        lambda x: x + torch.logaddexp(x, torch.full_like(x, 1e6)) / 1e6 - 1,
        NEVER.format("logaddexp", "true"),
    ),
    "a logarithm of a sum": (
        lambda x: x + torch.logsumexp(torch.stack([x, torch.full_like(x, 1e6)]), 0) / 1e6 - 1,
        NEVER.format("logsumexp", "true"),
    ),
    "a gradient's threshold": (Halved.apply, NEVER.format("gt", "true")),
    "a branch": (
        lambda x: x * 2 if all_reduce(x.sum(), "cp", dst=I).item() > 1e9 else x,
        "item may have pieces that random inputs do not reach, at test_by",
    ),
    "a cast": (lambda x: x.long().float(), "a cast makes torch.int64 of torch.float64"),
    "a cast to booleans": (lambda x: x * (x.detach() + 1.5).bool(), NEVER.format("ne", "true")),
    "random numbers": (functional.dropout, "bernoulli draws random numbers"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("what", UNSEEN)
def test_what_random_numbers_do_not_see_is_refused_at_its_line(what: str) -> None:
    change, text = UNSEEN[what]
    with pytest.raises(ShardTypeError) as caught:
        check_program(around(change), *(LEARNED if "gradient" in what else (X, W)))
    assert "Nor can it be tried with numbers over 'cp': " in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * (3 if x.dtype == torch.float32 else 1),
        lambda x: x * torch.tensor(3.0 if x.dtype == torch.float32 else 1.0),
    ],
)
def test_what_a_body_does_with_the_dtype_of_its_arguments_is_tried(change: Change) -> None:
    check_program(around(change), X.double(), W.double())
    with pytest.raises(ShardTypeError, match="it is another program than on one device"):
        check_program(around(change), X, W)


def test_gradients_that_a_body_takes_through_chosen_places_are_tried() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            y = torch.searchsorted(x.sort(-1)[0], x).to(w.dtype)
            return all_reduce((y @ w).square().sum(), "cp", dst=I)

        g = all_reduce(torch.func.grad(loss)(w), "cp", dst=I)
        return torch._foreach_mul([g, g], g.norm())[0]

    alone = make_mesh((1,), ("cp",), kind="simulated")
    torch.testing.assert_close(mapped(body)(X, W), mapped(body, mesh=alone)(X, W))


def test_tensors_outside_that_share_memory_are_drawn_one_by_one() -> None:
    """They are another program where one is taken for the other."""
    table = torch.randn(4, 4)
    turned = table.T

    def body(x: Tensor, w: Tensor, is_wrong: bool) -> Tensor:
        return gathered(x, w @ table) * (turned if is_wrong and axis_size("cp") > 1 else table)[0]

    check_program(mapped(body, in_specs=(P("cp"), P(), None)), X, W, False)
    with pytest.raises(ShardTypeError, match="it is another program than on one device"):
        check_program(mapped(body, in_specs=(P("cp"), P(), None)), X, W, True)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda y: 0 * y, "out is zero for all random inputs"),
        (lambda y: y / (y - y), "results are infinite or not a number for random inputs"),
        (lambda y: axis_size("cp") * y, "on the ranks and"),
        (lambda y: y + 1e-6 * axis_size("cp"), "on the ranks and"),
    ],
)
def test_results_have_to_be_finite_other_than_zero_and_equal(end: Change, text: str) -> None:
    with pytest.raises(ShardTypeError, match=text):
        check_program(mapped(lambda x, w: end(gathered(x, w))), X, W)


def test_tensors_outside_are_drawn_like_arguments() -> None:
    check_program(mapped(lambda x, w: gathered(x, w) * BIAS), X, W)
    with pytest.raises(ShardTypeError, match="it is another program than on one device"):
        check_program(around(lambda x: x + BIAS), X, W)  # right for zeros alone


def test_small_limits_are_reached_by_small_numbers() -> None:
    for eps in (1e-12, 1e-6):

        def body(x: Tensor, w: Tensor, eps: float = eps) -> Tensor:
            return functional.normalize(gathered(x, w), dim=0, eps=eps)

        check_program(mapped(body), X, W)


def test_an_error_behind_the_first_one_is_not_shown() -> None:
    zero = torch.zeros(())

    def body(x: Tensor, w: Tensor) -> Tensor:
        return gathered(torch.heaviside(shift(x, "cp", 1), zero), w)  # which has no derivative

    with pytest.raises(ShardTypeError, match="is not what it is on one device"):
        check_program(mapped(body), LEARNED[0], W)


def test_what_is_defined_for_positive_numbers_only_is_tried_with_these() -> None:
    check_program(mapped(lambda x, w: gathered(x.log(), w)), X.abs(), W)


def test_what_is_defined_for_negative_numbers_too_is_tried_with_these() -> None:
    """Beside an argument of which that is not so."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return gathered(x if axis_size("cp") == 1 else x.square().sqrt(), w.log())

    with pytest.raises(ShardTypeError, match="it is another program than on one device"):
        check_program(mapped(body), X, W.abs())


def test_other_results_than_tensors_are_compared() -> None:
    f = mapped(lambda x, w: (gathered(x, w), axis_size("cp")), (P(), None))
    with pytest.raises(ShardTypeError, match=r"out\[1\] is 3 on the ranks and 1 on one device"):
        check_program(f, X, W)
    f = mapped(lambda x, w: (gathered(x, w), 1 if axis_size("cp") > 1 else None), (P(), None))
    with pytest.raises(ShardTypeError, match=r"on one device there is no result out\[1\]"):
        check_program(f, X, W)


def test_low_precision_is_tried_in_64_bits() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y = gathered(x.float() + torch.arange(4) * 0.5, w.float() @ torch.eye(4))
        return torch.maximum(y, torch.full_like(y, torch.finfo(y.dtype).min)).to(x.dtype)

    verdict = check_program(mapped(body), X.bfloat16(), W.bfloat16())
    assert "within" in verdict.tried
    assert float(verdict.tried.splitlines()[0].split()[-1]) < 1e-12


def test_ids_are_drawn_from_all_that_they_look_up() -> None:
    specs = (P(), P("cp"), P())

    def body(table: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return gathered(functional.embedding(ids, table), w)

    def others_changed(table: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        rows = torch.cat([table[:2], table[2:].flip(0)]) if axis_size("cp") > 1 else table
        return gathered(functional.embedding(ids, rows), w)

    arguments = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 1, 0]), W
    check_program(mapped(body, in_specs=specs), *arguments)
    with pytest.raises(ShardTypeError, match="ried with numbers over 'cp'"):
        check_program(mapped(others_changed, in_specs=specs), *arguments)


LABELS: Final = torch.tensor([0, 3, -100, 1, -1, 2])


VALID: Final[tuple[Change, ...]] = (
    lambda labels: labels >= 0,
    lambda labels: (labels != -100) & (labels != -1),
    lambda labels: ~(labels < 0),
    lambda labels: labels > -1,
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("total", [True, False])
@pytest.mark.parametrize("is_valid", sampled(VALID, *VALID[:2]))
def test_integers_are_drawn_beyond_the_limits_of_conditions(is_valid: Change, total: bool) -> None:
    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        logits = x @ w + convert(gathered(x, w), "cp", src=I, dst=R)
        valid = is_valid(labels)
        rows = logits.log_softmax(-1).gather(1, torch.where(valid, labels, 0)[:, None])[:, 0]
        if total:
            return all_reduce((rows * valid).sum(), "cp", dst=I) / all_reduce(
                valid.sum(), "cp", dst=I
            )
        return all_reduce((rows * valid).sum() / valid.sum(), "cp", op="mean", dst=I)

    f = mapped(loss, in_specs=(P("cp"), P(), P("cp")))
    if total:
        assert check_program(f, X, W, LABELS).tried
    else:
        with pytest.raises(ShardTypeError, match="ried with numbers over 'cp'"):
            check_program(f, X, W, LABELS)


LIMITED: Final[tuple[Change, ...]] = (
    Tensor.abs,
    lambda i: i.clamp(min=0),
    Tensor.relu,
    Tensor.sign,
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", sampled(LIMITED, *LIMITED[:2]))
def test_integers_have_to_be_on_both_sides_of_a_limit(change: Change) -> None:
    def body(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        rows = gathered(x + functional.embedding(ids, w), w)
        return rows + all_reduce(change(ids).sum(), "cp", dst=I)

    with pytest.raises(ShardTypeError, match="is never true for random inputs"):
        check_program(mapped(body, in_specs=(P("cp"), P(), P("cp"))), X, W, LABELS.abs() % 4)


def test_ids_are_often_equal_and_rows_that_are_not_learned_are_among_them() -> None:
    table = torch.randn(5000, 4).requires_grad_()

    def mapped_on(ranks: dict[str, Any], one: dict[str, Any]) -> Callable[..., Any]:
        def body(table: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            how = ranks if axis_size("cp") > 1 else one
            return gathered(functional.embedding(ids, table, **how), w)

        return mapped(body, in_specs=(P(), P("cp"), P()))

    padded: dict[str, Any] = {"padding_idx": 4321}
    arguments = table, LABELS.abs(), W
    assert check_program(mapped_on(padded, padded), *arguments).tried
    for wrong in ({}, {"padding_idx": 4321, "scale_grad_by_freq": True}):
        with pytest.raises(ShardTypeError, match=r"the gradient of table is"):
            check_program(mapped_on(wrong, padded), *arguments)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: functional.prelu(x, x[0, :1].detach() * 0 + 0.1),
        lambda x: functional.smooth_l1_loss(x, x.sin(), reduction="none"),
        lambda x: functional.huber_loss(x, x.sin(), reduction="none"),
        lambda x: functional.binary_cross_entropy_with_logits(x, x.sin(), reduction="none"),
        lambda x: functional.kl_div(x.log_softmax(1), x.sin().softmax(1), reduction="none"),
        lambda x: torch.fft.irfft(torch.fft.rfft(x) ** 2),
        lambda x: functional.interpolate(x[None], scale_factor=2, mode="linear")[0, :, 1::2],
        lambda x: x.cumprod(1) + x.topk(0, 1).values.sum(),
        lambda x: torch.where((x.detach() > 0).long().bool(), x, x.sin()),
    ],
)
def test_everyday_functions_are_tried(change: Change) -> None:
    f = mapped(lambda x, w: gathered(change(x), w))
    assert check_program(f, LEARNED[0], W).tried
    g = mapped(lambda x, w: gathered(change(x.detach() if axis_size("cp") > 1 else x) + x, w))
    with pytest.raises(ShardTypeError, match="the gradient of x is"):
        check_program(g, LEARNED[0], W)


@pytest.mark.parametrize("pixels", [(), (1, 1)])
def test_sums_of_losses_may_ignore_targets_if_one_device_ignores_the_same(pixels: Any) -> None:
    def loss(x: Tensor, w: Tensor, labels: Tensor, mean: str = "sum") -> Tensor:
        logits = x @ w + convert(gathered(x, w), "cp", src=I, dst=R)
        logits, labels = (each.reshape(*each.shape, *pixels) for each in (logits, labels))
        reduction = mean if axis_size("cp") == 1 else "sum"
        sums = functional.cross_entropy(logits, labels, reduction=reduction)
        count = labels.numel() if reduction == "sum" else 1
        return all_reduce(sums / count, "cp", op="mean", dst=I)

    specs = {"in_specs": (P("cp"), P(), P("cp"))}
    assert check_program(mapped(loss, **specs), X, W, LABELS.abs() % 4).tried
    with pytest.raises(ShardTypeError, match="losses whose targets may be ignored are others"):
        check_program(mapped(partial(loss, mean="mean"), **specs), X, W, LABELS.abs() % 4)


@pytest.mark.parametrize("scale", [1, 3])
def test_gradients_that_a_body_takes_itself_are_results(scale: int) -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = value_and_grad(lambda w: gathered(x, w).square().sum())(w)
        count = axis_size("cp") if scale > 1 else 1
        return loss, w - 0.1 * all_reduce(grad, "cp", dst=I) / count

    for arguments in ((X, W), (X, LEARNED[1])):
        f = mapped(step, (P(), P()))
        if scale == 1:
            assert check_program(f, *arguments).tried
        else:
            with pytest.raises(ShardTypeError, match=r"out\[1\] is .* on the ranks"):
                check_program(f, *arguments)


def test_other_axes_are_proven_and_keep_their_errors() -> None:
    mesh = make_mesh((2, 3), ("dp", "cp"), kind="simulated")
    specs = P("cp", "dp"), P("dp")

    def right(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(gathered(x, w), "dp", dst=I)

    def bias(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(gathered(x, w) + 1, "dp", dst=I)

    def tried(body: Callable[..., Tensor], check: Any) -> str:
        f = mapped(body, mesh=mesh, in_specs=specs, check=check)
        return check_program(f, X, W).tried

    assert "over 'cp': in 7 trials 3 ranks" in tried(right, "global")
    assert "over 'cp': in 7 trials 6 ranks" in tried(right, {"cp": "global"})
    assert not tried(right, {"dp": "global"})
    for check in ("global", {"dp": "global"}):
        with pytest.raises(ShardTypeError, match="counted once per rank"):
            tried(bias, check)


def test_a_report_names_trials_and_the_lines_that_made_them_necessary() -> None:
    text = str(explain(mapped(gathered), X, W))
    head, tried, line = text.splitlines()[-3:]
    assert head == "global: the same program on one device"
    assert tried.startswith(
        "  tried with numbers over 'cp': in 7 trials 3 ranks had the results and gradients of one "
    )
    assert line.startswith("    ppermute('cp', V -> V)  # test_by_numbers.py:")


@pytest.mark.parametrize(
    ("count", "rows", "ranks", "smaller"),
    [(4, 8, 4, None), (8192, 3 * 8192, 4, "(12, 4)"), (4, 1 << 18, 4, "(16384, 4)")],
)
def test_a_large_program_is_tried_at_smaller_sizes(
    count: int, rows: int, ranks: int, smaller: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_numbers, "_WORK", by_numbers._WORK >> 8)

    def once(x: Tensor, w: Tensor) -> Tensor:
        other = shift(x, "cp", 1)
        return all_reduce(((x + other) @ w).sum(0), "cp", dst=I)

    f = mapped(once, mesh=make_mesh((count,), ("cp",), kind="abstract"))
    tried = check_program(f, ShapeDtype((rows, 4)), ShapeDtype((4, 4))).tried
    assert f"{ranks} ranks" in tried
    assert ("at smaller sizes" in tried) == (smaller is not None)
    assert smaller is None or smaller in tried


def leaders(x: Tensor, w: Tensor) -> Tensor:
    own = torch.where(axis_index("cp") % 4 == 0, w, 0)
    return all_reduce((x @ w).sum(0) + own.sum(0), "cp", dst=I)


def first_four(x: Tensor, w: Tensor) -> Tensor:
    if axis_size("cp") > 1:
        x = ppermute(x, "cp", perm=[(0, 1), (1, 2), (2, 3), (3, 0)])
    return all_reduce((x @ w).sum(0), "cp", dst=I)


@pytest.mark.parametrize(
    ("body", "what"), [(leaders, "remainder is not what"), (first_four, "at smaller sizes")]
)
def test_what_is_right_on_four_ranks_alone_is_refused_on_more(
    body: Callable[..., Any], what: str
) -> None:
    """Of many ranks four are tried, and sixteen."""
    f = mapped(body, mesh=make_mesh((128,), ("cp",), kind="abstract"))
    with pytest.raises(ShardTypeError, match=what):
        check_program(f, ShapeDtype((512, 4)), ShapeDtype((4, 4)))
    assert check_program(mapped(body, mesh=make_mesh((4,), ("cp",), kind="abstract")), X[:4], W)


def within(x: Tensor, other: Tensor) -> Tensor:
    """Adds up neighbours by their places in the block, which other blocks have too."""
    places = torch.arange(len(x))
    return ((places[:, None] - places).abs() < 256).to(x.dtype) @ other


def cut(x: Tensor, other: Tensor) -> Tensor:
    return x.new_ones(len(x), len(x)).tril(256) @ other


def halo(x: Tensor, _: Tensor) -> Tensor:
    """Counts from the start of the block before, of which it has the last 64 rows."""
    before = shift(x[-64:], "cp", 1) if axis_size("cp") > 1 else x[:0]
    places = torch.arange(len(before) + len(x)) - (len(x) if len(before) else 0)
    places, own = places + axis_index("cp") * len(x), torch.arange(len(x))[:, None]
    back = own + axis_index("cp") * len(x) - places
    near = (back >= 0) & (back < 64) & (places >= 0)
    return near.to(x.dtype) @ torch.cat([before, x]) / axis_size("cp")


WINDOWS: Final[dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]]] = {
    "within": (within, "lt at smaller sizes is never false"),
    "cut": (cut, "tril at smaller sizes is never false"),
    "halo": (halo, "at smaller sizes the body does something else"),
}


@pytest.mark.sample(2, "halo")
@pytest.mark.parametrize("name", WINDOWS)
def test_what_only_large_sizes_show_is_not_tried_at_smaller_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is as long as what is tried, of blocks of 1,024 rows in the call."""
    change, why = WINDOWS[name]
    monkeypatch.setattr(by_numbers, "_WORK", 1 << 20)

    def windowed(x: Tensor, w: Tensor) -> Tensor:
        found, other = torch.zeros_like(x), x
        for _ in range(axis_size("cp")):
            found, other = found + change(x, other), shift(other, "cp", 1)
        return found @ w

    f = mapped(windowed, P("cp"), mesh=make_mesh((4,), ("cp",), kind="abstract"))
    with pytest.raises(ShardTypeError, match=why):
        check_program(f, ShapeDtype((4096, 4)), ShapeDtype((4, 4)))


@pytest.mark.parametrize("last", [0, 1])
def test_a_lookup_in_a_vocabulary_of_thousands_of_ranks_is_tried_at_few(last: int) -> None:
    def embed(w: Tensor, ids: Tensor) -> Tensor:
        start = axis_index("tp") * w.shape[0]
        mask = (ids >= start) & (ids < start + w.shape[0] - last)
        rows = w[torch.where(mask, ids - start, 0)]
        return all_reduce(rows * mask[..., None], "tp", dst=I)

    mesh = make_mesh((8192,), ("tp",), kind="abstract")
    f = shard_map(embed, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check="global")
    arguments = ShapeDtype((8192 * 16, 64), requires_grad=True), ShapeDtype((2, 4), torch.int64)
    if last:  # the edge of each rank's part, of which most are drawn nowhere else
        with pytest.raises(ShardTypeError, match="every rank has a value of its own"):
            check_program(f, *arguments)
    else:
        assert "in 20 trials 4 ranks" in check_program(f, *arguments).tried


def test_a_large_program_that_does_something_else_at_smaller_sizes_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(axis_size("cp")):
            x = shift(x, "cp", 1)
        return all_reduce((x @ w).sum(0), "cp", dst=I)

    f = mapped(body, mesh=make_mesh((65,), ("cp",), kind="abstract"))
    with pytest.raises(ShardTypeError, match="there are 65 ranks, at most 64 ranks and"):
        check_program(f, ShapeDtype((65, 4)), ShapeDtype((4, 4)))


def test_each_size_is_tried_by_itself() -> None:
    f = mapped(lambda x, w: gathered(x, w) * (axis_size("cp") if x.shape[0] > 4 else 1))
    tried = []
    own = by_numbers._compare

    def compare(*args: Any, **options: Any) -> Any:
        tried.append(args[0].leaves[0].shape[0])
        return own(*args, **options)

    def run(rows: int) -> None:
        f(torch.randn(rows, 4), W)

    with mock.patch.object(by_numbers, "_compare", compare):
        for rows in (6, 9, 12):
            run(rows)
        with pytest.warns(UserWarning, match="the last 4 calls was checked again"):
            run(3)
        run(6)
        with pytest.raises(ShardTypeError, match="tried with numbers over 'cp'"):
            run(15)
    assert tried == [6, 9, 12, 3, 15]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_from_outside_try_the_derivatives_that_they_take() -> None:
    right, wrong = RING.mapped(), RING.mapped("detached once")
    q, k, v = (x.detach() for x in RING.arguments(torch.float64))
    mine = torch.func.jvp(right, (q, k, v), (q, k, v))
    other = torch.func.jvp(RING.one_device(), (q, k, v), (q, k, v))
    torch.testing.assert_close(mine, other)
    wrong(q, k, v)  # of which no derivative is taken
    with pytest.raises(ShardTypeError, match=r"the gradient of args\[2\] is"):
        torch.func.jvp(wrong, (q, k, v), (q, k, v))
    with pytest.raises(ShardTypeError, match=r"the gradient of args\[2\] is"):
        torch.func.grad(lambda v: wrong(q, k, v).sum())(v)


def test_compiled_calls_are_tried_while_they_are_traced() -> None:
    def double(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(lambda x, w: 2 * f(x, w), fullgraph=True, backend="eager")

    x, w = X, W
    torch.testing.assert_close(double(mapped(gathered))(x, w), 2 * (x @ w).sum(0))
    with pytest.raises(ShardTypeError, match="tried with numbers over 'cp'"):
        double(around(lambda x: 2 * x))(x, w)


def test_the_error_of_what_cannot_be_tried_reads() -> None:
    def rounded(x: Tensor) -> Tensor:
        moved = shift(shift(x, "cp", 1), "cp", -1)
        return moved.round()

    mesh = make_mesh((2,), ("cp",), kind="simulated")
    f = shard_map(rounded, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"), check="global")
    with mock.patch.object(repairing, "_TRIES", 0), told(ShardTypeError):
        f(torch.ones(4))


RARE: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "a threshold": lambda x, counts: x.amax() > 50,
    "the median": lambda x, counts: x.quantile(0.5) > 40,
    "no number": lambda x, counts: x.isnan().any(),
    "infinity": lambda x, counts: x.isinf().any(),
    "zeros": lambda x, counts: x.sum().sign() == 0,
    "no counts": lambda x, counts: counts.sum() == 0,
    "half precision": lambda x, counts: x.half().isinf().any(),
}
"""Questions that only one rank answers with yes, for numbers that are hardly ever drawn."""


def with_all(x: Tensor) -> Tensor:
    """Multiplies each row with the sum of all, which go round."""
    total, moving = x, x
    for _ in range(axis_size("tp") - 1):
        moving = shift(moving, "tp", 1)
        total = total + moving
    return x * total.sum(0, keepdim=True)


@pytest.mark.parametrize("name", RARE)
def test_what_one_rank_alone_may_meet_is_tried(name: str) -> None:
    mesh = make_mesh((2,), ("tp",), kind="abstract")
    mapped = partial(shard_map, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check="global")
    x = ShapeDtype((8, 3), dtype=torch.float64, requires_grad=True)
    counts = ShapeDtype((8,), dtype=torch.int64)
    with pytest.raises(ShardTypeError, match="ried with numbers over"):
        check_program(mapped(lambda x, counts: with_all(x) + RARE[name](x, counts)), x, counts)


def test_what_all_ranks_decide_together_is_accepted() -> None:
    def body(x: Tensor) -> Tensor:
        largest = all_reduce(x.amax(), "tp", op="max", dst=I)
        missing = all_reduce(x.isnan().any().double(), "tp", op="max", dst=I)
        return with_all(x) + torch.where(largest > 50, 1.0, missing)

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mapped = partial(shard_map, body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    x = torch.randn(8, 3, dtype=torch.float64)
    for each in (x, 40 * x):
        torch.testing.assert_close(mapped(check="global")(each), with_all_alone(each))


def with_all_alone(x: Tensor) -> Tensor:
    return x * x.sum(0, keepdim=True) + (x.amax() > 50)


@pytest.mark.parametrize("z", [torch.ones(4), torch.ones(3, dtype=torch.complex64)], ids=str)
def test_a_trial_that_departs_ends_in_an_error_of_ours(z: Tensor) -> None:
    mesh = make_mesh((2,), ("a",), kind="simulated")

    def body(x: Tensor) -> Tensor:
        return lax.pvary(z, "a")

    f = shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check="global")
    with pytest.raises(ShardTypeError, match="not what it is on one device"):
        f(torch.ones(12, 4))
