"""A verdict that holds for many sizes is the one that each size would get; all else is checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import copysign
from typing import Any, Final, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    ShardTypeError,
    all_gather,
    all_reduce,
    check_program,
    convert,
    make_mesh,
    shard_map,
    trace,
    value_and_grad,
)
from shardmap_torch.checker.verify.verdict import verify
from shardmap_torch.run import checked
from tests.support.pool import Gloo

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
CHECKS: tuple[Literal["local", "global"], ...] = ("local", "global")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A function, and its arguments and expected results by the number of the call."""

    body: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    arguments: Callable[[int], tuple[Any, ...]]
    expected: Callable[..., Any]


def train(params: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Any:
    def loss(params: tuple[Tensor, Tensor]) -> Tensor:
        w1, w2 = params
        h = (convert(x, "tp", src=I, dst=R) @ w1).relu()
        error = all_reduce(h @ w2, "tp", dst=I) - y
        return all_reduce(error.square().sum() / error.shape[1], "dp", dst=I)

    value, grads = value_and_grad(loss)(params)
    return value, tuple(all_reduce(grad, "dp", dst=I) for grad in grads)


def train_alone(params: tuple[Tensor, Tensor], x: Tensor, y: Tensor) -> Any:
    params = tuple(p.detach().requires_grad_() for p in params)  # type: ignore[assignment]
    loss = (((x @ params[0]).relu() @ params[1] - y).square().sum()) / y.shape[1]
    return loss.detach(), torch.autograd.grad(loss, params)


def attend(x: Tensor, wqkv: Tensor, wo: Tensor, offset: int) -> Tensor:
    b, s, _ = x.shape
    q, k, v = (x @ wqkv).view(b, s, -1, 3, 4).permute(3, 0, 2, 1, 4)
    mask = torch.ones(s, s, dtype=torch.bool).tril()
    p = ((q @ k.mT) / k.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    y = (p @ v).transpose(1, 2).reshape(b, s, -1)
    place = torch.arange(s, dtype=x.dtype).unsqueeze(1) + offset
    z: Tensor = all_reduce(y @ wo, "tp", dst=I)
    return z * place


def attend_alone(x: Tensor, wqkv: Tensor, wo: Tensor, offset: int) -> Tensor:
    b, s, _ = x.shape
    q, k, v = (x @ wqkv).view(b, s, -1, 3, 4).permute(3, 0, 2, 1, 4)
    p = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y: Tensor = p.transpose(1, 2).reshape(b, s, -1) @ wo
    return y.mul(torch.arange(s).unsqueeze(1) + offset)


def decode(x: Tensor, w: Tensor, cache: list[Tensor]) -> Any:
    grown = []
    for kept in cache:
        kept = torch.cat([kept, x @ w], 0)
        grown.append(kept)
        x = x + all_reduce(kept.mean(0, keepdim=True) @ w.T, "tp", dst=I)
    return x, grown


def decode_alone(x: Tensor, w: Tensor, cache: list[Tensor]) -> Any:
    grown = []
    for kept in cache:
        grown.append(torch.cat([kept, x @ w], 0))
        x = x + grown[-1].mean(0, keepdim=True) @ w.T
    return x, grown


def put(cache: Tensor, row: Tensor, position: int) -> Tensor:
    return torch.slice_scatter(cache, row, 0, position, position + 1)


W = (randn(4, 8), randn(8, 4))
CASES = {
    "a training step over batches": Case(
        train,
        ((P(None, "tp"), P("tp")), P("dp"), P("dp")),
        (P(), (P(None, "tp"), P("tp"))),
        lambda i: (W, randn(4 + 2 * i, 4), randn(4 + 2 * i, 4)),
        train_alone,
    ),
    "attention over batches, lengths and offsets": Case(
        attend,
        (P("dp"), P(None, "tp"), P("tp"), None),
        P("dp"),
        lambda i: (randn(4 + 2 * (i % 3), 3 + i, 4), randn(4, 24), randn(8, 4), 7 * i),
        attend_alone,
    ),
    "a growing cache": Case(
        decode,
        (P(), P(None, "tp"), P(None, "tp")),
        (P(), P(None, "tp")),
        lambda i: (randn(1, 4), randn(4, 4), [randn(1 + i, 4)] * 3),
        decode_alone,
    ),
    "a position": Case(put, (P(), P(), None), P(), lambda i: (randn(9, 2), randn(1, 2), i), put),
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that are checked for sizes as they are."""
    names: list[str] = []

    def counted(call: Any, strictness: Any) -> Any:
        names.append(call.name)
        return verify(call, strictness)

    monkeypatch.setattr(checked, "verify", counted)
    return names


def mapped(case: Case, check: Any, mesh: Any = MESH) -> Callable[..., Any]:
    specs = {"in_specs": case.in_specs, "out_specs": case.out_specs}
    return shard_map(case.body, mesh=mesh, check=check, **specs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_many_sizes_cost_three_checks_and_have_the_values_of_one_device(
    name: str, check: Literal["local", "global"], exact: list[str]
) -> None:
    case = CASES[name]
    f = mapped(case, check)
    for number in range(8):
        args = case.arguments(number)
        torch.testing.assert_close(f(*args), case.expected(*args))
    assert len(exact) == 2  # the third derives


@pytest.mark.parametrize("check", CHECKS)
def test_a_cache_that_grows_by_tokens_after_prompts_is_derived_too(
    check: Literal["local", "global"], exact: list[str]
) -> None:
    f, w, cache = mapped(CASES["a growing cache"], check), randn(4, 4), [randn(0, 4)] * 3
    for length in (3, 1, 1, 1, 1, 5, 1, 1, 1):
        x = randn(length, 4)
        got, expected = f(x, w, cache), decode_alone(x, w, cache)
        torch.testing.assert_close(got, expected)
        cache = expected[1]
    assert len(exact) == 4  # two prompts, and two tokens


@pytest.mark.parametrize("check", CHECKS)
def test_500_batch_sizes_cost_three_checks(
    check: Literal["local", "global"], exact: list[str]
) -> None:
    @shard_map(
        mesh=make_mesh((1024,), ("dp",), kind="abstract"),
        in_specs=(P("dp"), P()),
        out_specs=P("dp"),
        check=check,
    )
    def f(x: Any, w: Any) -> Any:
        return (x @ w).softmax(-1).reshape(x.shape[0], -1) * 2

    for number in range(2, 502):
        assert f(ShapeDtype((1024 * number, 4)), ShapeDtype((4, 4))).shape == (1024 * number, 4)
    assert len(exact) == 2  # the third derives


@pytest.mark.sample(3)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_the_program_at_a_size_is_what_a_check_of_that_size_finds(
    name: str, check: Literal["local", "global"], exact: list[str]
) -> None:
    case = CASES[name]
    f = mapped(case, check)
    for number in range(3):
        trace(f, *case.arguments(number))
    args = case.arguments(8)
    found = trace(f, *args)
    assert len(exact) == 2
    assert str(found) == str(trace(mapped(case, check), *args))
    assert len(exact) == 3


# ------------------------------------------------------------- what depends on a size in hiding


def gathered(x: Tensor) -> Tensor:
    return all_gather(x, "dp", dim=0, dst=I)


def catches(x: Tensor) -> bool:
    try:
        return bool(x.view(10, 2).dim())
    except RuntimeError:
        return False


def matches(x: Tensor) -> bool:
    match x.shape[0]:
        case 10:
            return True
        case _:
            return False


HIDDEN: Final[dict[str, Callable[[Tensor], bool]]] = {
    "comparison": lambda x: x.shape[0] > 8,
    "remainder": lambda x: x.shape[0] % 5 == 0,
    "equality": lambda x: x.shape[0] == 10,
    "class": lambda x: isinstance(n := x.size(0), int) and n > 8,
    "text": lambda x: f"{x.shape[0]}" == "10",
    "key": lambda x: {10: True}.get(x.shape[0], False),
    "count": lambda x: len(range(x.shape[0])) == 10,
    "float": lambda x: x.shape[0] ** 0.5 > 3,
    "entries": lambda x: x.numel() > 16,
    "length": lambda x: len(x) > 8,
    "rows": lambda x: len(x.unbind(0)) > 8,
    "match": matches,
    "bool": lambda x: bool(x.shape[0] // 10),
    "catching": catches,
}
"""Questions that are true of a rank's 10 rows, and of no number of them before."""


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.filterwarnings("ignore:.*checked again:UserWarning")
def test_a_size_for_which_the_body_is_wrong_is_refused(name: str) -> None:
    def body(x: Tensor) -> Tensor:
        return x if HIDDEN[name](x) else gathered(x)

    f = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P())
    for size in (2, 3, 4, 6, 7):
        x = randn(2 * size, 2)
        torch.testing.assert_close(f(x), x)
    # A run would depart from a wrong verdict, and be checked again: a check has the verdict alone.
    with pytest.raises(ShardTypeError, match="does not match out_specs"):
        check_program(f, randn(20, 2))


def test_a_number_for_which_the_body_is_wrong_is_refused() -> None:
    def body(x: Tensor, step: int) -> Tensor:
        return gathered(x) if step % 7 else x

    f = shard_map(body, mesh=MESH, in_specs=(P("dp"), None), out_specs=P())
    for step in (1, 2, 3, 4, 5, 6, 8):
        f(randn(4), step)
    with pytest.raises(ShardTypeError):
        check_program(f, randn(4), 14)


def test_sizes_that_were_equal_may_differ() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return gathered(x + y) if x.shape == y.shape else gathered(x)

    f = shard_map(body, mesh=MESH, in_specs=(P("dp"), P("dp")), out_specs=P())
    for size in (4, 6, 8, 10):
        f(randn(size), randn(size))
    x = randn(12)
    torch.testing.assert_close(f(x, randn(14)), x)


def test_sizes_of_one_are_programs_of_their_own() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return gathered(x + y)

    f = shard_map(body, mesh=MESH, in_specs=(P("dp"), P("dp")), out_specs=P())
    for size in (4, 6, 8, 10):
        f(randn(size, 3), randn(size, 3))
    x, y = randn(2, 3), randn(2, 3)
    torch.testing.assert_close(f(x, y), x + y)
    torch.testing.assert_close(f(randn(2, 3) * 0 + x, y), x + y)


@pytest.mark.filterwarnings("ignore:.*checked again:UserWarning")
def test_a_size_that_is_kept_stays_a_number() -> None:
    kept: dict[str, Any] = {}

    def body(x: Tensor) -> Tensor:
        kept["size"] = x.shape[0]
        return gathered(x)

    f = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P())
    for size in (4, 6, 8, 10, 12):
        f(randn(size))
        assert type(kept["size"]) is int


def test_sizes_come_back_as_numbers() -> None:
    def body(x: Tensor) -> Any:
        return gathered(x), x.shape[0] * 2, 1 / x.shape[0]

    f = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=(P(), None, None))
    for size in (4, 6, 8, 10):
        assert f(randn(size))[1:] == (size, 2 / size)


def test_a_change_of_what_the_body_refers_to_is_checked_anew(exact: list[str]) -> None:
    sums = True

    def body(x: Tensor) -> Tensor:
        return gathered(x) if sums else x

    f = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P())
    for size in (4, 6, 8, 10):
        f(randn(size))
    sums = False
    with pytest.raises(ShardTypeError):
        f(randn(12))


# ------------------------------------------------------------------------------ processes


def in_worker() -> tuple[int, list[float]]:
    """Decodes with a growing cache; the number of checks, and differences from one device."""
    case, errors = CASES["a growing cache"], []
    with mock.patch.object(checked, "verify", wraps=checked.verify) as counted:
        f = mapped(case, "global", make_mesh((1, 2), ("dp", "tp")))
        for length in (1, 2, 3, 4, 9):
            torch.manual_seed(length)
            x, w, cache = randn(1, 4), randn(4, 4), [randn(length, 4)] * 2
            found, expected = f(x, w, cache)[0], decode_alone(x, w, cache)[0]
            errors.append(float((found - expected).abs().max()))
    return counted.call_count, errors


def test_processes_agree_on_sizes_that_were_not_checked(gloo: Gloo) -> None:
    for count, errors in gloo(2).run(in_worker):
        assert count == 2
        assert max(errors) < 1e-12


@pytest.mark.parametrize("kind", [float, np.float32, Decimal])
@pytest.mark.parametrize("sizes", [(20,), (4, 6, 8, 10)])
def test_minus_zero_is_another_number_than_zero(
    kind: Callable[[str], Any], sizes: Sequence[int]
) -> None:
    def body(x: Tensor, number: Any) -> Tensor:
        return all_reduce(x.sum(0), "dp", dst=I) if copysign(1, number) > 0 else x.sum(0)

    f = shard_map(body, mesh=MESH, in_specs=(P("dp"), None), out_specs=P())
    for size in sizes:
        check_program(f, randn(size, 3), kind("0.0"))
    with pytest.raises(ShardTypeError, match="varies"):
        check_program(f, randn(20, 3), kind("-0.0"))
