"""A body that asks for its rank as a Python number runs as written, or is refused at its line."""

import operator
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensor

from shardmap_torch import (
    CollectiveError,
    Mesh,
    P,
    ShardTypeError,
    axis_group,
    axis_index,
    make_mesh,
    shard_map,
)
from shardmap_torch.checker.rewrites.rank_numbers import Asking, RankNumber
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.core.functorch import base_of
from tests.programs.support.everywhere import KINDS, run_on, same
from tests.support.golden import unplaced
from tests.support.pool import Gloo

X: Final = torch.arange(48.0, dtype=torch.float64).sin().reshape(4, 12)

Ask = Callable[[Mesh], Any]

ASKING: Final[dict[str, Ask]] = {
    "group": lambda mesh: axis_group(mesh, "tp").rank(),
    "get_rank of the group": lambda mesh: dist.get_rank(axis_group(mesh, "tp")),
    "get_group_rank": lambda mesh: dist.get_group_rank(axis_group(mesh, "tp"), dist.get_rank()),
    "mesh": lambda mesh: mesh.coordinates(mesh.rank)["tp"],
    "get_rank": lambda mesh: mesh.coordinates(dist.get_rank())["tp"] if _is_ready() else None,
}
"""Ways in which a body may ask for its rank."""


def _is_ready() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() >= 1


def _width(x: Tensor, mesh: Mesh) -> int:
    return x.shape[1] // dist.get_world_size(axis_group(mesh, "tp"))


def _write(x: Tensor, rank: Any, n: int) -> Tensor:
    parts = x.new_zeros(x.shape[1] // n, x.shape[0], n)
    parts[rank] = x.chunk(len(parts), 1)[rank]
    return parts[rank]


TAKING: Final[dict[str, Callable[[Tensor, Any, int], Tensor]]] = {
    "chunk": lambda x, rank, n: x.chunk(x.shape[1] // n, 1)[rank],
    "split": lambda x, rank, n: torch.split(x, n, dim=1)[rank].contiguous(),
    "slice": lambda x, rank, n: x[:, rank * n : (rank + 1) * n],
    "narrow": lambda x, rank, n: x.narrow(-1, n * rank, n),
    "unbind": lambda x, rank, n: x.unflatten(1, (-1, n)).unbind(1)[rank],
    "select": lambda x, rank, n: x.unflatten(1, (-1, n)).select(1, rank),
    "number": lambda x, rank, n: x.unflatten(1, (-1, n))[:, rank],
    "written": _write,
    "positions": lambda x, rank, n: x[:, torch.arange(rank * n, rank * n + n)],
}
"""Ways in which it may take the rank's part of a tensor."""


def take(ask: str, taking: str, check: Any, mesh: Mesh) -> None:
    def body(x: Tensor) -> Tensor:
        return TAKING[taking](x, ASKING[ask](mesh), _width(x, mesh)) * 2

    x = X.clone().requires_grad_()
    specs = P(replicate={"tp"}, invariant={"dp"})
    f = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"), check=check)
    y = f(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    same((y, grad), (X * 2, torch.full_like(X, 2)))


PAIRS: Final = [
    *((ask, "chunk") for ask in ASKING),
    *(("group", taking) for taking in TAKING),
]


@pytest.mark.sample(4, "ranks-True")
@pytest.mark.parametrize("check", [True, "global", False])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_each_rank_takes_its_part(kind: Any, check: Any, gloo: Gloo) -> None:
    for ask, taking in PAIRS:
        if check != "global" or taking != "positions":
            run_on(kind, partial(take, ask, taking, check), gloo, (2, 2), ("dp", "tp"))


WRONG: Final[dict[str, Callable[[Tensor, Any, int], Tensor]]] = {
    "the part of another": lambda x, rank, n: x.chunk(2, 1)[1 - rank],
    "a part too far": lambda x, rank, n: x[:, rank : rank + n],
    "a factor": lambda x, rank, n: x.chunk(2, 1)[rank] * (rank + 1),
}


def refuse(wrong: str, mesh: Mesh) -> None:
    group = axis_group(mesh, "tp")

    def body(x: Tensor) -> Tensor:
        return WRONG[wrong](x, group.rank(), x.shape[1] // 2)

    f = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(None, "tp"), check="global")
    with pytest.raises(ShardTypeError, match="on one device"):
        f(X)
    g = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check=True)
    with pytest.raises(ShardTypeError, match="the result varies over it"):
        g(X)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_one_device_does_not_do_is_refused(wrong: str, kind: Any, gloo: Gloo) -> None:
    run_on(kind, partial(refuse, wrong), gloo)


FIX: Final = "keep it a tensor, with axis_index(axis), and choose with torch.where"
PART: Final = (
    "take this rank's part of a tensor, as in x.chunk(n, dim)[rank], x[rank * n : (rank + 1) * n] "
    "or x.narrow(dim, rank * n, n)"
)
REFUSED: Final[dict[str, tuple[Callable[[Tensor, Any], Any], str, str]]] = {
    "branch": (
        lambda x, rank: x if rank == 0 else -x,
        "the body branches on a number that differs by rank: the ranks would run different "
        "programs.",
        "take what all ranks need out of the branch, as a collective or a term of the loss, and "
        f"have rank 0 print, log and save outside of the body. Or {FIX}",
    ),
    "list": (
        lambda x, rank: [part + 1 for part in x.chunk(2)][rank],
        "a number that differs by rank is used as a position in a list, a size or a number of "
        "steps.",
        PART,
    ),
    "dict": (
        lambda x, rank: {0: x}[rank],
        "a set or the key of a dict makes a plain Python number of one that differs by rank.",
        f"{PART}, or {FIX}",
    ),
    "size": (
        lambda x, rank: x[:rank],
        "ranks take slices of different sizes, or that reach beyond the tensor.",
        PART,
    ),
    "bits": (
        lambda x, rank: x * (rank & 1),
        "an operation on bits makes a plain Python number of one that differs by rank.",
        f"{PART}, or {FIX}",
    ),
    "function": (
        lambda x, rank: torch.roll(x, rank),
        "roll gets a number that differs by rank.",
        f"{PART}, or {FIX}",
    ),
    "environment": (
        lambda x, rank: x.chunk(2)[int(os.environ["RANK"])],
        "RANK of the environment is text, which cannot differ by rank.",
        "use axis_index(axis), a tensor that varies, or axis_group(mesh, axis).rank()",
    ),
    "result": (
        lambda x, rank: (x, rank),
        "a number that differs by rank is returned, and outside there is one.",
        "return axis_index(axis).reshape(1), with a spec that shards it",
    ),
}


@pytest.mark.parametrize("use", REFUSED)
def test_what_makes_the_programs_of_ranks_differ_is_refused_at_its_line(use: str) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    group = axis_group(mesh, "tp")
    using, what, fix = REFUSED[use]

    def body(x: Tensor) -> Any:
        return using(x, group.rank())

    outs = (P("tp"), None) if use == "result" else P("tp")
    with pytest.raises(ShardTypeError) as caught:
        shard_map(body, mesh=mesh, in_specs=P(), out_specs=outs)(X)
    head, place, advice = str(caught.value).splitlines()
    assert (head, advice) == (f"body: {what}", f"Fix: {fix}.")
    assert place.startswith("  at test_rank_numbers.py:") or use == "result"


def test_an_unchecked_body_gets_the_environment_of_its_rank() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")

    def body() -> Tensor:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        found = [int(os.environ[name]) for name in names]
        assert os.getenv("RANK") == str(mesh.rank) == str(dist.get_rank())
        assert int(axis_index(("dp", "tp"))) == found[0]
        return torch.tensor([found])

    f = shard_map(body, mesh=mesh, in_specs=(), out_specs=P(("dp", "tp")), check=False)
    assert f().tolist() == [[rank, rank, 4] for rank in range(4)]
    assert (axis_group(mesh, "tp").rank(), mesh.rank, "RANK" in os.environ) == (0, 0, False)
    assert not dist.is_initialized()
    # A class that changed in each call would keep an old method, from some call on, in Python 3.13.
    asked = vars(type(os.environ))["__getitem__"]
    f()
    assert vars(type(os.environ))["__getitem__"] is asked


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_what_is_no_rank_is_answered_alike_however_ranks_are_simulated(
    simulate: Any, check: bool
) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate=simulate)

    def body(x: Tensor) -> Tensor:
        return x * dist.get_world_size() if dist.is_initialized() else x

    on_both = P(("dp", "tp"))
    f = shard_map(body, mesh=mesh, in_specs=on_both, out_specs=on_both, check=check)
    assert f(torch.ones(4)).tolist() == [4.0] * 4


ASKED: Final = "The body asks for its rank, a number, and here all ranks run it"


@pytest.mark.parametrize(
    ("ask", "asked"),
    [
        (dist.get_rank, ASKED),
        (dist.get_node_local_rank, ASKED),
        (lambda: int(os.environ.get("RANK", "0")), ASKED),
    ],
)
def test_one_program_for_all_ranks_is_given_no_rank(ask: Callable[[], int], asked: str) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="vmap")

    def body(x: Tensor) -> Tensor:
        return x if isinstance(base_of(x), FakeTensor) else x + ask()  # hidden from the check

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    text = (
        f"{asked} as one program. Use axis_index(axis), a tensor that varies, or let a spec or "
        "convert(x, axis, src=R, dst=V, dim=0) take this rank's part."
    )
    with pytest.raises(CollectiveError) as caught:
        f(torch.ones(2))
    assert unplaced(caught.value) == text


OPERATIONS: Final = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod),
    *(operator.eq, operator.lt, operator.truediv, divmod),
)
LEAVES: Final = st.sampled_from(["dp", "tp", "both", 1, 2, 3, -2, 7])
TREES: Final = st.recursive(
    LEAVES, lambda inner: st.tuples(st.sampled_from(OPERATIONS), inner, inner), max_leaves=6
)


@given(TREES)
@example((divmod, 7, (operator.add, "dp", 2)))  # a rank is 0, by which none divides
def test_arithmetic_is_done_for_each_rank(tree: Any) -> None:
    mesh = make_mesh((2, 3), ("dp", "tp"), kind="abstract")
    nobody: Any = None  # nothing is refused
    backend: Any = SimpleNamespace(mesh=mesh, index=lambda axes: torch.zeros(()))
    asking: Any = Asking(nobody, backend)
    axes = {"dp": ("dp",), "tp": ("tp",), "both": ("dp", "tp")}

    def evaluate(tree: Any, leaf: Callable[[Any], Any]) -> Any:
        if not isinstance(tree, tuple):
            return leaf(tree)
        operation, a, b = tree
        found = operation(evaluate(a, leaf), evaluate(b, leaf))
        return found[0] if operation is divmod else found

    def on(rank: int) -> Any:
        place = mesh.coordinates(rank)
        return evaluate(tree, lambda x: mesh.index(axes[x], place) if x in axes else x)

    try:
        expected = list(map(on, range(mesh.size)))
    except ZeroDivisionError:
        return
    with enter_scope(Scope(backend, frozenset(mesh.axis_names))):
        found = evaluate(tree, lambda x: asking.rank_along(axes[x]) if x in axes else x)
    assert asking.spread(found, mesh.axis_names) == expected
    if type(found) is RankNumber:  # it keeps only axes along which it differs, or the last one
        assert len(found.axes) == 1 or len(set(expected)) > 1


def test_parts_in_another_order_are_not_those_of_one_device() -> None:
    mesh = make_mesh((3,), ("tp",), kind="simulated")
    group = axis_group(mesh, "tp")

    def body(x: Tensor, step: int) -> Tensor:
        return x.chunk(group.size(), 1)[group.rank() * step % group.size()]

    f: Any = shard_map(
        body, mesh=mesh, in_specs=(P(), None), out_specs=P(None, "tp"), check="global"
    )
    assert f(X, 1).equal(X)
    with pytest.raises(ShardTypeError, match="on one device"):
        f(X, 2)
