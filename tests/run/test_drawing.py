"""Draws from the default generator are shared as they are typed, on every mesh."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardmap_torch import (
    Function,
    I,
    Mesh,
    P,
    R,
    ShardTypeError,
    TransformError,
    all_reduce,
    assume_constant,
    axis_size,
    check_program,
    checkpoint,
    convert,
    explain,
    grad,
    make_mesh,
    shard_map,
    typeof,
)
from shardmap_torch.core.threefry import threefry_of_ints
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

AXES = ("dp", "tp")
EVERYWHERE = P(AXES)
BOTH = P(*AXES)

# How each draw is made from x, which may vary; the shape does not depend on it.
OF_OPERAND: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout1d": lambda x: functional.dropout1d(x, 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: functional.rrelu(-x, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "bernoulli": lambda x: torch.bernoulli(x / (2 * x.max())),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "normal_": lambda x: x.new_empty(x.shape).normal_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "poisson": torch.poisson,
    "mean": lambda x: torch.normal(x),
}
FROM_NOTHING: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(2, 8),
    "randperm": lambda: torch.randperm(16).reshape(2, 8),
    "empty": lambda: torch.empty(2, 8).uniform_(),
    "zeros": lambda: torch.zeros(2, 8).bernoulli_(0.5),
}


def draw_all(mesh: Mesh) -> dict[str, Tensor]:
    """Every draw of an operand that is equal, differs over dp, or over both; of each rank."""
    names: list[str] = []

    def body(x: Tensor) -> tuple[Tensor, ...]:
        shared = x[0] * 0 + torch.arange(1.0, 9)  # varies
        equal = torch.arange(1.0, 9).repeat(2, 1)
        over = {"both": x[:2], "none": equal}
        found = []
        for name, draw in OF_OPERAND.items():
            for where, operand in over.items():
                names.append(f"{name} {where}")
                found.append(draw(operand).float())
        for name, make in FROM_NOTHING.items():
            names.append(f"{name} nothing")
            found.append(make().float())
        names.append("again")
        found.append(functional.dropout(shared, 0.5).float())
        return tuple(found)

    def over_dp(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)

    x = torch.arange(1.0, 1 + 8 * 8).reshape(8, 8)
    torch.manual_seed(5 + 100 * mesh.rank)
    out = shard_map(body, mesh=mesh, in_specs=EVERYWHERE, out_specs=EVERYWHERE)(x)
    found = dict(zip(names[-len(out) :], map(global_value, out), strict=True))
    mapped = shard_map(over_dp, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    found["dropout dp"] = global_value(mapped(x))
    found["next call"] = global_value(mapped(x))
    return found


def in_worker() -> dict[str, Tensor]:
    return draw_all(worker_mesh((2, 2), AXES))


@pytest.fixture(scope="module")
def simulated() -> dict[str, Tensor]:
    return draw_all(make_mesh((2, 2), AXES, kind="simulated"))


def by_rank(drawn: Tensor) -> list[tuple[float, ...]]:
    return [tuple(rank.flatten().tolist()) for rank in drawn.chunk(4)]


@pytest.mark.parametrize("name", OF_OPERAND)
def test_a_draw_is_shared_where_its_operand_is(name: str, simulated: dict[str, Tensor]) -> None:
    assert len(set(by_rank(simulated[f"{name} none"]))) == 1
    assert len(set(by_rank(simulated[f"{name} both"]))) == 4


@pytest.mark.parametrize("name", FROM_NOTHING)
def test_a_draw_from_nothing_is_each_rank_s_own(name: str, simulated: dict[str, Tensor]) -> None:
    assert len(set(by_rank(simulated[f"{name} nothing"]))) == 4


def test_calls_and_draws_of_one_call_differ(simulated: dict[str, Tensor]) -> None:
    assert not torch.equal(simulated["dropout dp"], simulated["next call"])
    assert not torch.equal(simulated["rand_like none"], simulated["bernoulli none"])


def test_processes_of_different_seeds_draw_what_simulated_ranks_draw(
    gloo: Gloo, simulated: dict[str, Tensor]
) -> None:
    for drawn in gloo(4).run(in_worker):
        assert drawn.keys() == simulated.keys()
        assert [n for n in drawn if not torch.equal(drawn[n], simulated[n])] == []


def test_a_seed_before_the_call_decides_and_the_generator_goes_on() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    f = shard_map(
        lambda x: functional.dropout(x, 0.5), mesh=mesh, in_specs=P("dp"), out_specs=P("dp")
    )
    x = torch.ones(64)
    torch.manual_seed(1)
    first, second = f(x), f(x)
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(f(x), first)
    assert torch.equal(f(x), second)
    assert torch.equal(torch.rand(()), after)
    # Each call takes one number, however much the ranks draw.
    torch.manual_seed(1)
    torch.randint(1 << 62, ())
    torch.randint(1 << 62, ())
    assert torch.equal(torch.rand(()), after)


MESH = make_mesh((2, 4), AXES, kind="abstract")


@pytest.mark.parametrize("check", ["local", "global"])
def test_both_strictnesses_type_draws_by_their_operand(check: Any) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        types.append(typeof(functional.dropout(x, 0.5)))
        types.append(typeof(torch.rand_like(w)))
        return x

    types: list[Any] = assume_constant([])
    mapped = shard_map(body, mesh=MESH, in_specs=(P("dp"), P()), out_specs=P("dp"), check=check)
    check_program(mapped, torch.ones(4, 8), torch.ones(8))
    shown = [{axis: str(kind) for axis, kind in each.items()} for each in types[-2:]]
    first = {"dp": "S(0)", "tp": "K"} if check == "global" else {"dp": "V", "tp": "K"}
    assert shown[0] == first
    assert shown[1] == {"dp": "K", "tp": "K"}


@pytest.mark.parametrize("draw", [functional.gumbel_softmax, functional.dropout, torch.rand_like])
def test_draws_like_a_sharded_operand_are_shards(draw: Callable[[Tensor], Tensor]) -> None:
    f = shard_map(draw, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), check="global")
    assert explain(f, torch.ones(4, 8)).one_device == "proven"


def test_dropout_of_an_invariant_value_keeps_its_gradient_right() -> None:
    """x is equal over tp, and so is its mask: the gradient needs no sum."""
    mesh = make_mesh((2, 2), AXES, kind="simulated")

    def body(x: Tensor) -> Tensor:
        return all_reduce(functional.dropout(x, 0.5).sum(), "dp", dst=I)

    x = torch.ones(8, requires_grad=True)
    loss = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P())(x)
    loss.backward()
    assert x.grad is not None
    assert set(x.grad.tolist()) <= {0.0, 2.0}
    assert x.grad.sum() == loss


ENTRIES: list[Any] = [
    functional.dropout,
    partial(functional.dropout, inplace=True),
    partial(functional.alpha_dropout, training=True),
    lambda x: torch.dropout(x, 0.5, True),
]
CHANNELS: list[Any] = [
    functional.dropout2d,
    partial(functional.dropout2d, inplace=True),
    partial(functional.feature_alpha_dropout, training=True),
    lambda x: functional.dropout1d(x.flatten(2)).view(x.shape),
    lambda x: functional.dropout3d(x.unsqueeze(4)).squeeze(4),
    lambda x: torch.feature_dropout(x, 0.5, True),
]


@pytest.mark.parametrize("derivative", [grad, torch.func.grad])
@pytest.mark.parametrize("drop", [*ENTRIES, *CHANNELS])
def test_dropout_in_a_gradient_that_a_body_takes(drop: Any, derivative: Any) -> None:
    """The gradient is the mask, of one number a channel where channels are dropped."""
    mesh = make_mesh((2, 2), AXES, kind="simulated")

    def body(x: Tensor) -> Tensor:
        mask: Tensor = derivative(lambda x: all_reduce(drop(x * 1.0).sum(), AXES, dst=I))(x)
        return mask

    f = shard_map(body, mesh=mesh, in_specs=BOTH, out_specs=BOTH, check="global")
    mask = f(torch.ones(4, 32, 3, 2))
    assert mask.unique().shape == (2,)
    is_by_channel = bool((mask == mask[..., :1, :1]).all())
    assert is_by_channel == (drop in CHANNELS)
    assert (
        len({tuple(part.flatten().tolist()) for row in mask.chunk(2) for part in row.chunk(2, 1)})
        == 4
    )


PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: (torch.rand((x.shape[0], 1)) + 0.5).floor(),
    "randn": lambda x: torch.randn(x.shape),
    "empty": lambda x: torch.empty((x.shape[0], 1)).bernoulli_(),
    "new_empty": lambda x: x.new_empty((x.shape[0], 1)).bernoulli_(),
}


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("spec", [P("dp"), P(("dp", "tp")), P("dp", "tp")])
def test_as_many_draws_as_a_rank_has_rows_are_a_shard_of_as_many_of_all(name: str, spec: P) -> None:
    """Ranks along an axis that shards nothing draw alike only where an operand says so."""
    f = shard_map(
        lambda x: x * PATHS[name](x), mesh=MESH, in_specs=spec, out_specs=spec, check="global"
    )
    shards = {axis for _, entry in spec.sharded_dims for axis in entry}
    is_of_rows = name != "randn" and spec == P("dp", "tp")
    if (shards == {*AXES} and not is_of_rows) or (name, spec) == ("new_empty", P("dp")):
        assert explain(f, torch.ones(8, 16)).one_device == "proven"
    else:
        with pytest.raises(ShardTypeError, match="every rank has a value of its own, from"):
            check_program(f, torch.ones(8, 16))


ALIKE: Final = PATHS["new_empty"]
Meshes: TypeAlias = tuple[Sequence[int], Sequence[str], P, Callable[[Tensor], Tensor]]
OTHER_AXES: Final[dict[str, Meshes]] = {
    "beside an axis of one rank": ((2, 1), AXES, P("dp"), PATHS["rand"]),
    "behind an axis of one rank": ((1, 2), AXES, P("tp"), PATHS["empty"]),
    "on one rank": ((1, 1), AXES, P("dp"), PATHS["rand"]),
    "between axes of one rank": ((1, 2, 1), ("a", "b", "c"), P("b"), PATHS["randn"]),
    "over two axes, the second first": ((2, 2), AXES, P(("tp", "dp")), PATHS["rand"]),
    "over axes of other sizes, the second first": ((2, 4), AXES, P(("tp", "dp")), PATHS["rand"]),
    "of two dims, the second axis first": ((2, 2), AXES, P("tp", "dp"), PATHS["randn"]),
    "alike over the first": ((2, 2), AXES, P("dp"), ALIKE),
    "alike over the second": ((2, 2), AXES, P("tp"), ALIKE),
    "alike over both, the second first": ((2, 2), AXES, P(("tp", "dp")), ALIKE),
    "alike over the last of three": ((2, 2, 2), ("a", "b", "c"), P("c"), ALIKE),
}


@pytest.mark.parametrize("name", OTHER_AXES)
def test_draws_by_rows_are_a_shard_whatever_other_axes_the_mesh_has(name: str) -> None:
    shape, axes, spec, draw = OTHER_AXES[name]
    mesh = make_mesh(shape, axes, kind="simulated")
    f = shard_map(lambda x: x * draw(x), mesh=mesh, in_specs=spec, out_specs=spec, check="global")
    assert explain(f, torch.ones(16, 16)).one_device == "proven"
    assert len(f(torch.ones(16, 16)).unique()) > 1


DIFFERENT: Final[dict[str, Meshes]] = {
    "an axis that shards nothing": ((2, 2), AXES, P("tp"), PATHS["rand"]),
    "an axis of another size": ((2, 4), AXES, P("dp"), PATHS["rand"]),
    "rows of another dim": ((2, 2), AXES, P(None, "dp"), lambda x: torch.rand(x.shape[1], 1)[:1]),
    "sums of as many as a rank has": ((2, 1), AXES, P("dp"), lambda x: sums_of_draws(x)),
}


def sums_of_draws(x: Tensor) -> Tensor:
    """Of half as many numbers twice the sum is another one, unlike of equal ones."""
    drawn = torch.rand(x.shape[0], x.shape[0]).sum(1, keepdim=True)
    return drawn * axis_size("dp")


@pytest.mark.parametrize("name", DIFFERENT)
def test_draws_that_are_no_shard_of_the_rows_are_refused(name: str) -> None:
    (shape, axes, spec, draw) = DIFFERENT[name]
    mesh = make_mesh(shape, axes, kind="abstract")
    f = shard_map(lambda x: x * draw(x), mesh=mesh, in_specs=spec, out_specs=spec, check="global")
    with told(ShardTypeError):
        check_program(f, torch.ones(16, 16))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, w: w.new_empty(x.shape[0], 1).uniform_(),
        lambda x, w: torch.rand_like(w.new_zeros(x.shape[0], 1)),
        lambda x, w: functional.dropout(w.new_ones(x.shape[0], 1)),
    ],
)
def test_equal_draws_are_no_shards_of_as_many_of_all(draw: Callable[..., Tensor]) -> None:
    """Both ranks have the same two numbers, and one device has four."""
    mesh = make_mesh((2,), ("dp",), kind="abstract")
    f = shard_map(
        lambda x, w: x * draw(x, w),
        mesh=mesh,
        in_specs=(P("dp"), P()),
        out_specs=P("dp"),
        check="global",
    )
    with pytest.raises(ShardTypeError, match="all ranks draw the same, and it is sharded"):
        check_program(f, torch.ones(4, 2), torch.ones(3))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_generator_of_the_body_may_draw_the_same_on_each_rank(num_ranks: int) -> None:
    def body(x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5, generator=generator)

    generator = torch.Generator()
    mesh = make_mesh((num_ranks,), ("dp",), kind="abstract")
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check="global")
    if num_ranks == 1:
        check_program(f, torch.ones(4))
    else:
        with pytest.raises(ShardTypeError, match="each rank may have one with the same seed"):
            check_program(f, torch.ones(4))


def test_dropout_of_channels_over_a_sharded_position_is_refused() -> None:
    """Each rank would drop other channels, where one device drops whole ones."""
    f = shard_map(
        functional.dropout2d,
        mesh=MESH,
        in_specs=P(None, None, "dp"),
        out_specs=P(None, None, "dp"),
        check="global",
    )
    with pytest.raises(ShardTypeError, match="takes a part of dim 2, which is sharded"):
        check_program(f, torch.ones(2, 3, 4, 5))


@pytest.mark.parametrize("check", [True, "global"])
def test_draws_in_torchs_own_checkpoint_are_refused(check: Any) -> None:
    """It would take the gradient of another mask."""
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    f = shard_map(
        lambda x: torch_checkpoint(functional.dropout, x, use_reentrant=False),
        mesh=mesh,
        in_specs=P("dp"),
        out_specs=P("dp"),
        check=check,
    )
    with pytest.raises(ShardTypeError, match="draws within torch's own checkpoint"):
        f(torch.ones(8, requires_grad=True))
    around: Any = shard_map(functional.dropout, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    x = torch.ones(8, requires_grad=True)
    y = torch_checkpoint(around, x, use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def checkpointed(mesh: Mesh) -> None:
    """The run again of a checkpoint draws what the first run drew, also after other draws."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        x = functional.dropout(x, 0.2)
        y = checkpoint(lambda x, w: functional.dropout(x, 0.5) * functional.dropout(w, 0.5), x, w)
        return functional.dropout(y, 0.2)

    x = torch.ones(8, 16, requires_grad=True)
    w = torch.ones(16, requires_grad=True)
    f = shard_map(
        body, mesh=mesh, in_specs=(P("dp"), P(replicate=AXES)), out_specs=P("dp", replicate="tp")
    )
    y = f(x, w)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(global_value(x.grad), global_value(y))
    assert 0 < (global_value(y) > 0).float().mean() < 0.5

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor) -> tuple[Tensor, Tensor]:
            y = body(x, w)
            return all_reduce(y.sum(), "dp", dst=I), y

        gradient, y = torch.func.grad(loss, has_aux=True)(x)
        return gradient, y

    specs: Any = {"in_specs": (P("dp"), P()), "out_specs": (P("dp"), P("dp"))}
    stepped = shard_map(step, mesh=mesh, check="global", **specs)
    gradient, y = (global_value(each) for each in stepped(x.detach(), w.detach()))
    assert torch.equal(gradient, y)
    assert 0 < (y > 0).float().mean() < 0.5


def checkpointed_in_worker() -> None:
    checkpointed(worker_mesh((2, 2), AXES))


def test_a_checkpoint_draws_again_what_it_drew(gloo: Gloo) -> None:
    checkpointed(make_mesh((2, 2), AXES, kind="simulated"))
    gloo(4).run(checkpointed_in_worker)


class Noisy(Function):
    """Draws in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0 + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0 + torch.rand_like(grad)


def test_backwards_draw_other_numbers_than_forwards_and_than_each_other() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    apply: Callable[[Tensor], Tensor] = Noisy.apply
    x = torch.ones(2, 4, requires_grad=True)
    z = torch.ones(2, 4, requires_grad=True)
    specs = P("dp")
    f = shard_map(
        lambda x, z: (apply(x), apply(z)), mesh=mesh, in_specs=specs, out_specs=(specs, specs)
    )
    y = f(x, z)
    (y[0].sum() + y[1].sum()).backward()
    assert x.grad is not None
    assert z.grad is not None
    rows = torch.cat([*y, x.grad, z.grad]).tolist()
    assert len({tuple(row) for row in rows}) == 8


def test_draws_over_axes_that_an_inner_function_binds() -> None:
    """Over an axis that is not bound, values are global, and so are draws from nothing."""
    mesh = make_mesh((2, 2), AXES, kind="simulated", simulate="ranks")

    def outer(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = shard_map(lambda: torch.rand(4), in_specs=(), out_specs=P("tp"), axis_names={"tp"})
        return torch.rand(4), inner()

    mapped = shard_map(
        outer, mesh=mesh, in_specs=P("dp"), out_specs=(P("dp"), P("dp")), axis_names={"dp"}
    )
    drawn, inner = mapped(torch.ones(2))
    assert drawn.unique().numel() == 8
    assert inner.unique().numel() == 16


def test_branches_draw_as_the_one_that_is_taken() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")

    def body(x: Tensor, flag: Tensor) -> Tensor:
        if flag.item() > 0:
            return functional.dropout(x, 0.5) + torch.rand_like(x)
        return x + torch.randn_like(x)

    f = shard_map(body, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    torch.manual_seed(0)
    for flag in (1.0, -1.0, 1.0):
        drawn = f(torch.ones(2, 50), torch.tensor(flag))
        assert not torch.equal(drawn[0], drawn[1])


def test_a_generator_of_the_user_s_own_is_left_alone() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")

    def body(x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(3))

    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(f(torch.ones(8)), expected.repeat(2))


def test_a_mesh_that_only_batches_says_that_it_cannot() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="vmap")
    f: Any = shard_map(torch.rand_like, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    with told(TransformError):
        f(torch.ones(4))


def test_what_a_replicate_value_draws_has_gradients_that_are_summed() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")

    def body(x: Tensor, w: Tensor) -> Tensor:
        w = functional.dropout(convert(w, "tp", src=I, dst=R), 0.5)
        return all_reduce((x * w).sum(), "tp", dst=I)

    x, w = torch.ones(2, 8), torch.ones(8, requires_grad=True)
    torch.manual_seed(2)
    f = shard_map(body, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
    f(x, w).backward()
    assert w.grad is not None
    assert set(w.grad.tolist()) == {0.0, 4.0}


def test_seeds_are_distinct_over_draws_and_places() -> None:
    from shardmap_torch.run.drawing import Drawing
    from shardmap_torch.types import K, V

    mesh = make_mesh((2, 3), AXES, kind="abstract")
    seeds = []
    for rank in range(6):
        drawing = Drawing(mesh, mesh.coordinates(rank), lambda: 7)
        seeds.append([drawing.seed(types) for types in ((K, K), (V, K), (K, V), (V, V), None)])
    counts = [len(set(column)) for column in zip(*seeds, strict=True)]
    assert counts == [1, 2, 3, 6, 6]
    assert len({seed for row in seeds for seed in row}) == sum(counts)
    assert threefry_of_ints(7, 0) not in {seed for row in seeds for seed in row}
