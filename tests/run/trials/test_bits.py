"""check="global" by numbers: integers that are equal only once they have fewer bits."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_reduce,
    axis_size,
    check_program,
    explain,
    make_mesh,
    shard_map,
    shift,
)

Change = Callable[[Tensor], Tensor]

MESH: Final = make_mesh((4,), ("cp",), kind="simulated")
X: Final = torch.randn(8, 3, dtype=torch.float64)
IDS: Final = torch.tensor([0, 0, 1, 2, 2, 3, 3, 3])


def same(t: Tensor) -> Tensor:
    return t


def documents(hop: Change, first: Change = same) -> Callable[[Tensor, Tensor], Tensor]:
    """Adds up the rows of the same document; ids are changed at the start, and at each hop."""

    def body(x: Tensor, ids: Tensor) -> Tensor:
        ids = first(ids)
        total, y, own, other = torch.zeros_like(x), x, ids, ids
        for step in range(axis_size("cp")):
            total = total + (own[:, None] == other).to(x.dtype) @ y
            if step + 1 < axis_size("cp"):
                y, other, own = shift(y, "cp", 1), shift(hop(other), "cp", 1), hop(ids)
        return total

    return body


def mapped(body: Callable[..., Tensor]) -> Callable[..., Any]:
    return shard_map(body, mesh=MESH, in_specs=P("cp"), out_specs=P("cp"), check="global")


def filled(dtype: torch.dtype) -> Change:
    return lambda t: torch.zeros(t.shape, dtype=dtype).copy_(t)


def packed(x: Tensor, ids: Tensor) -> Tensor:
    """The ids are one more column of what is sent."""
    total, own, sent = torch.zeros_like(x), ids, torch.cat([x, ids[:, None].to(x.dtype)], 1)
    y, other = x, ids
    for step in range(axis_size("cp")):
        total = total + (own[:, None] == other).to(x.dtype) @ y
        if step + 1 < axis_size("cp"):
            sent = shift(sent, "cp", 1)
            y, other, own = sent[:, :-1], sent[:, -1], ids.to(x.dtype)
    return total


LOST: Final[dict[str, Change]] = {
    "uint8": lambda t: t.to(torch.uint8),
    "int8": lambda t: t.to(torch.int8),
    "int16": lambda t: t.short(),
    "int32": lambda t: t.int(),
    "float16": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "float32": lambda t: t.float(),
    "of negative ones": lambda t: (t - 1).to(torch.uint8).long() + 1,
    "into memory of few bits": filled(torch.bfloat16),
    "into integers": filled(torch.int16),
    "beside few bits": lambda t: torch.cat([t, torch.zeros(1, dtype=torch.bfloat16)])[:-1],
    "times few bits": lambda t: t * torch.ones(t.shape, dtype=torch.bfloat16),
    "of what is computed": lambda t: (t * 2).bfloat16() / 2,
    "a remainder": lambda t: t % 4096,
    "a quotient": lambda t: t // 4096 * 4096,
}


@pytest.mark.sample(5, "bfloat16")
@pytest.mark.parametrize("name", LOST)
def test_numbers_that_lose_bits_on_their_way_are_refuted(name: str) -> None:
    with pytest.raises(ShardTypeError, match="tried with numbers over 'cp', it is another program"):
        check_program(mapped(documents(LOST[name])), X, IDS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LOST)
def test_numbers_that_lose_their_bits_on_one_device_too_are_tried(name: str) -> None:
    found = explain(mapped(documents(same, first=LOST[name])), X, IDS)
    assert found.one_device == "tried"


@pytest.mark.parametrize(
    ("hop", "first"),
    [
        (lambda t: t.double(), same),
        (lambda t: t.to(torch.bfloat16), lambda t: t > 2),
        (lambda t: t.to(torch.bfloat16), lambda t: t.to(torch.uint8)),
    ],
)
def test_casts_that_keep_numbers_apart_are_moves(hop: Change, first: Change) -> None:
    assert explain(mapped(documents(hop, first)), X, IDS).one_device == "tried"


def test_places_among_few_fit_into_few_bits() -> None:
    body = documents(lambda t: t.to(torch.int8), first=same)
    found = explain(mapped(lambda x, ids: body(x, x.argmax(-1))), X, IDS)
    assert found.one_device == "tried"


def test_counts_and_positions_may_be_made_floats() -> None:
    def body(x: Tensor, ids: Tensor) -> Tensor:
        count = all_reduce((ids >= 0).sum().float(), "cp", dst=I)
        return documents(same)(x * (ids.float() * 0.01).cos()[:, None], ids) / count

    assert explain(mapped(body), X, IDS).one_device == "tried"


def test_numbers_beside_floats_of_few_bits_are_refuted() -> None:
    assert explain(mapped(packed), X, IDS).one_device == "tried"
    with pytest.raises(ShardTypeError, match="tried with numbers over 'cp', it is another program"):
        check_program(mapped(packed), X.bfloat16(), IDS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: (x > 0).sum(-1).to(torch.uint8), "a cast makes torch.uint8 of torch.int64, at"),
        (lambda x: x.argmax(-1).view(torch.int32)[::2], "view reads the bits of torch.int64, at"),
    ],
)
def test_what_no_argument_can_show_is_not_tried(change: Change, text: str) -> None:
    body = documents(same)
    with pytest.raises(ShardTypeError, match="Nor can it be tried with numbers over 'cp': ") as e:
        check_program(mapped(lambda x, ids: body(x, change(x))), X, IDS.double())
    assert text in str(e.value)
