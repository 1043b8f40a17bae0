"""Branches on numbers taken from tensors: each way through a body is checked, and the ways agree.

What is accepted is run on ranks that are threads, with data for each way, and compared with one
device, gradients included.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    assume_constant,
    check_program,
    explain,
    shard_map,
    trace,
)
from tests.checker.support.branching import AUTO, SPECS, W, X, both, loss, plain_loss, program_paths
from tests.checker.support.rejections import ABSTRACT, RANKS, assert_right, gradient, rejection
from tests.support.golden import hold_own, told

# ------------------------------------------------------------------------- what users write


def test_gradient_clipping_by_a_branch_on_the_norm_is_right_on_both_ways() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        grad = all_reduce(gradient(lambda w: (x @ w).square().sum(), w), "tp", dst=I)
        norm = grad.square().sum().sqrt()
        if norm.item() > 1.0:
            grad = grad * (1.0 / norm.item())
        return w - 0.1 * grad

    def one(x: Tensor, w: Tensor) -> Tensor:
        grad = gradient(lambda w: plain_loss(x, w), w)
        norm = grad.square().sum().sqrt()
        return w - 0.1 * (grad / norm if norm > 1 else grad)

    both(step, one, X.detach(), W.detach(), in_specs=SPECS, out_specs=P())


def test_gradients_from_outside_are_right_on_both_ways_of_an_invariant_branch() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        total = loss(x, w)
        if total > 1.0:
            # A collective on one way only: every rank takes it.
            return total * all_reduce(x.sin().sum(), "tp", dst=I)
        return total * total.item()

    def one(x: Tensor, w: Tensor) -> Tensor:
        total = plain_loss(x, w)
        return total * (x.sin().sum() if total > 1 else total.detach())

    assert program_paths(body, X, W) == 2
    both(body, one, X, W, in_specs=SPECS, out_specs=P())


@pytest.mark.parametrize("how", ["raise", "assert", "clip_grad_norm_", "gaussian_nll_loss"])
def test_a_way_may_end_in_an_exception_of_the_body(how: str) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        total = loss(x, w)
        if how == "raise" and torch.isnan(total):
            raise ValueError("the loss is not a number")
        if how == "assert":
            assert bool((total == total).all()), "the loss is not a number"
        if how == "clip_grad_norm_":
            leaf = torch.ones(2, dtype=torch.float64).requires_grad_()
            leaf.grad = total.detach() * torch.ones_like(leaf)
            torch.nn.utils.clip_grad_norm_([leaf], 1.0, error_if_nonfinite=True)
        if how == "gaussian_nll_loss":  # raises in Python, under the modes
            variance = torch.where(torch.isnan(total), -1.0, 1.0).detach()
            torch.nn.functional.gaussian_nll_loss(total, total, variance)
        return total

    assert_right(body, plain_loss, X, W, in_specs=SPECS, out_specs=P())
    mapped = shard_map(body, mesh=RANKS, in_specs=SPECS, out_specs=P())
    with pytest.raises(
        (ValueError, AssertionError, RuntimeError), match=r"not a number|non-finite|negative"
    ):
        mapped(X * torch.nan, W)


def test_an_exception_on_every_way_is_raised_as_it_is() -> None:
    def body(x: Tensor) -> Tensor:
        raise KeyError("yes" if all_reduce(x.sum(), "tp", dst=I) > 0 else "no")

    with pytest.raises(KeyError, match="yes"):
        program_paths(body, X, in_specs=P("tp"))


def test_an_operation_that_fails_on_one_way_is_no_end_of_it() -> None:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.sum(), "tp", dst=I)
        return total if total > 0 else torch.ones(2, 3) @ torch.ones(2, 3)

    hold_own(rejection(body, X, in_specs=P("tp"), out_specs=P()))


def test_a_number_is_logged_and_returned() -> None:
    logged: list[str] = assume_constant([])

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, float]:
        total = loss(x, w)
        logged.append(f"{total.item():.3f} {total:.1f}")
        return total, total.item()

    f = shard_map(body, mesh=AUTO, in_specs=SPECS, out_specs=(P(), None))
    total, number = f(X, W)
    assert number == total.item()
    assert (
        logged
        == ["<#1> <float64[], checked; debug_print shows numbers>"]
        + [f"{number:.3f} {number:.1f}"] * 4
    )


def test_a_shard_that_is_printed_has_a_line_in_the_check_and_the_numbers_of_each_rank() -> None:
    printed: list[str] = assume_constant([])

    def body(x: Tensor) -> Tensor:
        printed.append(f"{x[0]!r} {x[0]}")
        return x

    shard_map(body, mesh=AUTO, in_specs=P("tp"), out_specs=P("tp"))(X.detach())
    numbers = sorted(f"{row!r} {row}" for row in X.detach()[:: len(X) // 4])
    checked = f"<float64[{X.shape[1]}], checked; debug_print shows numbers>"
    assert printed[0] == f"{checked} {checked}"
    assert sorted(printed[1:]) == numbers


@pytest.mark.parametrize("check", [True, "global"])
def test_a_check_prints_once_and_a_run_for_each_rank(
    capsys: pytest.CaptureFixture[str], check: Any
) -> None:
    def body(x: Tensor) -> Tensor:
        print("here", x[0, 0])
        return x

    f = shard_map(body, mesh=AUTO, in_specs=P("tp"), out_specs=P("tp"), check=check)
    f(X.detach())
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "here <float64[], checked; debug_print shows numbers>"
    assert sorted(others) == sorted(f"here {x!r}" for x in X.detach()[:: len(X) // 4, 0])


def test_values_of_literals_are_known_and_make_no_branch() -> None:
    def body(x: Tensor) -> Tensor:
        return x if torch.tensor(2.0).item() > 1 and torch.equal(torch.ones(1), x[:1]) else 2 * x

    def literal(x: Tensor) -> Tensor:
        return x if torch.tensor(2.0) > 1 else 2 * x

    assert program_paths(literal, X, in_specs=P("tp"), out_specs=P("tp")) == 1
    assert program_paths(body, X, in_specs=P(), out_specs=P()) == 2


def test_a_literal_that_has_met_a_number_is_known_no_more() -> None:
    def body(x: Tensor) -> Tensor:
        literal = torch.tensor(2.0, dtype=torch.float64)
        view = literal.view(1)
        literal.mul_(x.sum().item())
        made = torch.tensor(x.sum().item())
        return x if view.item() > 1 else 2 * x if made > 1 else 3 * x

    assert program_paths(body, X, in_specs=P(), out_specs=P()) == 3


# --------------------------------------------------------------- numbers that ranks do not share


@pytest.mark.usefixtures("repairs")
def test_a_branch_on_a_varying_value_is_rejected_with_a_reduction_that_was_tried() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        total = (x @ w).sum()
        if total.item() > 0:
            total = all_reduce(total, "tp", dst=R)
        return all_reduce(x.sum(), "tp", dst=I)

    hold_own(rejection(body, X, W, in_specs=SPECS, out_specs=P()))


@pytest.mark.usefixtures("repairs")
def test_a_bool_gets_no_reduction_proposed_that_may_be_wrong() -> None:
    def body(x: Tensor) -> Tensor:
        return 2 * x if (x > 0).all() else x  # a maximum would ask for any rank, not for all

    assert "Tried" not in rejection(body, X, in_specs=P("tp"), out_specs=P("tp"))


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose])
def test_comparing_tensors_is_a_branch_where_ranks_share_them(compare: Any) -> None:
    def body(x: Tensor) -> Tensor:
        return 2 * x if compare(x, x + 1) else x

    assert program_paths(body, X, in_specs=P(), out_specs=P()) == 2
    assert "of V" in rejection(body, X, in_specs=P("tp"), out_specs=P("tp"))


# ------------------------------------------------------------------------ plain numbers, sizes

PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "float(n)": lambda n, t: float(n),
    "int(n)": lambda n, t: int(n),
    "math.log(n)": lambda n, t: math.log(n),
    "float(t)": lambda n, t: float(t),
    "int(t)": lambda n, t: int(t),
    "range(n)": lambda n, t: range(n),
    "range(t)": lambda n, t: range(t.long()),
    "size": lambda n, t: torch.zeros(n),
    "sizes": lambda n, t: torch.zeros((n, 2)),
    "fill": lambda n, t: torch.full((n,), 0.0),
    "position": lambda n, t: X[n],
    "slice": lambda n, t: X[:n],
    "write": lambda n, t: torch.ones(3).__setitem__(n, 0.0),
    "dim": lambda n, t: X.sum(n),
    "repeat": lambda n, t: X.repeat(n, 1),
    "steps": lambda n, t: torch.arange(0, n * 1.0),
    "key": lambda n, t: {4: 1.0}.get(n),
    "member": lambda n, t: n in {4, 5},
    "divmod": lambda n, t: divmod(n, 2),
    "bits": lambda n, t: n & 1,
    "reflected bits": lambda n, t: 1 | n,
    "scale": lambda n, t: torch.nn.functional.interpolate(torch.ones(1, 1, 4), scale_factor=n / 2),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("swallows", [False, True])
def test_what_needs_the_number_itself_is_refused(name: str, swallows: bool) -> None:
    def body(x: Tensor) -> Tensor:
        count = all_reduce((x > 0).sum(), "tp", dst=I)
        try:
            PLAIN[name](count.item(), count.double())
        except Exception:
            if not swallows:
                raise
        return x

    hold_own(rejection(body, X, in_specs=P("tp"), out_specs=P("tp")))


Take = Callable[[Any, Any, Any], Any]

INSTEAD: dict[str, tuple[str, Take, Take]] = {
    "float(x)": (
        "write x.item() in place of float(x), ",
        lambda n, real, whole: float(real),
        lambda n, real, whole: real.item(),
    ),
    "float(x) of integers": (
        "write x.double().item() in place of float(x), ",
        lambda n, real, whole: float(whole),
        lambda n, real, whole: whole.double().item(),
    ),
    "math.f(x)": (
        " and x.f().item() in place of math.f(x): ",
        lambda n, real, whole: math.sqrt(real),
        lambda n, real, whole: real.sqrt().item(),
    ),
    "int(x)": (
        "write x.long().item() in place of int(x): ",
        lambda n, real, whole: int(real),
        lambda n, real, whole: real.long().item(),
    ),
    "int(x) of integers": (
        "write x.item() in place of int(x): ",
        lambda n, real, whole: int(whole),
        lambda n, real, whole: whole.item(),
    ),
    "float(n)": (
        "write n * 1.0 in place of float(n),",
        lambda n, real, whole: float(n),
        lambda n, real, whole: n * 1.0,
    ),
    "int(n)": (
        "write math.trunc(n) in place of int(n),",
        lambda n, real, whole: int(n),
        lambda n, real, whole: math.trunc(n),
    ),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_advised_in_place_of_a_plain_number_is_followed_and_right(name: str) -> None:
    advice, plain, instead = INSTEAD[name]

    def body_with(take: Take) -> Callable[..., Tensor]:
        def body(x: Tensor, w: Tensor) -> Tensor:
            real, whole = loss(x, w).detach(), all_reduce((x > 0).sum(), "tp", dst=I)
            number = take(real.item(), real, whole)
            return torch.mm(x * number if number > 2 else x - number, w)

        return body

    def one(x: Tensor, w: Tensor) -> Tensor:
        real, whole = plain_loss(x, w).detach(), (x > 0).sum()
        number = plain(real.item(), real, whole)
        return torch.mm(x * number if number > 2 else x - number, w)

    assert advice in rejection(body_with(plain), X, W, in_specs=SPECS, out_specs=P("tp"))
    assert_right(body_with(instead), one, X, W, in_specs=SPECS, out_specs=P("tp"))


def test_arithmetic_on_numbers_is_followed() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        n, m = loss(x, w).item(), all_reduce((x > 0).sum(), "tp", dst=I).item()
        k = (-n + 1) * 2 / abs(n - 3) + n**2 % 7 - m // 2 + round(n, 1) + max(m, 3) + 5.0
        y = torch.where(x > k, x, n).clamp(max=m) + torch.full((6,), k) + m
        y[0] = k
        torch._foreach_mul_([y], [k])
        return torch.nn.functional.dropout(torch.add(y, x, alpha=k) * k, n, training=False)

    def one(x: Tensor, w: Tensor) -> Tensor:
        n, m = plain_loss(x, w).item(), (x > 0).sum().item()
        k = (-n + 1) * 2 / abs(n - 3) + n**2 % 7 - m // 2 + round(n, 1) + max(m, 3) + 5.0
        y = torch.where(x > k, x, n).clamp(max=m) + k + m
        y[::2] = k
        return (y * k + x * k) * k

    x = (X.detach() / 30).requires_grad_()  # the loss is a probability
    assert_right(body, one, x, W.detach(), in_specs=SPECS, out_specs=P("tp"))


def test_attributes_of_numbers_are_refused_where_numbers_have_them() -> None:
    def body(x: Tensor, attribute: str) -> Tensor:
        number: Any = x.sum().item()
        return x if hasattr(number, attribute) else 2 * x

    def f(attribute: str) -> Any:
        return lambda x: body(x, attribute)

    text = rejection(f("is_integer"), X, in_specs=P(), out_specs=P())
    assert ".is_integer makes a plain Python number of one that is taken from a tensor." in text
    assert program_paths(f("item"), X, in_specs=P(), out_specs=P()) == 1


def test_a_number_that_the_body_keeps_means_nothing_after_the_check() -> None:
    kept: list[Any] = assume_constant([])

    def body(x: Tensor) -> Tensor:
        kept.append(x.sum().item())
        return x

    assert program_paths(body, X, in_specs=P(), out_specs=P()) == 1
    assert str(kept[0] + 1) == "<(#1 + 1)>"
    for use in (lambda: kept[0] > 1, lambda: bool(kept[0]), lambda: max(kept[0], 3)):
        with pytest.raises(ShardTypeError, match="kept when it was checked"):
            use()
    with told(ShardTypeError):
        torch.ones(1) * kept[0]


# -------------------------------------------------------------------------------- how many ways


def counted(f: Callable[[Any], Any]) -> int:
    """Ways of a body that branches on the number of one tensor."""

    def body(x: Tensor) -> Tensor:
        return x * (1.0 if f(x.sum()) else 2.0)

    return program_paths(body, X, in_specs=P(), out_specs=P())


def test_a_condition_that_is_known_on_a_way_is_no_branch() -> None:
    assert counted(lambda t: t.item() > 1 and t.item() > 1) == 2
    assert counted(lambda t: t.item() > 1 and t.item() > 0) == 2
    assert counted(lambda t: t.item() > 1 and t.item() > 2) == 3
    assert counted(lambda t: t.item() > 1 and t.item() < 1) == 2
    assert counted(lambda t: t.item() < 1 or t.item() >= 1) == 3  # neither: not a number
    assert counted(lambda t: t.long().item() < 1 or t.long().item() >= 1) == 3  # two tensors
    assert counted(lambda t: (n := t.long().item()) < 1 or n >= 1) == 2
    assert counted(lambda t: (n := t.long().item()) > 0 and n < 2 and n == 1) == 3
    assert counted(lambda t: (n := (t > 0).item()) or not n) == 2
    assert counted(lambda t: (a := t.item()) > (b := t.sin().item()) and b < a) == 2
    assert counted(lambda t: (a := t.item()) + 1 > 0 and a + 1 > 0) == 2
    assert counted(lambda t: t.item() if t.item() != t.item() else 0) == 3


def test_a_tensor_that_is_written_has_another_number() -> None:
    def body(x: Tensor) -> Tensor:
        y = x.detach().sum().clone()
        if y.item() > 1:
            y.data.add_(1)
        return x * 2 if y.item() > 1 else x

    assert program_paths(body, X, in_specs=P(), out_specs=P()) == 3


def test_a_loop_whose_end_depends_on_data_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.square().sum(), "tp", dst=I)
        while total > 1e-3:
            total = total / 2
        return total

    line = body.__code__.co_firstlineno + 2
    text = rejection(body, X, in_specs=P("tp"), out_specs=P()).splitlines()
    assert text[:4] == [
        "body: there are more than 64 paths through the branches on numbers taken from tensors.",
        f"  at test_paths.py:{line}: while total > 1e-3:",
        "Fix: use torch.where, or a loop whose number of steps does not depend on the data.",
        "  after 60 other branches",
    ]
    assert len(text) == 8


# ------------------------------------------------------------------------------- the typed program


def test_the_program_shows_each_way_and_its_fingerprint_is_not_that_of_one() -> None:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.sum(), "tp", dst=I)
        if total.item() > 1:
            raise ValueError
        return all_gather(x, "tp", dst=I) if total.item() < 0 else x.repeat(4, 1) * total.item()

    def straight(x: Tensor) -> Tensor:
        return all_gather(x, "tp", dst=I)

    x = X.detach()
    f = shard_map(straight, mesh=ABSTRACT, in_specs=P("tp"), out_specs=P())
    with pytest.raises(ShardTypeError, match="varies over it"):
        trace(shard_map(body, mesh=ABSTRACT, in_specs=P("tp"), out_specs=P()), x)
    g = shard_map(body, mesh=ABSTRACT, in_specs=P("tp"), out_specs=P("tp"))
    line = body.__code__.co_firstlineno + 2
    lines = str(trace(g, x)).splitlines()
    shown = [text for text in lines if "item" in text or "path" in text or "raises" in text]
    test, choice = (f"  # test_paths.py:{n}: " for n in (line, line + 2))
    assert f"path 1, where #1 > 1 is True{test}if total.item() > 1:" in shown
    assert f"  #1 = item(%2){test}if total.item() > 1:" in shown
    assert "  raises ValueError" in shown
    assert f"path 2, where #1 > 1 is False{test}if total.item() > 1:" in shown
    assert any(text.startswith(f"  and #1 < 0 is True{choice}") for text in shown)
    assert "mul(%3; other=#1)" in "".join(lines)
    assert trace(g, x).fingerprint == trace(g, x).fingerprint != trace(f, x).fingerprint
    assert len({way.branches for way in check_program(g, x).program_paths}) == 3


def test_explain_tells_each_way_and_the_bytes_of_the_one_that_sends_most() -> None:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.sum(), "tp", dst=I)
        if total.item() > 1:
            raise ValueError
        return all_reduce(x, "tp", dst=I).sum() if total.item() > 0 else total

    x = X.detach()
    f = shard_map(body, mesh=ABSTRACT, in_specs=P("tp"), out_specs=P())
    lines = str(explain(f, x)).splitlines()
    assert [text.split("  # ")[0] for text in lines if text.startswith(("path", "  and"))] == [
        "path 1, where #1 > 1 is True",
        "path 2, where #1 > 1 is False",
        "  and #1 > 0 is True",
        "path 3, where #1 > 1 is False",
        "  and #1 > 0 is False",
    ]
    total = "  all_reduce('tp', Partial -> I) of float64[], sends 12 B"
    assert len([text for text in lines if text.startswith(total)]) == 3
    assert lines.count("  raises ValueError") == 1
    # Two sums, of one number and of 12, on the way that sends most.
    assert trace(f, x).bytes_sent() == {"tp": 12 + 12 * 12}


# ------------------------------------------------------------------------------ global strictness


def test_global_strictness_holds_each_way_against_the_same_way_on_one_device() -> None:
    def clipped(x: Tensor, w: Tensor) -> Tensor:
        total = loss(x, w)
        if total.item() > 1:
            return total / total.item()
        return all_reduce(x.sum(), "tp", dst=I) * 2

    def biased(x: Tensor, w: Tensor) -> Tensor:
        total = loss(x, w)
        if total.item() > 1:
            return total
        return all_reduce(x.sum() + 1, "tp", dst=I)

    specs: dict[str, Any] = {"mesh": ABSTRACT, "in_specs": SPECS, "out_specs": P()}
    verdict = check_program(shard_map(clipped, check="global", **specs), X, W)
    assert [branch.holds for way in verdict.program_paths for branch in way.branches] == [
        True,
        False,
    ]
    check_program(shard_map(biased, **specs), X, W)
    with pytest.raises(ShardTypeError, match="where #1 > 1 is False"):
        check_program(shard_map(biased, check="global", **specs), X, W)


def test_two_numbers_are_compared_alike_from_either_side() -> None:
    asked: set[tuple[bool, bool]] = assume_constant(set())  # a check undoes other changes

    def body(a: Tensor, b: Tensor) -> Tensor:
        n, m = a.item(), b.item()
        asked.add((m > n, n < m))
        return a

    mapped = shard_map(body, mesh=ABSTRACT, in_specs=(P(), P()), out_specs=P())
    check_program(mapped, torch.ones(()), torch.ones(()))
    assert asked == {(True, True), (False, False)}


# -------------------------------------------------------------- values that are only looked at


def below(x: Tensor, bound: float = 0.0) -> Tensor:
    if (x.detach() < bound).any():
        raise ValueError("below")
    return x * 2


def finite(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all(), "not finite"
    return x * 2


def distribution(x: Tensor) -> Tensor:
    # torch.compile, in another test, switches validation off for the process
    made: Any = torch.distributions.Normal(x, x.exp(), validate_args=True)
    logs: Tensor = made.log_prob(x * 0)
    return logs


def caught(x: Tensor) -> Tensor:
    try:
        return below(x)
    except ValueError:
        return x


def kept(x: Tensor) -> Tensor:
    is_right = (x > 0).all().item()
    assert is_right
    return x * 2 if is_right else x


def one_of_two(x: Tensor) -> Tensor:
    if (x < 0).any() or x.isnan().any():
        raise ValueError
    return x * 2


def two(x: Tensor, top: int | None = 99) -> Tensor:
    if not ((x > 0).all() and (x < 99).all()):
        raise ValueError
    if top is not None and x.detach().long().max() >= top:
        raise ValueError
    return x * 2


def only_together(x: Tensor) -> Tensor:
    if (x < 2).any() and (x > 2).any():  # a rank where one holds goes on as others do
        raise ValueError
    return x * 2


def none_above(x: Tensor) -> Tensor:
    if not (x > 0).any():  # on one device one of all rows is enough
        raise ValueError
    return x * 2


LOOKS: Final[dict[str, tuple[Callable[[Tensor], Tensor], Any]]] = {
    "raise": (below, "global"),
    "assert": (finite, "global"),
    "in torch": (distribution, "global"),
    "of a loss": (
        lambda x: functional.gaussian_nll_loss(x, x * 0, x * x + 1, reduction="none"),
        "global",
    ),
    "on the device": (lambda x: torch._assert_async((x > 0).all()) or x * 2, "global"),
    "another one on one device": (none_above, True),
    "caught": (caught, False),
    "kept": (kept, False),
    "one of two": (one_of_two, "global"),
    "two at once": (two, "global"),
    "two that only together raise": (only_together, False),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_check_of_values_may_differ_if_all_that_it_does_is_raise(name: str) -> None:
    body, accepted = LOOKS[name]
    x = X.detach().abs() + 1
    for check in (True, "global"):
        options: Any = {"mesh": RANKS, "in_specs": P("tp"), "out_specs": P("tp"), "check": check}
        mapped = shard_map(body, **options)
        if accepted in (check, "global"):
            torch.testing.assert_close(mapped(x), body(x))
        else:
            with pytest.raises(ShardTypeError, match=r"Python value"):
                mapped(x)


@pytest.mark.parametrize("body", [below, finite])
def test_a_check_of_values_raises_on_the_rank_that_fails_it_in_each_call(body: Any) -> None:
    mapped: Any = shard_map(body, mesh=RANKS, in_specs=P("tp"), out_specs=P("tp"))
    right = X.detach().abs() + 1
    wrong = right.clone()
    wrong[-1, -1] = -math.inf
    for _ in range(3):  # later calls run what was recorded, if anything was
        mapped(right)
        with pytest.raises((ValueError, AssertionError), match=r"below|not finite"):
            mapped(wrong)


def test_a_python_value_is_no_multiple_of_that_on_one_device() -> None:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.detach().sum(), "tp", dst=I) * x.shape[0]
        return x * 2 if total.item() > 3 else x

    mapped = shard_map(body, mesh=RANKS, in_specs=P("tp"), out_specs=P("tp"), check="global")
    with pytest.raises(ShardTypeError, match=r"a Python value by item .* it is 1/\d times"):
        check_program(mapped, X)
