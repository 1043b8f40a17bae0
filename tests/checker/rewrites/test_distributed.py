"""Calls of torch.distributed that are not typed are errors that name the typed function."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from shardmap_torch import P, ShardTypeError, check_program, make_mesh, shard_map
from tests.support.golden import hold_own

# torch renames some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

X: Final = torch.ones(4, 4)

CALLS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "reduce": lambda x: dist.reduce(x.clone(), 0),
    "gather": lambda x: dist.gather(x, [x.clone()], 0),
    "objects": lambda x: dist.all_gather_object([None], x),
    "scatter": lambda x: dist.scatter(x.clone(), [x], 0),
    "send": lambda x: dist.send(x, 0),
}
"""Calls that are not typed, whatever their group."""


def rejection(call: Callable[[Tensor], Any], kind: Any) -> str:
    def body(x: Tensor) -> Tensor:
        call(x)
        return x

    mesh = make_mesh((1,), ("tp",), kind=kind)
    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(ShardTypeError) as caught:
        check_program(f, X)
    return str(caught.value)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_a_raw_call_names_the_typed_function_where_there_is_no_process_group(name: str) -> None:
    hold_own(rejection(CALLS[name], "abstract"))


@pytest.mark.parametrize("name", CALLS)
def test_a_raw_call_names_the_typed_function_on_processes(name: str, process_group: None) -> None:
    hold_own(rejection(CALLS[name], "process_group"))


def test_a_group_of_no_axis_is_not_typed(process_group: None) -> None:
    other = dist.new_group([0])
    text = rejection(lambda x: dist.all_reduce(x.clone(), group=other), "process_group")
    assert "all_reduce of torch.distributed is called in the body" in text or (
        "allreduce of torch.distributed is called in the body" in text
    )


def test_an_error_that_the_body_catches_is_one_nevertheless(process_group: None) -> None:
    def catching(x: Tensor) -> None:
        try:
            dist.reduce(x.clone(), 0)
        except Exception:
            return

    assert "reduce of torch.distributed" in rejection(catching, "process_group")
