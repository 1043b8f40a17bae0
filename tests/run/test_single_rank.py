"""One simulated rank runs as plain code, and gives what every other strategy gives."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    make_mesh,
    shard_map,
)
from shardmap_torch.collectives.table import ROWS, CollectiveRow
from shardmap_torch.run import simulated, threads
from tests.programs.support.bodies import PROGRAMS
from tests.programs.support.everywhere import same
from tests.programs.support.harness import VMAP, Program, assert_same, on_mesh, one_device, random
from tests.programs.support.rows import cases_of, check_forward, check_transpose

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

MESH: Final = make_mesh((1, 1), ("dp", "tp"), kind="simulated")
X: Final = random((4,), 7)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs unchecked calls as plain code too."""
    monkeypatch.setattr(threads, "run", simulated.run_alone)


@pytest.fixture
def solos(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions whose calls ran as plain code."""
    names: list[str] = []
    run = simulated.run_alone

    def noted(call: Any) -> Any:
        names.append(call.name)
        return run(call)

    monkeypatch.setattr(simulated, "run_alone", noted)
    return names


# A pipeline of one rank has one layer, and the reference has four.
ON_ONE_RANK: Final = {name: each for name, each in PROGRAMS.items() if name != "pipeline"}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("program", ON_ONE_RANK.values(), ids=ON_ONE_RANK)
def test_a_program_on_one_rank_equals_one_device(program: Program) -> None:
    mesh = make_mesh((1,) * len(program.axis_names), program.axis_names, kind="simulated")
    outcome = on_mesh(program, mesh, (*VMAP, "inner autograd"))
    assert_same(outcome, one_device(program))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.src}-{row.dst}")
def test_every_collective_and_its_transpose_mean_the_same(row: CollectiveRow) -> None:
    for case in cases_of(row, ("tp",), 1):
        check_forward(case, MESH)
        check_transpose(case, MESH)


def gradients(mesh: Mesh, f: Callable[..., Tensor], specs: Any, *xs: Tensor) -> list[Tensor]:
    """The value of a checked function of spec P(), and its gradient by each leaf."""
    leaves = [x.clone().requires_grad_() for x in xs]
    y = shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"dp"})(*leaves)
    y.backward()
    return [y.detach(), *[x.grad for x in leaves if x.grad is not None]]


def loss(x: Tensor, w: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return all_reduce(x * x, "tp", dst=R)

    nested = shard_map(
        inner, in_specs=P(None, "tp"), out_specs=P(replicate="tp"), axis_names={"tp"}
    )
    y = all_gather(nested(x), "dp", dst=R) @ w + axis_index("dp")
    per_row = torch.func.grad(lambda row: (row.sin() * row).sum())
    z: Tensor = torch.func.vmap(per_row)(y)
    return all_reduce((z * z).sum() / axis_size("dp"), "dp", dst=I)


STRATEGIES: Final[tuple[Any, ...]] = ("auto", "vmap", "ranks")


def test_values_and_gradients_by_leaf_are_those_of_every_strategy(solos: list[str]) -> None:
    xs = random((4, 3), 0), random((3, 2), 1)
    specs = (P("dp"), P())
    found = {
        strategy: gradients(
            make_mesh((1, 1), ("dp", "tp"), kind="simulated", simulate=strategy), loss, specs, *xs
        )
        for strategy in STRATEGIES
    }
    assert solos == ["loss"]
    for strategy in ("vmap", "ranks"):
        assert len(found[strategy]) == 3
        same(found["auto"], found[strategy])


def test_transforms_outside_see_plain_code(solos: list[str]) -> None:
    f = shard_map(
        lambda x: all_reduce(x.sin() * x, "tp", dst=I), mesh=MESH, in_specs=P("tp"), out_specs=P()
    )
    xs = random((2, 4), 0)

    def plain(x: Tensor) -> Tensor:
        return x.sin() * x

    same(torch.func.vmap(f)(xs), plain(xs))
    same(torch.func.jacfwd(f)(xs[0]), torch.func.jacfwd(plain)(xs[0]))
    same(
        torch.func.hessian(lambda x: f(x).sum())(xs[0]),
        torch.func.hessian(lambda x: plain(x).sum())(xs[0]),
    )
    assert solos


def test_draws_are_those_of_other_meshes(solos: list[str]) -> None:
    def body(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    def drawn(strategy: Any) -> Tensor:
        mesh = make_mesh((1,), ("tp",), kind="simulated", simulate=strategy)
        torch.manual_seed(3)
        found: Tensor = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(X)
        return found

    same(drawn("auto"), drawn("ranks"))
    assert not solos  # a body that draws runs on a thread, as ever


def test_the_caller_does_not_see_what_a_body_does_to_its_tensors(solos: list[str]) -> None:
    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.note = "mine"  # type: ignore[attr-defined]
        return x, y[:2]

    x, y = X.clone(), X.clone()
    out, part = shard_map(body, mesh=MESH, in_specs=P(), out_specs=P())(x, y)
    assert solos == ["body"]
    assert not hasattr(x, "note")
    out.zero_()
    part.zero_()
    same((x, y), (X, X))


@pytest.mark.usefixtures("always")
def test_an_unchecked_body_that_writes_into_its_input_is_refused() -> None:
    f = shard_map(lambda x: x.add_(1), mesh=MESH, in_specs=P(), out_specs=P(), check=False)
    with pytest.raises(ShardTypeError, match="the body wrote into its inputs"):
        f(X.clone())


def test_what_a_collective_returns_may_be_written_to(solos: list[str]) -> None:
    f = shard_map(
        lambda x: all_reduce(x, "tp", dst=I).mul_(0), mesh=MESH, in_specs=P("tp"), out_specs=P()
    )
    x = X.clone()
    same(f(x), torch.zeros_like(x))
    same(x, X)
    assert solos


def test_unequal_types_are_refused_before_anything_runs(solos: list[str]) -> None:
    """One rank cannot differ from another, and the program is still that of many."""
    f = shard_map(lambda x: x * 2, mesh=MESH, in_specs=P("tp"), out_specs=P())
    with pytest.raises(ShardTypeError):
        f(X)
    assert not solos
