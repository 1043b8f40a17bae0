"""`find_divergence` names the line at which ranks stop computing what one device does."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    TransformError,
    all_gather,
    all_reduce,
    axis_index,
    convert,
    find_divergence,
    make_mesh,
    reduce_scatter,
    reinterpret,
    shard_map,
    shift,
)
from shardmap_torch.divergence import _key

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
SPECS: Any = P("dp"), P(None, "tp"), P("tp"), P()


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 6), (6, 8), (8, 5), (5,)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def reference(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    hidden = torch.relu(x @ up)
    return (hidden @ down + bias).square().mean()


def right(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    h = torch.relu(x @ up)
    y = all_reduce(h @ down, "tp", dst=I)
    return all_reduce((y + bias).square().mean(), "dp", dst=I, op="mean")


def bias_on_each_rank(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    h = torch.relu(x @ up)
    y = all_reduce(h @ down + bias, "tp", dst=I)  # here
    return all_reduce((y + 0).square().mean(), "dp", dst=I, op="mean")


def relu_of_a_sum(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    h = torch.relu(x @ up)
    y = h @ down
    y = all_reduce(y.square(), "tp", dst=I)  # here
    return all_reduce((y + bias).mean(), "dp", dst=I, op="mean")


def sum_of_means(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    h = torch.relu(x @ up)
    y = all_reduce(h @ down, "tp", dst=I) + bias
    losses = y.square()
    return all_reduce(losses.mean(), "dp", dst=I)  # here


def counted_twice(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    h = torch.relu(x @ up)
    y = all_reduce(h @ down, "tp", dst=R)
    y = all_reduce(reinterpret(y, "tp", src=R, dst=Partial), "tp", dst=I)  # here
    return all_reduce((y + bias).square().mean(), "dp", dst=I, op="mean")


def by_rank(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    h = torch.relu(x @ up)
    h = h * (1 + axis_index("tp"))  # here
    y = all_reduce(h @ down, "tp", dst=I)
    return all_reduce((y + bias).square().mean(), "dp", dst=I, op="mean")


WRONG = [bias_on_each_rank, relu_of_a_sum, sum_of_means, counted_twice, by_rank]


def line_of(body: Callable[..., Any]) -> str:
    [line] = [line.strip() for line in inspect.getsource(body).splitlines() if "# here" in line]
    return line


def mapped(body: Callable[..., Any], **options: Any) -> Any:
    return shard_map(body, mesh=MESH, in_specs=SPECS, out_specs=P(), **options)


def test_a_right_program_does_not_part() -> None:
    assert find_divergence(mapped(right), reference, *inputs()) is None
    assert find_divergence(mapped(right, check="global"), reference, *inputs()) is None


@pytest.mark.parametrize("body", WRONG)
def test_the_first_wrong_line_is_named(body: Callable[..., Any]) -> None:
    found = find_divergence(mapped(body), reference, *inputs())
    assert found is not None
    assert found.site is not None
    assert found.site.source == line_of(body)


def test_the_text_says_what_the_operands_are() -> None:
    found = find_divergence(mapped(bias_on_each_rank), reference, *inputs())
    line = bias_on_each_rank.__code__.co_firstlineno + 2
    at = reference.__code__.co_firstlineno + 2
    assert str(found).splitlines()[:-1] == [
        f"The programs part at test_divergence.py:{line}: "
        'y = all_reduce(h @ down + bias, "tp", dst=I)  # here',
        "  add makes what is neither equal to a value on one device, nor a shard of one, nor an "
        "addend",
        "  operand 1: a shard of dim 0 over 'dp' of, an addend over 'tp' of mm at "
        f"test_divergence.py:{at}: return (hidden @ down + bias).square().mean()",
        "  operand 2: equal to argument 4",
    ]
    assert str(found).splitlines()[-1].startswith("The results differ: result 1; the worst diff")


def embed(table: Tensor, ids: Tensor, offset: int = 0) -> Tensor:
    local = ids - axis_index("tp") * table.shape[0] - offset
    owned = (local >= 0) & (local < table.shape[0])
    rows = table[local * owned] * owned.unsqueeze(1)
    return all_reduce(rows, "tp", dst=I)


def test_steps_that_one_device_does_not_have_are_no_divergence() -> None:
    table, ids = torch.randn(8, 3), torch.randint(8, (6,))
    specs: Any = {"mesh": MESH, "in_specs": (P("tp"), P()), "out_specs": P()}
    assert find_divergence(shard_map(embed, **specs), lambda t, i: t[i], table, ids) is None
    shifted = shard_map(lambda t, i: embed(t, i, 1), **specs)
    found = find_divergence(shifted, lambda t, i: t[i], table, ids)
    assert found is not None
    assert found.site is not None
    assert found.site.source.startswith("local = ids - axis_index")


def test_blocks_that_move_are_followed() -> None:
    x = torch.randn(4, 3)

    def body(x: Tensor) -> Tensor:
        moved = shift(x, "dp", 1)
        return all_gather(moved, "dp", dst=I)

    f = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P())
    assert find_divergence(f, lambda x: x.roll(2, 0), x) is None
    assert find_divergence(f, lambda x: x.roll(1, 0), x) is not None


def test_two_axes_of_one_dim_are_in_their_order() -> None:
    x = torch.randn(8, 3)

    def body(x: Tensor) -> Tensor:
        return reduce_scatter(convert(x, "dp", src=R, dst=Partial), "dp")

    f = shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P(("tp", "dp")))
    assert find_divergence(f, lambda x: x, x) is None


def test_what_cannot_be_compared_is_told() -> None:
    big = make_mesh((128,), ("i",), kind="abstract")
    f = shard_map(lambda x: x, mesh=big, in_specs=P("i"), out_specs=P("i"))
    cases: list[tuple[Any, str]] = [
        (len, "find_divergence takes a shard_mapped function, not <built-in function len>."),
        (f, "find_divergence runs at most 64 ranks, not 128."),
    ]
    for function, why in cases:
        with pytest.raises(TransformError) as caught:
            find_divergence(function, lambda x: x, torch.ones(128))
        assert str(caught.value) == why


def test_values_are_told_from_others_of_the_same_memory() -> None:
    x = torch.arange(12.0)
    values = [x, x.clone(), x[:4], x[4:8], x[:8:2], x[:4].view(2, 2), x[:4].view(torch.int32)]
    assert len({*map(_key, values)}) == len(values)
    assert [_key(value.view_as(value)) for value in values] == [*map(_key, values)]
    sparse = x.to_sparse(), x.to_sparse()
    assert _key(sparse[0]) == _key(sparse[0]) != _key(sparse[1])
