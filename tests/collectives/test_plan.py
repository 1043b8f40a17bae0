"""A collective that comes again on processes is read and looked up once."""

import re
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardmap_torch import (
    CollectiveError,
    I,
    P,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    convert,
    make_mesh,
    reduce_scatter,
    shard_map,
)
from tests.support.pool import Gloo, run_alone

CALLS: Final[dict[str, tuple[Callable[[Tensor], Tensor], int]]] = {
    "all_reduce": (lambda x: all_reduce(x, "tp", dst=I), 26),
    "mean": (lambda x: all_reduce(x, "tp", dst=R, op="mean"), 27),
    "convert": (lambda x: convert(x, "tp", src=I, dst=R), 18),
    "all_gather": (lambda x: all_gather(x, "tp", dim=1, dst=R), 26),
    "reduce_scatter": (lambda x: reduce_scatter(x, "tp", dim=1), 26),
}
"""Collectives with the calls of Python functions that a seen one makes in a forward."""


def num_functions(f: Callable[[], object]) -> int:
    """Counts the calls of Python functions, without builtins."""
    count = 0

    def note(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count - 1  # that of `f`


def counted() -> dict[str, int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = make_mesh((2,), ("tp",))
    counts: dict[str, int] = {}

    def body(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for name, (call, _) in CALLS.items():
            call(x)
            counts[name] = num_functions(lambda call=call: call(x))  # type: ignore[misc]
        return x.detach()

    shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check=False)(torch.ones(4, 4))
    return counts


@pytest.mark.slow
def test_a_seen_collective_passes_few_functions() -> None:
    counts = run_alone(counted)
    assert counts.keys() == CALLS.keys()
    assert all(counts[name] <= bound for name, (_, bound) in CALLS.items()), counts


def errors_of_seen_calls() -> list[str]:
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    messages = []

    def refused(call: Callable[[], Tensor]) -> None:
        with pytest.raises(CollectiveError) as error:
            call()
        messages.append(str(error.value))

    def body(x: Tensor) -> Tensor:
        for _ in range(2):
            reduce_scatter(x, "tp")
            convert(x, "tp", src=I, dst=V, dim=0)
        refused(lambda: reduce_scatter(x[:1], "tp"))
        refused(lambda: convert(x[:1], "tp", src=I, dst=V, dim=0))
        for dtype in (torch.bool, torch.bool, torch.float32):
            assert all_reduce(x > 0 if dtype == torch.bool else x, "tp", dst=I).sum() == 8
        refused(lambda: all_reduce(x.long(), "tp", dst=I, op="mean"))
        for sizes in ([1, 2], [2, 1], [1, 2]):  # a list is data that may change
            rows = all_gather(x[: max(sizes)], "tp", dst=R, sizes=sizes)
            assert rows.shape == (3, 2)
        refused(lambda: all_gather(x, "tp", dst=R, sizes=[1, 1]))
        broadcast(x, "tp", 1, dst=I)
        all_to_all(x, "tp", split_dim=1, concat_dim=0)
        refused(lambda: reduce_scatter(x, "tp", tiled=1))  # type: ignore[arg-type]  # 1 == True
        refused(lambda: broadcast(x, "tp", True, dst=I))
        refused(lambda: all_to_all(x, "tp", split_dim=1.0, concat_dim=0))  # type: ignore[arg-type]
        return x

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check=False)
    f(torch.ones(4, 2))
    return messages


def test_a_call_with_other_operands_or_arguments_is_read_again(gloo: Gloo) -> None:
    texts = ["reduce_scatter: dim has size 1", "convert: dim has size 1", "needs a floating dtype"]
    texts += ["all_gather: dim has size 2, not 1", "tiled=1 is", "True", "split_dim=1.0 is no dim"]
    for messages in gloo(2).run(errors_of_seen_calls):
        assert len(messages) == len(texts)
        for text, message in zip(texts, messages, strict=True):
            assert re.search(text, message), message
