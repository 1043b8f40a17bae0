"""A call does no more than it did when its cost was measured: it is counted in function calls.

Times differ by machine and by what else it does. So every call of a Python function or of a builtin
that one call of a shard_mapped identity makes is counted, on a mesh of one process, where nothing
is compared, and on two. What exceeds these bounds belongs into a cache, or the bound is raised by
who has measured `benchmarks/call_overhead.py` before and after.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from shardmap_torch import Mesh, P, device_put, make_mesh, shard_map
from tests.support.pool import Gloo

Case = tuple[bool, bool]
"""A kind of call: is it checked, and does its argument require a gradient?"""

ONE_PROCESS: Final[Mapping[Case, int]] = {
    (True, False): 129,
    (False, False): 102,
    (True, True): 142,
    (False, True): 115,
}
TWO_PROCESSES: Final[Mapping[Case, int]] = {
    (True, False): 196,
    (False, False): 174,
    (True, True): 211,
    (False, True): 189,
}
A_LEAF: Final[Mapping[Case, int]] = {
    (True, False): 2,
    (False, False): 2,
    (True, True): 9,
    (False, True): 9,
}
"""Of each further leaf."""


def first(xs: list[Tensor]) -> Tensor:
    return xs[0]


def num_calls(f: Callable[[], object]) -> int:
    """Counts the calls of functions that `f` makes, by itself and through others, builtins too."""
    count = 0

    def note(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count - 2  # those of `f` and of `setprofile`


def counted(mesh: Mesh, case: Case, num_leaves: int) -> int:
    """Counts those of a call whose signature is known."""
    check, grad = case
    x = device_put(torch.ones(8), mesh, P("i")).requires_grad_(grad)
    f = shard_map(first, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check=check)
    xs = [x] * num_leaves
    for _ in range(3):
        f(xs)
    return min(num_calls(lambda: f(xs)) for _ in range(3))


CASES: Final = pytest.mark.parametrize("case", list(ONE_PROCESS), ids=str)


@pytest.fixture
def one_process() -> Iterator[Mesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield make_mesh((1,), ("i",), kind="process_group")
    finally:
        dist.destroy_process_group()


@CASES
def test_a_call_makes_few_calls_on_one_process(case: Case, one_process: Mesh) -> None:
    assert counted(one_process, case, 1) <= ONE_PROCESS[case]


@CASES
def test_a_leaf_adds_few_calls(case: Case, one_process: Mesh) -> None:
    more = counted(one_process, case, 9) - counted(one_process, case, 1)
    assert more / 8 <= A_LEAF[case]


def test_a_plain_leaf_of_a_checked_call_adds_few_calls() -> None:
    mesh = make_mesh((1,), ("i",), kind="simulated")
    for case in ((True, False), (True, True)):
        assert (counted(mesh, case, 9) - counted(mesh, case, 1)) / 8 <= 2


def on_two() -> dict[Case, int]:
    mesh = make_mesh((2,), ("i",), kind="process_group")
    return {case: counted(mesh, case, 1) for case in TWO_PROCESSES}


def test_a_comparison_of_two_processes_makes_few_calls(gloo: Gloo) -> None:
    for found in gloo(2).run(on_two):
        assert all(found[case] <= bound for case, bound in TWO_PROCESSES.items()), found


def test_counting_counts() -> None:
    assert num_calls(lambda: [len("") for _ in range(1)]) in (1, 2)
    assert num_calls(lambda: None) == 0
