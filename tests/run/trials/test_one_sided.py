"""check="global" by numbers: conditions that go one way, for all numbers or for usual ones."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    explain,
    make_mesh,
    shard_map,
    shift,
)

Change = Callable[[Tensor], Tensor]

MESH: Final = make_mesh((2,), ("cp",), kind="simulated")
X: Final = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)


def same(x: Tensor) -> Tensor:
    return x


def around(hop: Change = same, end: Change = same) -> Callable[..., Any]:
    """A ring that changes the rows that it has got, and its result."""

    def body(x: Tensor) -> Tensor:
        total, rows = torch.zeros_like(x), x
        for step in range(axis_size("cp")):
            total = total + (x @ rows.T).tanh() @ rows
            if step + 1 < axis_size("cp"):
                rows = hop(shift(rows, "cp", 1))
        return end(total)

    return shard_map(body, mesh=MESH, in_specs=P("cp"), out_specs=P("cp"), check="global")


def shown(y: Tensor) -> Tensor:
    return all_reduce(y, "cp", dst=I)


ENDS: Final[dict[str, Change]] = {
    "a square is no less than 0": lambda y: torch.where(y.square() >= 0, y, 0.0),
    "an exponential is larger": lambda y: torch.where(y.exp() > 0, y, -y),
    "a guard of a square": lambda y: y / (y.square() + 1e-3).clamp(min=1e-6).sqrt(),
    "bounds that none reaches": lambda y: y.clamp(-1e6, 1e6),
    "others": lambda y: functional.hardtanh(y, -1e5, 1e5),
    "one bound in a tensor": lambda y: torch.maximum(y, torch.full_like(y, -1e9)),
    "a threshold": lambda y: functional.threshold(y, -1e5, 0.0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ENDS)
def test_what_both_programs_have_beyond_all_numbers_is_compared_at_others(name: str) -> None:
    assert explain(around(end=ENDS[name]), X).one_device == "tried"


WRONG: Final[dict[str, tuple[Change, Change]]] = {
    "a threshold of ranks": (lambda k: torch.where(k > 1e6, 0 * k, k), same),
    "a bound of ranks": (lambda k: k.clamp(-1e6), same),
    "a tensor of ranks": (lambda k: torch.maximum(k, torch.full_like(k, -1e9)), same),
    "beyond it by a rank's rows": (same, lambda y: torch.where(y > 1e6, y / len(y), y)),
    "a sum beyond it": (
        same,
        lambda y: torch.where(shown(y.square().sum().detach()) > 1e12, y / len(y), y),
    ),
    "another bound": (same, lambda y: y.clamp(max=1e6 * axis_size("cp"))),
    "another in a tensor": (
        same,
        lambda y: torch.minimum(y, torch.full_like(y, 1e6 * axis_size("cp"))),
    ),
    "another of squares": (same, lambda y: torch.where(y.square() >= -1e-9 * len(y), y, 0 * y)),
    "any of a rank's own": (same, lambda y: y * torch.where((y > 1e6).any(), 2.0, 1.0)),
    "all of a rank's own": (same, lambda y: y * torch.where((y.abs() < 1e6).all(), 1.0, 2.0)),
    "how many of a rank's own": (same, lambda y: y * (1 + (y > 1e6).sum().clamp(max=1))),
    "the largest bucket of a rank": (
        same,
        lambda y: y * (1 + torch.searchsorted(y.new_tensor([1e6]), y.detach().flatten()).max()),
    ),
    "buckets of a rank": (
        same,
        lambda y: y * (1 + torch.bucketize(y.detach().amax(), y.new_tensor([1e6]))),
    ),
    "of a rank's own mean": (same, lambda y: y * torch.where(y.mean(0) > 1e6, 2.0, 1.0)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WRONG)
def test_what_differs_beyond_all_numbers_is_refused(name: str) -> None:
    with pytest.raises(ShardTypeError, match=r"ried with numbers over 'cp'"):
        check_program(around(*WRONG[name]), X)


def attention(start: float, kind: str, is_wrong: bool = False) -> Callable[..., Any]:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top, total = q.new_full((len(q), 1), start), q.new_zeros(len(q), 1)
        value, n = torch.zeros_like(q), axis_size("cp")
        for step in range(n):
            s = q @ k.T
            if kind == "maximum":
                new = torch.maximum(top, s.detach().amax(-1, keepdim=True))
                e, keep = torch.exp(s - new), torch.exp(top - new)
                value, total = value * keep + e @ v, total * keep + e.sum(-1, keepdim=True)
            else:
                lse = s.logsumexp(-1, keepdim=True)
                new = torch.logaddexp(top, lse)
                share = torch.exp(lse - new)
                value = value * torch.exp(top - new) + s.softmax(-1) @ v * share
            top = q.new_full((len(q), 1), start) if is_wrong else new
            if step + 1 < n:
                k, v = shift((k, v), "cp", 1)
        return value / total if kind == "maximum" else value

    return shard_map(body, mesh=MESH, in_specs=P("cp"), out_specs=P("cp"), check="global")


@pytest.mark.parametrize("kind", ["maximum", "sum"])
@pytest.mark.parametrize("start", [float("-inf"), -1e30, -1e9, -1e4])
def test_a_running_maximum_may_begin_at_any_number_that_means_infinity(
    start: float, kind: str
) -> None:
    inputs = [torch.randn(8, 3, dtype=torch.float64) for _ in range(3)]
    assert explain(attention(start, kind), *inputs).one_device == "tried"
    with pytest.raises(ShardTypeError, match="ried with numbers over 'cp'"):
        check_program(attention(start, kind, is_wrong=True), *inputs)


# ------------------------------------------------------------------- entries that meet themselves

TAPS: Final = 3
Compare = Callable[[Tensor, Tensor, int], Tensor]


def halo(x: Tensor) -> Tensor:
    return torch.cat([shift(x[..., 1 - TAPS :], "cp", 1, wrap=False), x], -1)


def convolved(x: Tensor, w: Tensor, docs: Tensor, compare: Compare) -> Tensor:
    """A causal convolution that leaves out the taps of other documents."""
    taps, owners, t, y = halo(x), halo(docs), x.shape[-1], torch.zeros_like(x)
    for k in range(TAPS):
        y = y + taps[:, k : k + t] * compare(owners[k : k + t], docs, k) * w[:, k : k + 1]
    return y


def unfolded(x: Tensor, w: Tensor, docs: Tensor, compare: Compare) -> Tensor:
    taps, owners = halo(x).unfold(-1, TAPS, 1), halo(docs).unfold(-1, TAPS, 1)
    return (taps * compare(owners, docs[:, None], 0) * w[:, None]).sum(-1)


def written(owners: Tensor, docs: Tensor, k: int) -> Tensor:
    """Compares what was copied before a write with what stands there after it."""
    own = owners.clone()
    before = own.reshape(-1).clone()
    own[:1] = 7
    return own == before


MASKED: Final[dict[str, tuple[Any, Compare]]] = {
    "a loop": (convolved, lambda owners, docs, _: owners == docs),
    "a loop of the others": (convolved, lambda owners, docs, _: ~(owners != docs)),
    "a loop of what is no later": (convolved, lambda owners, docs, _: owners <= docs),
    "turned twice": (convolved, lambda owners, docs, _: owners.flip(0).flip(0) == docs),
    "unfolded": (unfolded, lambda owners, docs, _: owners == docs),
}
OTHERS: Final[dict[str, tuple[Any, Compare]]] = {
    "its own left out": (
        convolved,
        lambda owners, docs, k: (owners == docs) * (k < TAPS - 1 or axis_size("cp") < 2),
    ),
    "turned": (convolved, lambda owners, docs, _: owners.flip(0) == docs),
    "a rank's": (convolved, lambda o, docs, _: (o == docs) | (docs == axis_index("cp") + 5)),
    "the next": (unfolded, lambda owners, docs, _: owners == docs.roll(1, 0)),
    "written": (convolved, written),
}


def masked(case: tuple[Any, Compare]) -> Callable[..., Any]:
    body, compare = case
    specs = P(None, "cp"), P(), P("cp")
    return shard_map(
        lambda *args: body(*args, compare),
        mesh=MESH,
        in_specs=specs,
        out_specs=specs[0],
        check="global",
    )


ARGS: Final = (
    torch.randn(4, 8, dtype=torch.float64),
    torch.randn(4, TAPS, dtype=torch.float64),
    torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]),
)


@pytest.mark.sample(3, "unfolded")
@pytest.mark.parametrize("name", MASKED)
def test_a_tap_that_compares_a_document_with_itself_needs_no_other_side(name: str) -> None:
    assert explain(masked(MASKED[name]), *ARGS).one_device == "tried"


@pytest.mark.sample(3, "written")
@pytest.mark.parametrize("name", OTHERS)
def test_taps_of_other_documents_are_refused(name: str) -> None:
    with pytest.raises(ShardTypeError, match="ried with numbers over 'cp'"):
        check_program(masked(OTHERS[name]), *ARGS)
