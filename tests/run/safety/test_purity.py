"""Bodies that change what they depend on are refused; those that only leave a trace are not."""

import array
import io
import itertools
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardmap_torch import I, P, ShardTypeError, all_reduce, check_program, make_mesh, shard_map
from shardmap_torch.checker.guards.places import Kept
from shardmap_torch.checker.guards.walk import Walk
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.pool import Gloo

Body = Callable[[Tensor], Tensor]

CALLS = 0
SEEN: list[Any] = []
TABLE: dict[int, int] = {}
COUNT = itertools.count(1)
GENERATOR = random.Random(0)
NUMPY_GENERATOR = np.random.default_rng(0)
SQUARES = (i * i for i in range(1, 1000))


def counter(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


def counter_in_a_tensor(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * torch.tensor(float(CALLS))


def many_numbers(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * torch.tensor([float(CALLS)] * 100).sum()


def first_time(x: Tensor) -> Tensor:
    if not SEEN:
        SEEN.append(1)
        return x * 2
    return x * 3


def length(x: Tensor) -> Tensor:
    SEEN.append(1)
    return x * len(SEEN)


def python_random(x: Tensor) -> Tensor:
    return x * random.random()


def clock(x: Tensor) -> Tensor:
    return x * (time.perf_counter_ns() % 1_000_003)


def identifier(x: Tensor) -> Tensor:
    return x * (uuid4().int % 1_000_003)


def own_generator(x: Tensor) -> Tensor:
    return x * GENERATOR.random()


def numpy_generator(x: Tensor) -> Tensor:
    return x * NUMPY_GENERATOR.random()


def count(x: Tensor) -> Tensor:
    return x * next(COUNT)


def generator(x: Tensor) -> Tensor:
    return x * next(SQUARES)


def own_closure() -> Body:
    calls = 0

    def body(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x + calls

    return body


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def mapped(body: Any, **kwargs: Any) -> Any:
    mesh = make_mesh((2,), ("dp",), kind="simulated", **kwargs)
    return shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))


@pytest.fixture(autouse=True)
def fresh() -> None:
    global CALLS
    CALLS = 0
    SEEN.clear()
    TABLE.clear()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (counter, "'CALLS'"),
        (counter_in_a_tensor, "'CALLS'"),
        (many_numbers, "'CALLS'"),
        (first_time, "'SEEN'"),
        (length, "'SEEN'"),
        (python_random, "the state of Python's random module"),
        (clock, "'perf_counter_ns', 'time'"),
        (identifier, "'uuid4'"),
        (own_generator, "'GENERATOR'"),
        (numpy_generator, "'NUMPY_GENERATOR'"),
        (count, "'COUNT'"),
        (generator, "'SQUARES'"),
        (own_closure(), "'calls'"),
        (Counts(), "'calls'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_body_that_depends_on_what_it_changes_is_refused(body: Body, what: str) -> None:
    with pytest.raises(ShardTypeError) as error:
        mapped(body)(torch.ones(4))
    head, first, then, why, fix = str(error.value).splitlines()
    assert head.endswith(f": the body changes {what}, and does something else when it runs again:")
    assert first.startswith("  first: %1: float32")
    assert then.startswith("  then: %1: float32")
    assert why == (
        "Each rank runs the body, and so does the checker: they would not compute the same."
    )
    assert fix == (
        "Fix: pass what it depends on as an argument, and return what is new; draw random numbers "
        "from a key of shardmap_torch.random."
    )


class PrivateSlot:
    __slots__ = ("__calls",)

    def __init__(self) -> None:
        self.__calls = 0

    def tick(self) -> int:
        self.__calls += 1
        return self.__calls


NEXT = iter(range(1, 1000)).__next__
APPEND, LENGTH = (growing := [0]).append, growing.__len__
TICK = PrivateSlot().tick
BYTES = memoryview(bytearray(1))
LARGE = np.zeros(10_000)
TEXT = io.StringIO()


def in_a_private_slot() -> int:
    return TICK()


def by_a_method_of_an_iterator() -> int:
    return NEXT()


def by_methods_of_a_list() -> int:
    APPEND(0)
    return LENGTH()


def in_bytes() -> int:
    BYTES[0] += 1
    return BYTES[0]


def in_a_large_array() -> int:
    LARGE[0] += 1
    return int(LARGE[0])


def in_text() -> int:
    TEXT.write("x")
    return len(TEXT.getvalue())


def in_the_environment() -> int:
    os.environ["SHARDMAP_TICKS"] = str(int(os.environ.get("SHARDMAP_TICKS", "0")) + 1)
    return int(os.environ["SHARDMAP_TICKS"])


TICKETS: queue.SimpleQueue[int] = queue.SimpleQueue()
LOCK = threading.Lock()
OBJECTS = np.array([0], dtype=object)
ERROR = ValueError(0)
GROWING = bytearray(b"x")
GROWING_NUMBERS = array.array("l", [1])


def in_a_queue() -> int:
    TICKETS.put(1)
    return TICKETS.qsize()


def by_a_lock() -> int:
    return 1 + LOCK.acquire(blocking=False)


def in_an_array_of_objects() -> int:
    OBJECTS[0] += 1
    return int(OBJECTS[0])


def in_an_error() -> int:
    ERROR.args = (ERROR.args[0] + 1,)
    return int(ERROR.args[0])


def in_the_length_of_bytes() -> int:
    GROWING.append(1)
    return len(GROWING)


def in_the_length_of_an_array() -> int:
    GROWING_NUMBERS.append(1)
    return len(GROWING_NUMBERS)


def by_names_that_code_makes() -> int:
    space, name = globals(), "tick" * 2
    space[name] = space.get(name, 0) + 1
    return int(space[name])


class Even:
    value = 2


class Odd:
    value = 3


OBJECT: Any = Even()


def by_another_class() -> int:
    value = OBJECT.value
    OBJECT.__class__ = Odd
    return int(value)


@pytest.mark.parametrize(
    "tick",
    [
        in_a_queue,
        by_a_lock,
        in_an_array_of_objects,
        in_an_error,
        in_the_length_of_bytes,
        in_the_length_of_an_array,
        by_names_that_code_makes,
        by_another_class,
        in_a_private_slot,
        by_a_method_of_an_iterator,
        by_methods_of_a_list,
        in_bytes,
        in_a_large_array,
        in_text,
        in_the_environment,
    ],
)
def test_a_count_is_seen_wherever_it_is_kept(
    tick: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDMAP_TICKS", raising=False)
    with pytest.raises(ShardTypeError, match="does something else when it runs again"):
        mapped(lambda x: x * tick())(torch.ones(4))


def squares() -> Iterator[int]:
    for number in itertools.count(1):
        yield number * number


@pytest.mark.parametrize(
    "items",
    [itertools.count(1), squares(), iter(range(99)), map(abs, range(99)), enumerate(range(99))],
    ids=lambda items: type(items).__name__,
)
def test_an_iterator_that_a_body_advances_is_refused_before_anything_depends_on_it(
    items: Iterator[Any],
) -> None:
    def body(x: Tensor) -> Tensor:
        return x if str(next(items)) < "A" else x * 2  # never, in these

    with pytest.raises(ShardTypeError) as error:
        mapped(body)(torch.ones(4))
    first, fix = str(error.value).splitlines()
    assert first == (
        "body: the body takes items from 'items', which checks of it and all ranks share, so that "
        "each would get others."
    )
    assert fix.startswith("Fix: pass what it depends on as an argument, and return what is new; ")


def test_an_iterator_that_a_body_leaves_alone_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    items = iter([1, 2])
    with path.open("w") as log:

        def body(x: Tensor) -> Tensor:
            log.write("called\n")
            return x if items is not None else x * 2

        assert torch.equal(mapped(body)(torch.ones(4)), torch.ones(4))
    assert next(items) == 1


def trace(x: Tensor) -> Tensor:
    SEEN.append(x.shape)
    return x * 2


def cached(x: Tensor) -> Tensor:
    if x.shape[0] not in TABLE:
        TABLE[x.shape[0]] = 2
    return x * TABLE[x.shape[0]]


def timed(x: Tensor) -> Tensor:
    started = time.perf_counter()
    y = x * 2
    SEEN.append(time.perf_counter() - started)
    return y


def unread(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * 2


def from_an_iterator_of_its_own(x: Tensor) -> Tensor:
    steps = itertools.count(1)
    return x * next(steps) * next(steps)


@pytest.mark.parametrize("body", [trace, timed, cached, unread, from_an_iterator_of_its_own])
@pytest.mark.parametrize("simulate", ["auto", "ranks"])
def test_a_body_that_only_leaves_a_trace_runs(body: Body, simulate: str) -> None:
    f = mapped(body, simulate=simulate)
    for _ in range(3):
        assert torch.equal(f(torch.ones(4)), torch.full((4,), 2.0))


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
def test_the_state_of_the_generator_is_not_equal_on_all_ranks(body: Body, call: str) -> None:
    module: Any = torch.random
    before = module.default_generator
    with pytest.raises(ShardTypeError) as error:
        mapped(body)(torch.ones(4))
    head, fix = str(error.value).splitlines()
    assert head.startswith(f"<lambda>: {call} at test_purity.py:")
    assert head.endswith(
        "gives what each process has of its own, and it would count as equal on all ranks."
    )
    assert fix == "Fix: pass it as an argument, or draw from a key of shardmap_torch.random."
    assert module.default_generator is before


def test_torch_s_own_use_of_the_state_is_not_the_body_s() -> None:
    def body(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return x * 2

    assert torch.equal(mapped(body)(torch.ones(4)), torch.full((4,), 2.0))


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
def test_random_bodies_with_state_run_as_on_one_device_or_are_refused(names: list[str]) -> None:
    """Accepted: then each rank, whichever comes first, computes what one device would."""
    lines = ["def body(x):", *(f"    {STATEMENTS[name]}" for name in names), "    return x"]
    space: dict[str, Any] = {"torch": torch, "state": [1, 1], "__name__": "impure"}
    exec("\n".join(lines), space)
    f = mapped(space["body"], simulate="ranks")
    x = torch.arange(1.0, 5.0)
    try:
        found = f(x)
    except ShardTypeError as error:
        text = str(error)
    else:
        text = ""
    if text:
        assert "and does something else when it runs again" in text
        return
    assert torch.equal(f(x), found)
    # The state has come to rest: once more on one device gives the same.
    assert torch.equal(space["body"](x), found)


def late(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    y: Tensor = all_reduce(x, "dp", dst=I)
    return x * (y.sum() * 0 + (2 if CALLS > 4 else 1))


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = all_reduce(x, "dp", dst=I)
        return x * (y.sum() * 0 + (2 if self.calls > 4 else 1))


def late_length(x: Tensor) -> Tensor:
    TABLE[len(TABLE)] = 1
    return late_entry(x)


def late_entry(x: Tensor) -> Tensor:
    y: Tensor = all_reduce(x, "dp", dst=I)
    return x * (y.sum() * 0 + (2 if len(TABLE) > 4 else 1))


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
@pytest.mark.parametrize("body", [late, Late(), late_length], ids=["number", "attribute", "dict"])
def test_ranks_count_calls_alike_and_a_branch_on_them_is_refused_before_it_is_taken(
    body: Body, simulate: str
) -> None:
    """Eight ranks, and the checks, would count to five in the first call."""
    if isinstance(body, Late):
        body.calls = 0
    mesh = make_mesh((8,), ("dp",), kind="simulated", simulate=simulate)  # type: ignore[arg-type]
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    for count in (1, 2):  # a check looks two calls ahead
        assert torch.equal(f(torch.ones(8)), torch.ones(8))
        assert count == (body.calls if isinstance(body, Late) else CALLS or len(TABLE))
    with pytest.raises(ShardTypeError, match="does something else when it runs again"):
        f(torch.ones(8))
    assert (body.calls if isinstance(body, Late) else CALLS or len(TABLE)) == 2


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
    body = Late()
    f = shard_map(body, mesh=worker_mesh((2,), ("dp",)), in_specs=P("dp"), out_specs=P("dp"))
    sums = [float(global_value(f(torch.ones(4))).sum()) for _ in range(2)]
    try:
        f(torch.ones(4))
    except ShardTypeError:
        return [*sums, body.calls]
    return []


def test_a_call_on_processes_counts_once_too(gloo: Gloo) -> None:
    assert gloo(2).run(counted_on_a_process) == [[4.0, 4.0, 2]] * 2


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
def test_a_list_keeps_what_checks_and_all_ranks_append(simulate: str) -> None:
    def body(x: Tensor) -> Tensor:
        SEEN.append("before")
        y: Tensor = all_reduce(x, "dp", dst=I)
        SEEN.append("after")
        return y * (1 if len(SEEN) % 2 == 0 else 2)

    mesh = make_mesh((4,), ("dp",), kind="simulated", simulate=simulate)  # type: ignore[arg-type]
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P())
    for _ in range(2):  # interleaved, a rank would see an odd number
        assert torch.equal(f(torch.ones(4)), torch.full((1,), 4.0))
    assert SEEN == ["before", "after"] * (len(SEEN) // 2)
    assert len(SEEN) >= 2 * 2 * (4 if simulate == "ranks" else 1)


class Settings:
    step = 0


NUMBERS = np.zeros(2, dtype=np.int64)
VARIABLE: ContextVar[int] = ContextVar("variable", default=0)
QUEUE = deque([1, 2])


def changes_much(x: Tensor) -> Tensor:
    Settings.step += 1
    NUMBERS[1] += 1
    VARIABLE.set(VARIABLE.get() + 1)
    QUEUE.rotate(1)
    random.random()
    np.random.rand()
    return x * 2


def test_a_check_leaves_state_as_it_was() -> None:
    VARIABLE.set(0)
    drawn: Any = np.random.get_state
    before = random.getstate(), drawn()[1].tolist()
    check_program(mapped(changes_much), torch.ones(4))
    assert (Settings.step, NUMBERS.tolist(), VARIABLE.get(), list(QUEUE)) == (0, [0, 0], 0, [1, 2])
    assert before == (random.getstate(), drawn()[1].tolist())
    mapped(changes_much, simulate="ranks")(torch.ones(4))
    assert (Settings.step, NUMBERS.tolist(), VARIABLE.get(), list(QUEUE)) == (1, [0, 1], 1, [2, 1])


@pytest.mark.parametrize("counts", [False, True])
def test_attributes_are_read_one_by_one_only_where_one_has_changed(counts: bool) -> None:
    class Counter:
        steps = 0

    counter, read = Counter(), []
    counter.steps = 1
    slots = Walk.slots

    def noting(self: Walk) -> Iterator[Kept]:
        read.append(self)
        return slots(self)

    def body(x: Tensor) -> Tensor:
        if counts:
            counter.steps += 1
        return x if counter.steps else x + 1

    f = mapped(body)
    with patch.object(Walk, "slots", noting):
        check_program(f, torch.zeros(4))
    assert bool(read) == counts
    assert counter.steps == 1


LAZY = """
import torch
from shardmap_torch import P, make_mesh, shard_map

def seeds():
    torch.manual_seed(0)

def body(x, seed=False):
    if seed:
        seeds()
    return x + 1

mesh = make_mesh((2,), ("tp",), kind="simulated")
f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), replay=True)
f(torch.ones(2))
"""


def test_what_torch_changes_when_a_check_loads_dynamo_is_no_change_of_the_body() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", LAZY], check=True)
