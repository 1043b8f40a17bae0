"""Mistakes of newcomers to per-rank programs, each told by its cause; whole texts are golden.

The repair that a text proposes has been tried: the program is accepted with it, on one device too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    CollectiveError,
    I,
    OptimizerError,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_group,
    axis_index,
    axis_size,
    broadcast,
    convert,
    lax,
    make_mesh,
    random,
    shard_map,
    shift,
    value_and_grad,
)
from shardmap_torch.optim import clip_by_global_norm, sgd, sync_gradients
from tests.support.golden import hold, told

pytestmark = pytest.mark.usefixtures("repairs")

Params = dict[str, Tensor]
Body = Callable[[Params, Tensor, Tensor], Any]

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
W = {"up": torch.ones(8, 16), "down": torch.ones(16, 8), "b": torch.zeros(8)}
SPECS = {"up": P(None, "tp"), "down": P("tp"), "b": P()}
X = torch.ones(8, 8)


def forward(w: Params, x: Tensor) -> Tensor:
    hidden = torch.tanh(convert(x, "tp", src=I, dst=R) @ w["up"])
    return all_reduce(hidden @ w["down"], "tp", dst=I) + w["b"]


def forgets_the_all_reduce_of_a_row_parallel_layer(w: Params, x: Tensor, y: Tensor) -> Any:
    def loss(w: Params) -> Tensor:
        hidden = torch.tanh(convert(x, "tp", src=I, dst=R) @ w["up"])
        out = hidden @ w["down"] + w["b"]
        return all_reduce((out - y).square().mean(), "dp", op="mean", dst=I)

    value, grads = value_and_grad(loss)(w)
    grads = sync_gradients(grads, SPECS, "dp")
    return {name: w[name] - 0.1 * grads[name] for name in w}, value


def sums_gradients_of_each_rank_s_mean(w: Params, x: Tensor, y: Tensor) -> Any:
    def loss(w: Params) -> Tensor:
        return (forward(w, x) - y).square().mean()

    value, grads = value_and_grad(loss)(w)
    grads = sync_gradients(grads, SPECS, "dp")
    return {name: w[name] - 0.1 * grads[name] for name in w}, value


def returns_each_rank_s_mean(w: Params, x: Tensor, y: Tensor) -> Any:
    return (forward(w, x) - y).square().mean()


def returns_rows_as_if_they_were_columns(w: Params, x: Tensor, y: Tensor) -> Any:
    return forward(w, x)


def calls_backward(w: Params, x: Tensor, y: Tensor) -> Any:
    loss = all_reduce((forward(w, x) - y).square().mean(), "dp", op="mean", dst=I)
    loss.backward()
    return loss


def chunks_rows_for_microbatches_with_dropout(w: Params, x: Tensor, y: Tensor) -> Any:
    total = torch.zeros(())
    for at, (rows, goals) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        key = random.fold_in(random.key(0), at)
        out = random.dropout(key, forward(w, rows), 0.1, spec=P("dp"))
        total = total + all_reduce((out - goals).square().mean(), "dp", op="mean", dst=I) / 2
    return total


def shifts_what_all_ranks_have(w: Params, x: Tensor, y: Tensor) -> Any:
    return forward(w, x) + shift(w["b"], "tp", 1)


def steps_by_gradients_of_one_loss_that_are_not_summed(w: Params, x: Tensor, y: Tensor) -> Any:
    def loss(w: Params) -> Tensor:
        return all_reduce((forward(w, x) - y).square().mean(), "dp", op="mean", dst=I)

    value, grads = value_and_grad(loss)(w)
    grads, _ = clip_by_global_norm(grads, SPECS)
    return {name: w[name] - 0.1 * grads[name] for name in w}, value


def steps_by_gradients_of_each_rank_s_loss(w: Params, x: Tensor, y: Tensor) -> Any:
    _, grads = value_and_grad(lambda w: (forward(w, x) - y).square().mean())(w)
    return {name: w[name] - 0.1 * grads[name] for name in w}


def averages_a_mean_again(w: Params, x: Tensor, y: Tensor) -> Any:
    mean = all_reduce((forward(w, x) - y).square().mean(), "dp", op="mean", dst=I)
    return mean / axis_size("dp")


def averages_summed_gradients(w: Params, x: Tensor, y: Tensor) -> Any:
    def loss(w: Params) -> Tensor:
        return all_reduce((forward(w, x) - y).square().mean(), "dp", op="mean", dst=I)

    grads = sync_gradients(value_and_grad(loss)(w)[1], SPECS, "dp")
    return {name: w[name] - 0.1 * grads[name] / axis_size("dp") for name in w}


def takes_the_rows_of_rank_1(w: Params, x: Tensor, y: Tensor) -> Any:
    return forward(w, x - broadcast(x[:1], "dp", 1, dst=R))


def takes_the_rows_of_rank_0(w: Params, x: Tensor, y: Tensor) -> Any:
    return forward(w, x - broadcast(x, "dp", 0, dst=R))


def takes_rows_by_their_global_numbers(w: Params, x: Tensor, y: Tensor) -> Any:
    """Mends `takes_the_rows_of_rank_1` as its error says."""
    return forward(w, x - all_gather(x, "dp", dim=0, dst=R)[2:3])


def crops_by_torch_s_generator(w: Params, x: Tensor, y: Tensor) -> Any:
    at = int(torch.randint(0, 3, ()))
    return forward(w, x.roll(at, 0))


def logs_a_loss(w: Params, x: Tensor, y: Tensor) -> Any:
    loss = (forward(w, x) - y).square().mean()
    print(loss.item())
    return all_reduce(loss, "dp", op="mean", dst=I)


def normalizes_by_means_of_parts(w: Params, x: Tensor, y: Tensor) -> Any:
    x = x - x.mean(0)
    return forward(w, x)


def sums_twice_in_a_line(w: Params, x: Tensor, y: Tensor) -> Any:
    loss = (forward(w, x) - y).square().sum()
    return all_reduce(all_reduce(loss, "dp", dst=I), "dp", dst=I)


def sums_over_another_axis(w: Params, x: Tensor, y: Tensor) -> Any:
    return all_reduce((forward(w, x) - y).square().sum(), "tp", dst=I)


COUNTER = torch.zeros(())


def counts_in_a_loss(w: Params, x: Tensor, y: Tensor) -> Any:
    def loss(w: Params) -> Tensor:
        COUNTER.add_(1)
        return all_reduce((forward(w, x) - y).square().mean(), "dp", op="mean", dst=I)

    return value_and_grad(loss)(w)[0]


def compares_ids_with_the_rows_of_a_shard(w: Params, x: Tensor, y: Tensor) -> Any:
    ids, table = x.long(), w["down"]
    mine = (ids >= 0) & (ids < table.shape[0])
    rows = functional.embedding(ids.clamp(0, table.shape[0] - 1), table)
    return all_reduce(torch.where(mine[..., None], rows, 0.0), "tp", dst=I)


def clamps_ids_to_the_rows_of_a_shard(w: Params, x: Tensor, y: Tensor) -> Any:
    rows = functional.embedding(x.long().clamp(max=w["down"].shape[0] - 1), w["down"])
    return all_reduce(rows, "tp", dst=I)


def looks_positions_of_a_shard_up_by_an_index(w: Params, x: Tensor, y: Tensor) -> Any:
    return forward(w, x + torch.eye(8)[torch.arange(x.shape[0])])


MISTAKES: dict[Body, Any] = {
    compares_ids_with_the_rows_of_a_shard: P("dp"),
    clamps_ids_to_the_rows_of_a_shard: P("dp"),
    looks_positions_of_a_shard_up_by_an_index: P("dp"),
    counts_in_a_loss: P(),
    steps_by_gradients_of_one_loss_that_are_not_summed: (SPECS, P()),
    steps_by_gradients_of_each_rank_s_loss: SPECS,
    forgets_the_all_reduce_of_a_row_parallel_layer: (SPECS, P()),
    sums_gradients_of_each_rank_s_mean: (SPECS, P()),
    returns_each_rank_s_mean: P(),
    returns_rows_as_if_they_were_columns: P("tp"),
    calls_backward: P(),
    chunks_rows_for_microbatches_with_dropout: P(),
    shifts_what_all_ranks_have: P("dp"),
    averages_a_mean_again: P(),
    averages_summed_gradients: SPECS,
    takes_the_rows_of_rank_1: P("dp"),
    takes_the_rows_of_rank_0: P("dp"),
    crops_by_torch_s_generator: P("dp"),
    logs_a_loss: P(),
    normalizes_by_means_of_parts: P("dp"),
    sums_twice_in_a_line: P(),
    sums_over_another_axis: P(),
}


@pytest.mark.parametrize("body", MISTAKES, ids=lambda body: body.__name__)
def test_a_mistake_is_told_by_its_cause(body: Body) -> None:
    mapped = shard_map(
        body,
        mesh=MESH,
        in_specs=(SPECS, P("dp"), P("dp")),
        out_specs=MISTAKES[body],
        check="global",
    )
    with pytest.raises(ShardTypeError) as error:
        mapped(W, X, X)
    hold("mistakes.txt", body.__name__, str(error.value))


def test_of_gathered_packed_matrices_each_rank_takes_its_parts() -> None:
    def packed(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
        gate, up = (x @ w).chunk(2, dim=-1)
        return all_reduce((functional.silu(gate) * up) @ down, "tp", dst=I)

    specs = (P(), P(None, "tp"), P("tp"))
    mapped = shard_map(packed, mesh=MESH, in_specs=specs, out_specs=P(), check="global")
    with pytest.raises(ShardTypeError) as error:
        mapped(X, torch.randn(8, 32), W["down"])
    hold("mistakes.txt", "packed", str(error.value))


def test_rows_of_a_rank_are_rows_of_what_all_gather_gives() -> None:
    x = torch.randn(8, 8)
    mapped = partial(shard_map, in_specs=(SPECS, P("dp"), P("dp")), out_specs=P("dp"))
    mended = mapped(takes_rows_by_their_global_numbers, mesh=MESH, check="global")
    one = make_mesh((1, 1), ("dp", "tp"), kind="simulated")
    alone = mapped(takes_rows_by_their_global_numbers, mesh=one)
    torch.testing.assert_close(mended(W, x, x), alone(W, x, x))


def test_a_wrong_spec_that_torch_s_shapes_refuse_has_the_right_one_in_a_note() -> None:
    def loss(w: Params, x: Tensor, y: Tensor) -> Tensor:
        return all_reduce((forward(w, x) - y).square().mean(), "dp", op="mean", dst=I)

    f = shard_map(loss, mesh=MESH, in_specs=(SPECS, P("dp"), P()), out_specs=P(), check="global")
    with pytest.raises(RuntimeError) as error:
        f(W, X, X)
    _, first, second = error.value.__notes__[0].splitlines()
    assert first.startswith("  forward(w, x): float32[4, 8], from add at test_mistakes.py:")
    assert second == "  y: float32[8, 8], from input y (P())"
    assert error.value.__notes__[1:] == [
        "In the body of loss tensors are shards: w['down'] is [8, 8], a shard of [16, 8] by "
        "P('tp'); w['up'] is [8, 8], a shard of [8, 16] by P(None, 'tp'); x is [4, 8], a shard of "
        "[8, 8] by P('dp').",
        "Tried, and accepted also by check='global': P('dp') for y in in_specs",
    ]


def test_an_inner_function_may_name_the_mesh_that_it_runs_on() -> None:
    def inner(x: Tensor) -> Tensor:
        return all_reduce(x.sum(), "tp", dst=I)

    def body(x: Tensor) -> Tensor:
        own = shard_map(inner, mesh=MESH, in_specs=P("tp"), out_specs=P(), axis_names={"tp"})
        return all_reduce(own(x), "dp", dst=I)

    mapped = shard_map(
        body, mesh=MESH, in_specs=P("dp"), out_specs=P(), axis_names={"dp"}, check="global"
    )
    assert mapped(torch.arange(8.0)).item() == 28.0


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.BatchNorm1d(8),
        torch.nn.BatchNorm1d(8, track_running_stats=False),
    ],
)
def test_a_batch_norm_says_what_to_do_about_its_statistics(norm: Any) -> None:
    f = shard_map(lambda x: norm(x), mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), check="global")
    with told(ShardTypeError):
        f(X)


# ---------------------------------------------------------- repairs by advice, not by a place

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
TARGETS = torch.tensor([0, 5, 1, 1, 4, 2, 3, 3])
TWO = make_mesh((2,), ("dp",), kind="simulated")
COLUMNS, LINES = P(None, "dp"), P("dp")


def outcome(body: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Tensor) -> Any:
    """Returns a result on two ranks, and the gradient of the first argument."""
    x = args[0].clone().requires_grad_()
    options = {"mesh": TWO, "in_specs": in_specs, "out_specs": out_specs, "check": "global"}
    y = shard_map(body, **options)(x, *args[1:])
    (y * torch.linspace(0, 1, y.numel()).double().view(y.shape)).sum().backward()
    return y.detach(), x.grad


def smoothed(logits: Tensor, targets: Tensor, op: Any = "sum") -> Tensor:
    top = all_reduce(logits.detach().amax(-1), "dp", op="max", dst=R)
    total = all_reduce((logits - top[:, None]).exp().sum(-1), "dp", dst=I)
    ids = targets - axis_index("dp") * logits.shape[1]
    owned = (ids >= 0) & (ids < logits.shape[1])
    own = torch.where(owned, logits.gather(1, (ids * owned)[:, None])[:, 0], 0)
    hit = all_reduce(own, "dp", dst=I)
    mean = all_reduce(logits.mean(-1), "dp", op=op, dst=I)
    return (total.log() + convert(top, "dp", src=R, dst=I) - 0.9 * hit - 0.1 * mean).mean()


def normalized(x: Tensor) -> Tensor:
    m = all_reduce(x.mean(1, keepdim=True), "dp", op="mean", dst=R)
    v = all_reduce((x - m).square().mean(1, keepdim=True), "dp", op="mean", dst=R)
    return (x - m) / (v + 1e-5).sqrt()


def accumulated(x: Tensor) -> Tensor:
    return torch.stack([part.square().mean() for part in x.split(3)]).mean()


ADVISED: dict[str, tuple[Any, Any, Any, Any, tuple[Tensor, ...]]] = {
    "label smoothing by hand": (
        smoothed,
        lambda logits, targets: smoothed(logits, targets, "mean"),
        lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1),
        ((COLUMNS, P()), P()),
        (ROWS, TARGETS),
    ),
    "layer norm of columns": (
        lambda x: functional.layer_norm(x, x.shape[1:]),
        normalized,
        lambda x: functional.layer_norm(x, (6,)),
        (COLUMNS, COLUMNS),
        (ROWS,),
    ),
    "gradient of a maximum": (
        lambda x: x * all_reduce(x.amax(), "dp", op="max", dst=R),
        lambda x: x * all_gather(x, "dp", dim=0, dst=R).amax(),
        lambda x: x * x.amax(),
        (LINES, LINES),
        (ROWS,),
    ),
    "a value of all beside rows": (
        lambda x: all_reduce(x.sum(0), "dp", dst=I) * x,
        lambda x: all_reduce(x.sum(0), "dp", dst=R) * x,
        lambda x: x.sum(0) * x,
        (LINES, LINES),
        (ROWS,),
    ),
}
"""A wrong function, the one that its error asks for, and the same on one device."""


@pytest.mark.parametrize("name", ADVISED)
def test_what_an_error_advises_is_right_when_it_is_followed(name: str) -> None:
    wrong, repaired, one, specs, args = ADVISED[name]
    with pytest.raises(ShardTypeError) as error:
        outcome(wrong, *specs, *args)
    hold("mistakes.txt", name, str(error.value))
    found, grad = outcome(repaired, *specs, *args)
    x = args[0].clone().requires_grad_()
    expected = one(x, *args[1:])
    (
        expected * torch.linspace(0, 1, expected.numel()).double().view(expected.shape)
    ).sum().backward()
    torch.testing.assert_close((found, grad), (expected.detach(), x.grad))


@pytest.mark.parametrize(
    "body",
    [
        lambda x: all_reduce(x, "tpp", dst=I),
        lambda x: x / axis_size("tpp"),
        lambda x: all_reduce(x, "dp", dst=I, op="avg"),  # type: ignore[arg-type]
        lambda x: sgd(0.1).update(x, (x, x.sum()), {}),
        lambda x: sgd(0.1).update(x, {"step": x}, x),
    ],
)
def test_an_argument_that_cannot_work_is_told_with_its_line(body: Callable[..., Any]) -> None:
    f = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    with pytest.raises((CollectiveError, OptimizerError)) as error:
        f(X)
    line = body.__code__.co_firstlineno
    assert f"{error.value}".split("\n")[1].startswith(f"  at test_mistakes.py:{line}: lambda x:")


def test_a_factor_that_is_no_fraction_is_told_in_digits() -> None:
    with pytest.raises(ShardTypeError, match=r"it is 1\.41421 times that value, because of div"):
        outcome(lambda x: x / x.shape[0] ** 0.5, LINES, LINES, ROWS)


def averages_by_torch(x: Tensor) -> Tensor:
    y = x.square().sum()
    dist.all_reduce(y, dist.ReduceOp.AVG, group=axis_group(TWO, "dp"))
    return y


@pytest.mark.parametrize(
    "body",
    [
        averages_by_torch,
        lambda x: lax.pmean(x.square().sum(), "dp"),
    ],
)
def test_a_mean_of_what_is_to_be_added_is_told_as_it_is_written(body: Any) -> None:
    options: Any = {"mesh": TWO, "in_specs": LINES, "out_specs": P(), "check": "global"}
    mapped: Any = shard_map(body, **options)
    with told(ShardTypeError):
        mapped(ROWS)


def test_microbatches_of_rows_are_told_of_parts() -> None:
    with pytest.raises(ShardTypeError) as error:
        outcome(lambda x: all_reduce(accumulated(x), "dp", op="mean", dst=I), LINES, P(), ROWS)
    hold("mistakes.txt", "microbatches of rows", str(error.value))
