"""Bodies that change the data that they refer to run on ranks as one process runs them.

Checks leave that data as it was, and ranks that share a process do not see what others have in it.
"""

import linecache
import random
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardmap_torch import I, P, R, ShardTypeError, all_reduce, check_program, make_mesh, shard_map
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

Maker = Callable[[], Callable[[Tensor], Tensor]]
MESHES = {
    strategy: make_mesh((2,), ("dp",), kind="simulated", simulate=strategy)
    for strategy in ("ranks", "auto")
}
ONE = make_mesh((1,), ("dp",), kind="simulated", simulate="ranks")


def met(x: Tensor) -> Tensor:
    """Lets other ranks run, as the thread of a rank waits for them here."""
    total: Tensor = all_reduce(x.detach().sum(), "dp", dst=R)
    y: Tensor = x + 0 * total
    return y


def while_ranks_meet() -> Any:
    state = SimpleNamespace(n=1)

    def body(x: Tensor) -> Tensor:
        state.n += 2
        y: Tensor = met(x) * state.n
        state.n = 1
        return y

    return body


def in_a_module() -> Any:
    """Keeps a part of its result for later, as mixtures of experts keep losses."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.own = x * x
            y: Tensor = met(x) + self.own
            return y

    return Layer()


def reset_by_a_forward_and_counted_by_hooks() -> Any:
    state = SimpleNamespace(n=0)

    def hook(grad: Tensor) -> Any:
        state.n += 1
        return grad * state.n

    def body(x: Tensor) -> Tensor:
        state.n = 1
        y = x * 1
        y.register_hook(hook)
        return y * 2

    return body


def stack() -> Any:
    sizes: list[int] = []

    class Pops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            sizes.append(len(sizes) + 2)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * sizes.pop()

    apply: Any = Pops.apply
    return lambda x: apply(apply(x))


MAKERS: tuple[Maker, ...] = (
    *(while_ranks_meet, in_a_module, reset_by_a_forward_and_counted_by_hooks, stack),
)


def outcomes(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = []
    for _ in range(3):  # a state may be the first call's own
        x = torch.arange(1.0, 5.0, dtype=torch.float64).requires_grad_()
        y = f(x)
        (y * torch.arange(2.0, 6.0, dtype=torch.float64)).sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


def mapped(body: Any, mesh: Any, check: Any) -> Any:
    return shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=check)


@pytest.mark.parametrize("simulate", MESHES)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_ranks_compute_with_own_state_what_one_rank_does(make: Maker, simulate: str) -> None:
    want = outcomes(mapped(make(), ONE, False))
    got = outcomes(mapped(make(), MESHES[simulate], "local"))
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_backward_after_another_call_finds_equal_state_or_is_refused() -> None:
    def scaled(of: Callable[[Tensor], Any]) -> list[Tensor]:
        state = SimpleNamespace(by=None)

        def body(x: Tensor) -> Tensor:
            state.by = of(x)
            y = x * 1
            y.register_hook(lambda grad: grad * state.by)
            return y * 2

        f = mapped(body, MESHES["ranks"], "local")
        x = torch.arange(1.0, 5.0).requires_grad_()
        first, second = f(x), f(x * 2)
        return [torch.autograd.grad(y.sum(), x)[0] for y in (second, first)]

    later, earlier = scaled(lambda x: x.shape[0] * 1.5)
    assert torch.equal(later, torch.full((4,), 12.0))
    assert torch.equal(earlier, torch.full((4,), 6.0))
    with told(ShardTypeError):
        scaled(lambda x: x.detach())


METRICS: dict[str, float] = {}
LOG: list[Any] = []
CALLS = 0
TABLE: dict[int, int] = {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    global CALLS
    CALLS = 0
    METRICS.clear()
    LOG.clear()
    TABLE.clear()


@pytest.mark.parametrize("simulate", MESHES)
def test_what_a_body_keeps_is_that_of_the_first_rank_s_run(simulate: str) -> None:
    def body(x: Tensor) -> Tensor:
        loss: Tensor = all_reduce(x.sum(), "dp", dst=I)
        LOG.append({"loss": loss.item()})
        METRICS["mean"] = 0.5 * METRICS.get("mean", 0.0) + 0.5 * loss.item()
        return loss

    f = shard_map(body, mesh=MESHES[simulate], in_specs=P("dp"), out_specs=P())
    check_program(f, torch.ones(4))
    assert (LOG, METRICS) == ([], {})
    for means in (2.0, 3.0):
        f(torch.ones(4))
        assert METRICS == {"mean": means}
    assert LOG == [{"loss": 4.0}] * 2


@pytest.mark.parametrize("simulate", MESHES)
def test_a_tensor_without_data_stays_in_no_cache(simulate: str) -> None:
    """A table of angles that the first call makes, and later ones take."""

    class Angles(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(2.0)
            return x * self.table

    model = Angles()
    f = mapped(model, MESHES[simulate], "local")
    for _ in range(3):
        assert torch.equal(f(torch.ones(4)), torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert type(model.table) is Tensor


def counter(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def own_closure() -> Callable[[Tensor], Tensor]:
    calls = 0

    def body(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return body


BODIES = [counter, Counts(), own_closure()]


@pytest.mark.parametrize("simulate", MESHES)
@pytest.mark.parametrize("strictness", ["local", "global"])
@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_counts_its_calls_counts_them_as_one_process(
    body: Any, strictness: Any, simulate: str
) -> None:
    """On a mesh of two ranks, whose checks interpret it twice or more."""
    if isinstance(body, Counts):
        body.calls = 0
    f = mapped(body, MESHES[simulate], strictness)
    start = float(f(torch.ones(4))[0])
    for count in (1, 2):
        assert torch.equal(f(torch.ones(4)), torch.full((4,), start + count))


# Each statement changes or reads one of two variables, or the tensor; see `run_on_one_device`.
STATEMENTS = {
    "a += 1": "state[0] += 1",
    "b += a": "state[1] += state[0]",
    "a = 5": "state[0] = 5",
    "a = b": "state[0] = state[1]",
    "b = 7": "state[1] = 7",
    "a = 0": "state[0] = 0",
    "x * a": "x = x * state[0]",
    "x + b": "x = x + torch.tensor(float(state[1]))",
    "x * 2": "x = x * 2",
}


@settings(max_examples=40)
@given(st.lists(st.sampled_from(sorted(STATEMENTS)), min_size=1, max_size=6))
def test_random_bodies_with_state_run_as_on_one_device(names: list[str]) -> None:
    """Each rank, whichever comes first, computes in each call what one process would."""
    lines = ["def body(x):", *(f"    {STATEMENTS[name]}" for name in names), "    return x"]

    def made() -> Any:
        space: dict[str, Any] = {"torch": torch, "state": [1, 1], "__name__": "impure"}
        exec("\n".join(lines), space)
        return space["body"]

    f, one = mapped(made(), MESHES["ranks"], "local"), made()
    x = torch.arange(1.0, 5.0)
    for _ in range(3):
        assert torch.equal(f(x), one(x))


class CountsBackwards(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        CountsBackwards.calls += 1
        return grad * (1 if CountsBackwards.calls < 4 else 2)


def test_ranks_count_backwards_alike() -> None:
    """Three ranks would count to four, and act on it, in the second backward."""
    CountsBackwards.calls = 0
    mesh = make_mesh((3,), ("dp",), kind="simulated", simulate="ranks")
    f: Any = shard_map(CountsBackwards.apply, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    x = torch.ones(3, requires_grad=True)
    outs = [f(x), f(x)]
    for count, y in enumerate(outs, 1):
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones(3))
        assert CountsBackwards.calls == count


def counted_on_a_process() -> list[Any]:
    body = Counts()
    f = shard_map(body, mesh=worker_mesh((2,), ("dp",)), in_specs=P("dp"), out_specs=P("dp"))
    sums = [float(global_value(f(torch.ones(4))).sum()) for _ in range(2)]
    return [*sums, body.calls]


def test_a_call_on_processes_counts_once_too(gloo: Gloo) -> None:
    assert gloo(2).run(counted_on_a_process) == [[4.0, 8.0, 2]] * 2


@pytest.mark.parametrize(
    ("draw", "what"),
    [(random.random, "Python's random module"), (np.random.rand, "numpy.random")],
)
def test_a_body_that_draws_from_a_generator_of_the_process_is_refused(draw: Any, what: str) -> None:
    def body(x: Tensor) -> Tensor:
        return x * float(draw())

    with told(ShardTypeError):
        mapped(body, MESHES["auto"], "local")(torch.ones(4))


STATE: Any = torch.get_rng_state


@pytest.mark.parametrize(
    ("body", "call"),
    [
        (lambda x: x * torch.initial_seed(), "torch.initial_seed()"),
        (lambda x: x * torch.random.initial_seed(), "torch.initial_seed()"),
        (lambda x: x * torch.get_rng_state()[0], "torch.get_rng_state()"),
        (lambda x: x * STATE()[0], "torch.get_rng_state()"),
        (lambda x: x * torch.seed(), "torch.seed()"),
    ],
)
def test_the_state_of_the_generator_is_not_equal_on_all_ranks(body: Any, call: str) -> None:
    module: Any = torch.random
    before = module.default_generator
    with pytest.raises(ShardTypeError) as error:
        mapped(body, MESHES["auto"], "local")(torch.ones(4))
    head, fix = str(error.value).splitlines()
    assert head.startswith(f"<lambda>: {call} at test_own_state.py:")
    assert head.endswith(
        "gives what each process has of its own, and it would count as equal on all ranks."
    )
    assert fix == "Fix: pass it as an argument, or draw from a key of shardmap_torch.random."
    assert module.default_generator is before


def test_torch_s_own_use_of_the_state_is_not_the_body_s() -> None:
    def body(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return x * 2

    assert torch.equal(mapped(body, MESHES["auto"], "local")(torch.ones(4)), torch.full((4,), 2.0))


LAST: Any = None


class Log:
    def __init__(self) -> None:
        self.last: Any = None
        self.rows: list[Any] = []
        self.running: Any = None

    def put(self, value: Any) -> None:
        self.rows.append((len("row"), value))


def keeping() -> dict[str, tuple[Callable[[Tensor], Tensor], str]]:
    """Bodies that leave a tensor outside, and the name of what keeps it; empty if that is right."""
    log, losses, table = Log(), list[Any](), dict[str, Any]()
    before: Any = None

    def as_an_attribute(x: Tensor) -> Tensor:
        log.last = x * 2
        return x

    def in_a_list(x: Tensor) -> Tensor:
        losses.append(x.detach().sum())
        return x

    def by_a_method(x: Tensor) -> Tensor:
        log.put({"loss": x.sum()})
        return x

    def in_a_dict(x: Tensor) -> Tensor:
        table.setdefault("all", []).append(x.sum())
        return x

    def as_a_variable(x: Tensor) -> Tensor:
        nonlocal before
        before = x.sum()
        return x

    def as_a_global(x: Tensor) -> Tensor:
        global LAST
        LAST = x.sum()
        return x

    def equal(x: Tensor) -> Tensor:
        LOG.append((all_reduce(x.sum(), "dp", dst=I), 3, torch.ones(2)))
        return x

    def read(x: Tensor) -> Tensor:
        log.running = x * 2
        y: Tensor = x + log.running
        return y

    def own(x: Tensor) -> Tensor:
        parts = [x * 2]
        parts.append(x * 3)
        return parts[0] + parts[1]

    names = "last losses rows table before LAST".split() + 3 * [""]
    bodies = (as_an_attribute, in_a_list, by_a_method, in_a_dict, as_a_variable, as_a_global)
    every = zip((*bodies, equal, read, own), names, strict=True)
    return {body.__name__: (body, name) for body, name in every}


@pytest.mark.parametrize("name", keeping())
def test_a_tensor_that_a_body_leaves_outside_is_told_once(name: str) -> None:
    body, kept = keeping()[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for strictness in ("local", "global"):
            f = mapped(body, MESHES["auto"], strictness)
            f(torch.ones(4, dtype=torch.float64))
            f(torch.ones(4, dtype=torch.float64))
    assert len(told) == bool(kept)
    for each in told:
        assert each.filename == __file__
        assert str(each.message).startswith(f"{name}: {kept} keeps a tensor of the body: float64[")
        assert "], another one on each rank of 'dp'. After the call it is that of o" in f"{each}"
        assert re.search(rf"\b{kept}\b.*( = |\.append)", linecache.getline(__file__, each.lineno))


def test_what_a_refused_body_leaves_outside_is_not_told() -> None:
    losses: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        losses.append(x.sum())
        return x.sum()

    with pytest.raises(ShardTypeError):
        shard_map(body, mesh=MESHES["auto"], in_specs=P("dp"), out_specs=P())(torch.ones(4))
