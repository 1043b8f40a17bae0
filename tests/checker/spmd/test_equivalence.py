"""check="global": the forward must be that of the same program on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    S,
    ShardTypeError,
    SpecError,
    all_gather,
    all_reduce,
    assert_type,
    assume_constant,
    axis_index,
    axis_size,
    check_program,
    checkpoint,
    convert,
    explain,
    local_region,
    make_mesh,
    shard_map,
    typeof,
)
from shardmap_torch.checker.verify import repairing
from tests.checker.support.accepted import RANKS, accepted
from tests.checker.support.other_programs import (
    ARGS,
    MESH,
    WRONG,
    Body,
    W,
    X,
    bias_before_reduction,
    mapped,
)
from tests.support.golden import hold, told


def mlp(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce(torch.tanh(x @ w + b) @ w2, "tp", dst=I) + b2


def heads(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = (x @ w + b).unflatten(-1, (-1, 4))  # 8 heads, 2 on each rank
    y: Tensor = all_reduce(h.softmax(-1).flatten(1) @ w2, "tp", dst=I) + b2
    return y


def batched_heads(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    # A product of four dims merges batch and heads, both of them sharded.
    h = (x @ w + b).unflatten(0, (-1, 2)).unflatten(-1, (-1, 4)).transpose(1, 2)
    h = (h @ h.mT) @ h
    y: Tensor = all_reduce(h.transpose(1, 2).flatten(2).flatten(0, 1) @ w2, "tp", dst=I) + b2
    return y


def inner_gradient(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return all_reduce((x @ w + b).square().sum(), ("dp", "tp"), dst=I)

    gradient = all_reduce(torch.func.grad(loss)(x), "tp", dst=R)  # parts of it before
    return mlp(x - 0.1 * gradient, w, b, w2, b2)


def region_recomputed(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    squash = local_region(torch.tanh, (P("dp", "tp"),), P("dp", "tp"))

    def loss(x: Tensor) -> Tensor:
        total = checkpoint(lambda x: squash(x @ w).square().sum(), x)
        return all_reduce(total, ("dp", "tp"), dst=I)

    gradient = all_reduce(torch.func.grad(loss)(x), "tp", dst=R)
    return mlp(x - gradient, w, b, w2, b2)


def dropout_of_whole(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    # One mask on all ranks of tp, over which x is equal.
    x = torch.nn.functional.dropout(convert(x, "tp", src=I, dst=R), 0.5)
    return all_reduce(x @ w @ w2, "tp", dst=I)


RIGHT = (
    mlp,
    heads,
    batched_heads,
    inner_gradient,
    region_recomputed,
)


def name_of(body: Body) -> str:
    return body.__name__


def test_accepts_one_dropout_mask_for_what_ranks_share() -> None:
    check_program(mapped(dropout_of_whole, P("dp")), *ARGS)


@pytest.mark.sample(10)
@pytest.mark.parametrize("body", RIGHT, ids=name_of)
def test_accepts_one_device_programs(body: Body) -> None:
    accepted(body, P("dp"))


@pytest.mark.sample(12)
@pytest.mark.parametrize("body", WRONG, ids=name_of)
def test_rejects_what_is_another_program_on_one_device(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local strictness accepts it."""
    monkeypatch.setattr(repairing, "_TRIES", 2)
    check_program(mapped(body, P("dp"), check="local"), *ARGS)
    with pytest.raises(ShardTypeError) as caught:
        check_program(mapped(body, P("dp")), *ARGS)
    hold("other_programs.txt", name_of(body), str(caught.value))


# A number that is another one where every axis has one rank, made of a shard h in many ways.
OF_LOCAL_SIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda h: h * h.shape[1],
    "power": lambda h: h ** h.shape[1],
    "list": lambda h: torch._foreach_mul([h], h.shape[1])[0],
    "full": lambda h: h * torch.full((1,), h.shape[1], dtype=h.dtype),
    "full_like": lambda h: h * torch.full_like(h, h.shape[1]),
    "new_full": lambda h: h * h.new_full((1,), h.shape[1]),
    "fill_": lambda h: h * torch.zeros(1, dtype=h.dtype).fill_(h.shape[1]),
    "literal": lambda h: h * torch.tensor([h.shape[1]], dtype=h.dtype),
    "count": lambda h: h * torch.ones_like(h).sum(),
    "count of ones": lambda h: h * torch.ones(h.shape[1], dtype=h.dtype).sum(),
    "count of one": lambda h: h * torch.ones(1, 1, dtype=h.dtype).expand(h.shape).sum(),
    "product of ones": lambda h: h * (h.new_ones(1, h.shape[1]) @ h.new_ones(h.shape[1], 1)),
    "positions": lambda h: h * torch.ones_like(h).cumsum(1),
    "linspace": lambda h: h * torch.linspace(0, 1, h.shape[1], dtype=h.dtype),
    "first": lambda h: h * torch.arange(64, dtype=h.dtype)[: h.shape[1]],
    "one of": lambda h: h * torch.arange(64, dtype=h.dtype)[h.shape[1]],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", OF_LOCAL_SIZE)
def test_no_number_of_local_size_passes(name: str) -> None:
    def body(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h: Tensor = x @ w
        return all_reduce(OF_LOCAL_SIZE[name](h) @ w2, "tp", dst=I)

    values = [value.detach() for value in ARGS]
    check_program(mapped(body, P("dp"), check="local"), *values)
    with pytest.raises(ShardTypeError, match="check='global'"):
        check_program(mapped(body, P("dp")), *values)


# ------------------------------------------------------------------------------- boundaries


def swapped(x: Tensor) -> Tensor:
    return all_gather(all_gather(x, "dp", dim=0, dst=I), "tp", dim=0, dst=I)


INNER = P(None, "tp"), P("tp")
RESULTS: dict[str, tuple[Callable[..., Tensor], Any, P, str]] = {
    "sharded in another way": (
        lambda x: x * 2,
        *(P("dp"), P(None, "dp"), r"dim 0 is sharded over 'dp', and .* promises unsharded"),
    ),
    "axes of a dim in another order": (
        swapped,
        *(P(("dp", "tp")), P(), "puts dim 0 together over 'tp'"),
    ),
    "an axis in two dims": (
        lambda x: x @ x.T,
        *(P("tp"), P("tp"), "'tp' shards two dims of the result"),
    ),
    "tiles": (lambda x: x * 2, P(), P("dp"), "promises sharded over 'dp'"),
    "unfinished": (lambda x, w: x @ w, INNER, P("tp"), "a pending sum"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_lies_otherwise_is_refused(name: str) -> None:
    body, in_specs, out_specs, text = RESULTS[name]
    f = shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check="global")
    with pytest.raises(ShardTypeError, match=text):
        f(*(X, W)[: 1 + (in_specs == INNER)])


def test_unknown_strictness() -> None:
    with pytest.raises(SpecError, match="'global', not 'strict'"):
        shard_map(lambda x: x, mesh=MESH, in_specs=P(), out_specs=P(), check="strict")  # type: ignore[call-overload]


# ------------------------------------------------------------------------- types and regions


def test_types_have_dims() -> None:
    seen: list[Any] = assume_constant([])  # a check undoes other changes

    def body(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h = assert_type(x @ w, {"dp": S(0), "tp": S(1)})
        seen.append(dict(typeof(h @ w2)))
        return all_reduce(h @ w2, "tp", dst=I)

    mapped(body, P("dp"))(*ARGS)
    assert seen[-1] == {"dp": S(0), "tp": Partial}

    def wrong(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return all_reduce(assert_type(x @ w, {"tp": S(0)}) @ w2, "tp", dst=I)

    with pytest.raises(ShardTypeError, match=r"expects S\(0\) over 'tp', but the value is S\(1\)"):
        mapped(wrong, P("dp"))(*ARGS)


def own_rows(table: Tensor, ids: Tensor) -> Tensor:
    local = ids - axis_index("tp") * table.shape[0]
    owned = (local >= 0) & (local < table.shape[0])
    return table[local * owned] * owned.unsqueeze(1)


rows = local_region(own_rows, (P("tp"), P()), P(partial={"tp"}))


def embed(table: Tensor, ids: Tensor) -> Tensor:
    return all_reduce(rows(table, ids), "tp", dst=I)


def test_region_with_wrong_arguments() -> None:
    f = shard_map(
        embed, mesh=MESH, in_specs=(P(None, "tp"), P()), out_specs=P(None, "tp"), check="global"
    )
    with pytest.raises(
        ShardTypeError, match=r"dim 0 is unsharded, and .* promises sharded over 'tp'"
    ):
        f(torch.randn(8, 4), torch.tensor([0]))


def test_region_with_wrong_promise() -> None:
    promised = local_region(lambda x: x * axis_index("tp"), (P(),), P())
    f = shard_map(promised, mesh=MESH, in_specs=P(), out_specs=P("tp"))
    with pytest.raises(ShardTypeError, match=r"over 'tp' a result is V, and"):
        f(X)


def test_region_with_wrong_tree() -> None:
    promised = local_region(lambda x: x, (P("tp", None, "dp"),), P())
    f = shard_map(promised, mesh=MESH, in_specs=P(), out_specs=P())
    with pytest.raises(SpecError, match="is for more than 2 dims"):
        f(X)


def clipped(x: Tensor) -> Tensor:
    norm = all_reduce(x.square().sum(), "dp", dst=I).sqrt().item()
    return x / norm if norm > 1.0 else x


def averaged(x: Tensor) -> Tensor:
    return x * (all_reduce(x.sum(), "dp", dst=I).item() / x.shape[0])


def branching_on_size(x: Tensor) -> Tensor:
    return x * 2 if all_reduce(x.sum(), "dp", dst=I).item() > x.shape[0] else x


def test_numbers_taken_from_tensors() -> None:
    def checked(body: Body) -> Body:
        return shard_map(body, mesh=RANKS, in_specs=P("dp"), out_specs=P("dp"), check="global")

    torch.testing.assert_close(checked(clipped)(X), X / X.norm())
    with pytest.raises(ShardTypeError) as caught:
        checked(averaged)(X)
    assert "is (#1 / 4) on a rank and (#1 / 8) on one device.\n  at test_eq" in str(caught.value)
    with told(ShardTypeError):
        checked(branching_on_size)(X)


def total(x: Tensor) -> Any:
    return all_reduce(x.sum(), "dp", dst=I).item()


def test_a_number_may_be_returned_that_is_that_of_one_device() -> None:
    x = X.double()
    expected = x.sum().item()

    def found(body: Callable[..., Any]) -> Any:
        return shard_map(body, mesh=RANKS, in_specs=P("dp"), out_specs=None, check="global")(x)

    assert found(total) == pytest.approx(expected)
    assert found(lambda x: {"mean": total(x) / 8, "two": (total(x), 1 - total(x))}) == {
        "mean": pytest.approx(expected / 8),
        "two": (pytest.approx(expected), pytest.approx(1 - expected)),
    }
    with pytest.raises(ShardTypeError, match=r"out is <\(#1 / 4\)> on a rank and <\(#1 / 8\)> on"):
        found(lambda x: total(x) / x.shape[0])
    with pytest.raises(ShardTypeError, match="a Python value by item is not what it is on one"):
        found(lambda x: all_reduce(x.mean(), "dp", dst=I).item())
    with pytest.raises(ShardTypeError, match="where the program on one device has ended"):
        found(lambda x: total(x) if x.shape[0] < 8 else x.ndim // x.ndim)


# --------------------------------------------------------------------------------- examples


def test_explain_says_what_global_would_say() -> None:
    right, wrong = (
        str(explain(mapped(body, P("dp"), check="local"), *ARGS))
        for body in (mlp, bias_before_reduction)
    )
    assert "global: the same program on one device" in right
    assert "counted once per rank" in wrong


@pytest.mark.parametrize("ranks", [True, False])
def test_a_detach_that_only_ranks_or_only_one_device_come_to_is_refused(ranks: bool) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        scale = h.detach() if (axis_size("tp") > 1) is ranks else h
        return all_reduce((scale * h).sum(), "tp", dst=I)

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    specs = (P(None, "tp"), P())
    f = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check="global")
    with pytest.raises(ShardTypeError, match="detach"):
        f(torch.ones(4, 8, requires_grad=True), torch.ones(3, 4))
