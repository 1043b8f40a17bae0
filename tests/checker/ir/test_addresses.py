"""Bodies may not ask where a tensor lies in memory; torch's own code may."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmap_torch import P, R, ShardTypeError, all_reduce, make_mesh, shard_map

Body = Callable[[Tensor], Tensor]


def by_offset(x: Tensor) -> Tensor:
    return x * int(x.storage_offset() + 1)


def by_pointer(x: Tensor) -> Tensor:
    return x * (x.data_ptr() % 7)


@pytest.mark.parametrize(
    ("body", "name"), [(by_offset, "storage_offset"), (by_pointer, "data_ptr")]
)
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("check", ["local", "global"])
def test_a_body_that_depends_on_a_place_in_memory_is_refused(
    body: Body, name: str, simulate: Literal["vmap", "ranks"], check: Literal["local", "global"]
) -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=simulate)
    with pytest.raises(ShardTypeError) as error:
        shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=check)(torch.ones(4))
    head, fix = str(error.value).splitlines()
    assert head.startswith(f"{body.__name__}: {name}() at test_addresses.py:")
    assert head.endswith(
        "tells where a tensor lies in memory, which differs between ranks, and it would count as "
        "equal on all ranks."
    )
    assert fix == "Fix: leave it out of the body; to compare tensors, use `is`."


def by_contiguity(x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def by_stride(x: Tensor) -> Tensor:
    return x * 2 if x.stride(-1) == 1 else x * 3


def by_dim_order(x: Tensor) -> Tensor:
    return x.permute(x.dim_order())


def by_view(x: Tensor) -> Tensor:
    return x * 2 if x._is_view() else x * 3


def by_storage(x: Tensor) -> Tensor:
    return x * x.untyped_storage().nbytes()


def by_version(x: Tensor) -> Tensor:
    return x * (2 + x._version)


def by_leaf(x: Tensor) -> Tensor:
    return x * 2 if x.is_leaf else x * 3


HOW = (
    "tells how a tensor lies in memory, which differs between shards and the global tensor, and "
    "between meshes, and it would count as equal everywhere.",
    "Fix: leave it out of the body: contiguous() and reshape() copy only where they must.",
)
HISTORY = (
    "tells what autograd keeps of a tensor, which differs between meshes, and it would count as "
    "equal everywhere.",
    "Fix: ask x.requires_grad, or pass what is known before the call as a static argument.",
)


@pytest.mark.parametrize(
    ("body", "asked", "text"),
    [
        (by_contiguity, "is_contiguous()", HOW),
        (by_stride, "stride()", HOW),
        (by_dim_order, "dim_order()", HOW),
        (by_view, "_is_view()", HOW),
        (by_storage, "untyped_storage()", HOW),
        (by_version, "_version", HISTORY),
        (by_leaf, "is_leaf", HISTORY),
    ],
)
@pytest.mark.parametrize("check", ["local", "global"])
def test_a_body_that_depends_on_a_layout_is_refused(
    body: Body, asked: str, text: tuple[str, str], check: Literal["local", "global"]
) -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    mapped = shard_map(
        body, mesh=mesh, in_specs=P(None, "dp"), out_specs=P(None, "dp"), check=check
    )
    with pytest.raises(ShardTypeError) as error:
        mapped(torch.ones(4, 4))
    head, fix = str(error.value).splitlines()
    assert head.startswith(f"{body.__name__}: {asked} at test_addresses.py:")
    assert (head.endswith(text[0]), fix) == (True, text[1])


class _PassesOn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class _Asks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * out.stride(-1) if func is Tensor.sin else out


def in_mode(mode: TorchFunctionMode) -> Body:
    def body(x: Tensor) -> Tensor:
        with mode:
            # Collectives ask whether they share memory.
            return x.sin() + all_reduce(x, "dp", dst=R).sum() * 0

    return body


def test_a_mode_of_the_user_s_passes_on_what_torch_asks() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    specs: Any = {"in_specs": P("dp"), "out_specs": P("dp"), "mesh": mesh}
    x = torch.ones(4, 1, requires_grad=True)
    y = shard_map(in_mode(_PassesOn()), **specs)(x)
    torch.testing.assert_close(y, x.sin())
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.cos())
    with pytest.raises(ShardTypeError, match=r"stride\(\) at test_addresses.py:"):
        shard_map(in_mode(_Asks()), **specs)(x)


def test_torch_s_own_code_may_ask() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")
    lstm = torch.nn.LSTM(3, 3)  # it asks whether its weights share memory
    f = shard_map(lambda x: lstm(x)[0], mesh=mesh, in_specs=P(None, "dp"), out_specs=P(None, "dp"))
    with torch.no_grad():
        x = torch.ones(2, 4, 3)
        torch.testing.assert_close(f(x), lstm(x)[0])
