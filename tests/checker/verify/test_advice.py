"""The `Fix:` of a refusal, followed by hand: accepted, with values and gradients of one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    convert,
    grad,
    make_mesh,
    shard_map,
)
from tests.checker.support.outcomes import outcome
from tests.support.golden import hold, told

Body = Callable[[Tensor, Tensor], Tensor]

RANKS: Final = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks")
X: Final = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
W: Final = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).double()


def total(x: Tensor) -> Tensor:
    return all_reduce(x, "tp", dst=I)


def shared(x: Tensor) -> Tensor:
    return all_reduce(x, "tp", dst=R)


_COLUMNS, _ROWS, _WHOLE = P(None, "tp"), P("tp"), P()


@dataclass(frozen=True)
class Case:
    """A refused program, what is advised, and the program that follows the advice."""

    wrong: Body
    fix: str
    right: Body
    x: P = _COLUMNS
    w: P = _ROWS
    out: P = _WHOLE
    right_out: P | None = None


_ONE_OPERAND: Final = (
    "take the sum of one operand first, with all_reduce(x, 'tp', dst=R): the product is a pending "
    "sum then, for a later all_reduce. Or take that of both, and leave out a later one."
)
_SCALE: Final = (
    "take the sum of what selects, scales or divides first, with all_reduce(x, 'tp', dst=R); what "
    "it is applied to may stay a pending sum, for a later all_reduce. Losses of nn do so with "
    "batch_axis='tp'."
)
_FIRST: Final = (
    "take the sum first, with all_reduce({}, 'tp', dst=I), or dst=R if ranks go on with it on "
    "their own shards"
)

CASES: Final[dict[str, Case]] = {
    "square": Case(
        lambda x, w: total((x @ w) * (x @ w)), _ONE_OPERAND, lambda x, w: total(x @ w).square()
    ),
    "product": Case(
        lambda x, w: total((x @ w) @ (x.sin() @ w).mT),
        _ONE_OPERAND,
        lambda x, w: total(shared(x @ w) @ (x.sin() @ w).mT),
    ),
    "division": Case(
        lambda x, w: total((x @ w) / x.exp().sum(1, keepdim=True)),
        _SCALE,
        lambda x, w: total((x @ w) / shared(x.exp().sum(1, keepdim=True))),
    ),
    "choice": Case(
        lambda x, w: total(torch.where((x > 0).sum(1, keepdim=True) > 1, x @ w, 0)),
        f"{_FIRST.format('(x > 0).sum(1, keepdim=True)')}; leave out a later one.",
        lambda x, w: total(torch.where(shared((x > 0).sum(1, keepdim=True)) > 1, x @ w, 0)),
    ),
    "nonlinear": Case(
        lambda x, w: total((x @ w).tanh()),
        f"{_FIRST.format('x @ w')}; leave out a later one.",
        lambda x, w: total(x @ w).tanh(),
    ),
    "index": Case(
        lambda x, w: w[(x > 0).sum(1)],
        f"{_FIRST.format('(x > 0).sum(1)')}; leave out a later one.",
        lambda x, w: w[total((x > 0).sum(1)) % w.shape[0]],
        w=P(),
    ),
    "addend": Case(
        lambda x, w: total(x @ w + 1),
        f"{_FIRST.format('x @ w')}, and add this to it.",
        lambda x, w: total(x @ w) + 1,
    ),
    "rounding": Case(
        lambda x, w: total((x @ w).long()),
        f"{_FIRST.format('x @ w')}, and round it.",
        lambda x, w: total(x @ w).long(),
    ),
    "gather of the outer axis first": Case(
        lambda x, w: all_gather(all_gather(x, "dp", dst=I), "tp", dst=I),
        "gather the axes that shard the dim at once, in the order of its spec, or one by one, the "
        "last one first.",
        lambda x, w: all_gather(all_gather(x, "tp", dst=I), "dp", dst=I),
        x=P(("dp", "tp")),
    ),
    "gather in another order": Case(
        lambda x, w: all_gather(x, ("tp", "dp"), dst=I),
        "gather the axes that shard the dim at once, in the order of its spec, or one by one, the "
        "last one first.",
        lambda x, w: all_gather(x, ("dp", "tp"), dst=I),
        x=P(("dp", "tp")),
    ),
    "gather along another dim": Case(
        lambda x, w: all_gather(x, "tp", dim=0, dst=I),
        "'tp' shards dim 1: gather with dim=1.",
        lambda x, w: all_gather(x, "tp", dim=1, dst=I),
    ),
    "axes in another order": Case(
        lambda x, w: x * 2,
        "say P(('tp', 'dp'), None), as it is sharded; or gather and shard it as the spec says.",
        lambda x, w: x * 2,
        x=P(("tp", "dp")),
        out=P(("dp", "tp")),
        right_out=P(("tp", "dp"), None),
    ),
    "choice by a local size": Case(
        lambda x, w: (lambda a, b: a if x.shape[1] < 4 else b)(x * 2, x * 3),
        "compute it from the same operands there: where a local size decides, as in a if "
        "x.shape[0] < 8 else b, compare x.shape[0] * axis_size(axis); or wrap per-rank code in "
        "local_region.",
        lambda x, w: (lambda a, b: a if x.shape[1] * axis_size("tp") < 4 else b)(x * 2, x * 3),
        out=P(None, "tp"),
    ),
}


def values(mesh_size: Sequence[int], case: Case, body: Body, out: P) -> list[Tensor]:
    checked = tuple(mesh_size) == (2, 2)
    mesh = RANKS if checked else make_mesh(mesh_size, ("dp", "tp"), kind="simulated")
    specs = [case.x, case.w]
    if not checked:  # unchecked, every axis has to be named
        specs = [P(*s.entries, replicate={"dp", "tp"} - set(s.mentioned)) for s in specs]
    mapped = shard_map(
        body, mesh=mesh, in_specs=tuple(specs), out_specs=out, check="global" if checked else False
    )
    return outcome(mapped, (X, W))


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", CASES)
def test_advice_is_right(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ShardTypeError) as error:
        values((2, 2), case, case.wrong, case.out)
    assert f"Fix: {case.fix}" in str(error.value).splitlines()
    out = case.right_out or case.out
    here, there = (values(sizes, case, case.right, out) for sizes in ((2, 2), (1, 1)))
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other)


def test_an_error_of_the_body_tells_the_shapes_of_shards() -> None:
    mapped = shard_map(lambda x, w: x @ w, mesh=RANKS, in_specs=(P(None, "tp"), P()), out_specs=P())
    for call in (mapped, torch.func.grad(lambda x, w: mapped(x, w).sum())):
        with pytest.raises(RuntimeError) as error:
            call(X, W)
        at = error.value.__notes__[0].partition("test_advice.py:")[2]
        assert at.partition(": ")[2].splitlines()[1:] == [
            "  x: float64[8, 2], from input x (P(None, 'tp'))",
            "  w: float64[4, 8], from input w (P())",
        ]
        assert error.value.__notes__[1:] == [
            "In the body of <lambda> tensors are shards: x is [8, 2], a shard "
            "of [8, 4] by P(None, 'tp')."
        ]


def test_an_error_of_the_checkpoint_of_torch_names_the_one_to_use() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            y: Tensor = torch.utils.checkpoint.checkpoint(torch.matmul, x, w, use_reentrant=False)
            return all_reduce(y.square().sum(), "tp", dst=I)

        gradient: Tensor = grad(loss)(w)
        return gradient

    with pytest.raises(ShardTypeError) as error:
        shard_map(body, mesh=RANKS, in_specs=(P("tp"), P(None, "tp")), out_specs=P("tp"))(W, X)
    hold("mistakes.txt", "torch_s_checkpoint", str(error.value))


def test_an_error_of_the_code_does_not_tell_the_shapes_of_shards() -> None:
    def body(x: Tensor) -> Tensor:
        reduced: Tensor = all_reduce(x)  # type: ignore[call-arg]
        return reduced

    with pytest.raises(TypeError, match="'axis'") as error:
        shard_map(body, mesh=RANKS, in_specs=P(None, "tp"), out_specs=P())(X)
    assert not hasattr(error.value, "__notes__")


UNBRANCHED = (
    "Fix: take what all ranks need out of the branch, as a collective or a term of the loss, and "
    "have rank 0 print, log and save outside of the body."
)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * int(axis_index("dp")),
        lambda x: x if axis_index("dp") == 0 else x * 2,
    ],
)
def test_a_number_of_the_rank_is_advised_to_stay_a_tensor(body: Callable[[Tensor], Tensor]) -> None:
    mapped = shard_map(body, mesh=RANKS, in_specs=P("dp"), out_specs=P("dp"))
    with told(ShardTypeError):
        mapped(X)


def test_a_term_on_one_rank_is_advised_to_leave_the_branch() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = x @ convert(w, "dp", src=I, dst=R)
        return all_reduce(y.square().mean(), "dp", op="mean", dst=I)

    def branched(x: Tensor, w: Tensor) -> Tensor:
        total = loss(x, w)
        if axis_index("dp") == 0:
            total = total + w.square().sum()
        return total

    def taken_out(x: Tensor, w: Tensor) -> Tensor:
        return loss(x, w) + w.square().sum()

    specs: Any = {"mesh": RANKS, "in_specs": (P("dp"), P()), "out_specs": P(), "check": "global"}
    with pytest.raises(ShardTypeError) as error:
        shard_map(branched, **specs)(X, W)
    assert str(error.value).splitlines()[3] == UNBRANCHED
    x, w = X.double(), W.double().requires_grad_()
    (here,) = torch.autograd.grad(shard_map(taken_out, **specs)(x, w), w)
    (there,) = torch.autograd.grad((x @ w).square().mean() + w.square().sum(), w)
    torch.testing.assert_close(here, there)
