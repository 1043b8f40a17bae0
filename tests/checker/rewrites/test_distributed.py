"""Raw calls of torch.distributed in a checked body are errors that name the typed function."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from shardmap_torch import P, ShardTypeError, check_program, make_mesh, shard_map

# torch renames some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

GROUP: Final[Any] = dist.group  # torch types WORLD, a property of its metaclass, as None too
X: Final = torch.ones(4, 4)

CALLS: Final[dict[str, tuple[Callable[[Tensor], Any], str]]] = {
    "all_reduce": (lambda x: dist.all_reduce(x.clone()), "all_reduce"),
    "async": (lambda x: dist.all_reduce(x.clone(), async_op=True), "all_reduce"),
    "reduce": (lambda x: dist.reduce(x.clone(), 0), "all_reduce"),
    "into tensor": (lambda x: dist.all_gather_into_tensor(x.clone(), x), "all_gather"),
    "all_gather": (lambda x: dist.all_gather([x.clone()], x), "all_gather"),
    "gather": (lambda x: dist.gather(x, [x.clone()], 0), "all_gather"),
    "objects": (lambda x: dist.all_gather_object([None], x), "all_gather"),
    "scatter tensor": (lambda x: dist.reduce_scatter_tensor(x.clone(), x), "reduce_scatter"),
    "reduce_scatter": (lambda x: dist.reduce_scatter(x.clone(), [x]), "reduce_scatter"),
    "single": (lambda x: dist.all_to_all_single(x.clone(), x), "all_to_all"),
    "all_to_all": (lambda x: dist.all_to_all([x.clone()], [x]), "all_to_all"),
    "broadcast": (lambda x: dist.broadcast(x.clone(), 0), "broadcast"),
    "scatter": (lambda x: dist.scatter(x.clone(), [x], 0), "broadcast, and convert"),
    "isend": (lambda x: dist.isend(x, 0), "ppermute or shift"),
    "irecv": (lambda x: dist.irecv(x.clone(), 0), "ppermute or shift"),
    "send": (lambda x: dist.send(x, 0), "ppermute or shift"),
    "recv": (lambda x: dist.recv(x.clone(), 0), "ppermute or shift"),
    "batch": (
        lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)]),
        "ppermute or shift",
    ),
    "functional sum": (
        lambda x: functional.all_reduce(x, "sum", GROUP.WORLD),
        "all_reduce",
    ),
    "functional gather": (
        lambda x: functional.all_gather_tensor(x, 0, GROUP.WORLD),
        "all_gather",
    ),
    "differentiable": (lambda x: differentiable.all_reduce(x), "all_reduce"),
}


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
    call, instead = CALLS[name]
    text = rejection(call, "abstract")
    assert "of torch.distributed is called in the body" in text
    assert "  at test_distributed.py:" in text
    assert f"Fix: use shardmap_torch.{instead}" in text


TYPED: Final = (
    *("all_reduce", "async", "into tensor", "scatter tensor", "single"),
    *("functional sum", "functional gather", "differentiable"),
)
"""Calls that are typed where the group is that of axes."""


@pytest.mark.parametrize("name", sorted(CALLS.keys() - set(TYPED)))
def test_a_raw_call_names_the_typed_function_on_processes(name: str, process_group: None) -> None:
    call, instead = CALLS[name]
    text = rejection(call, "process_group")
    assert "  at test_distributed.py:" in text
    assert f"Fix: use shardmap_torch.{instead}" in text


@pytest.mark.parametrize("kind", ["abstract", "simulated", "process_group"])
def test_a_barrier_is_to_be_left_out(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "process_group":
        request.getfixturevalue("process_group")
    line = test_a_barrier_is_to_be_left_out.__code__.co_firstlineno + 5
    assert rejection(lambda x: dist.barrier(), kind).splitlines() == [
        "body: barrier of torch.distributed is called in the body, and the checker cannot tell "
        "what that does to types and gradients.",
        f"  at test_distributed.py:{line}: "
        "assert rejection(lambda x: dist.barrier(), kind).splitlines() == [",
        "Fix: leave it out: typed collectives wait for one another.",
    ]


def test_a_call_that_a_group_would_type_says_so() -> None:
    text = rejection(CALLS["all_reduce"][0], "abstract")
    assert text.splitlines()[-1] == (
        "Fix: use shardmap_torch.all_reduce, or pass it group=axis_group(mesh, axis), with which "
        "it is typed."
    )


def test_a_group_of_no_axis_is_not_typed(process_group: None) -> None:
    other = dist.new_group([0])
    text = rejection(lambda x: dist.all_reduce(x.clone(), group=other), "process_group")
    assert "all_reduce of torch.distributed is called in the body" in text or (
        "allreduce of torch.distributed is called in the body" in text
    )


def test_an_error_that_the_body_catches_is_one_nevertheless(process_group: None) -> None:
    def catching(x: Tensor) -> None:
        try:
            dist.broadcast(x.clone(), 0)
        except Exception:
            return

    assert "broadcast of torch.distributed" in rejection(catching, "process_group")
