"""check="global" by numbers on more ranks than are tried: where these send is compared."""

from collections.abc import Callable, Sequence
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    P,
    ShardTypeError,
    axis_index,
    axis_size,
    check_program,
    explain,
    make_mesh,
    ppermute,
    shard_map,
)

Pairs = Callable[[int], Sequence[tuple[int, int]]]

X: Final = torch.randn(256, 2)


def halo(pairs: Pairs, ranks: int = 128) -> Callable[[Tensor], Tensor]:
    """Adds to each row the one before, of which the first of a rank is another rank's last."""
    mesh = make_mesh((ranks,), ("cp",), kind="simulated")

    @shard_map(mesh=mesh, in_specs=P("cp"), out_specs=P("cp"), check="global")
    def added(x: Tensor) -> Tensor:
        left = ppermute(x[-1:], "cp", pairs(axis_size("cp")))
        left = torch.where(axis_index("cp") > 0, left, torch.zeros_like(left))
        return x + torch.cat([left, x])[:-1]

    return added


def in_nodes(size: int, n: int) -> list[tuple[int, int]]:
    size = min(size, n)
    return [(at, at // size * size + (at + 1) % size) for at in range(n)]


RIGHT: Final[dict[str, Pairs]] = {
    "around": lambda n: [(at, (at + 1) % n) for at in range(n)],
    "to the end": lambda n: [(at, at + 1) for at in range(n - 1)],
}
ELSEWHERE: Final[dict[str, Pairs]] = {
    "around nodes of 16": lambda n: in_nodes(16, n),
    "around nodes of 32": lambda n: in_nodes(32, n),
    "to the end of nodes of 16": lambda n: [(at, at + 1) for at in range(n - 1) if (at + 1) % 16],
    "past one": lambda n: [(at, at + 1) for at in range(n - 1) if at != 40],
    "past one at the end": lambda n: [(at, at + 1) for at in range(n - 1) if at != 125],
    "far where there are many": lambda n: [(at, (at + 1 + 16 * (n > 99)) % n) for at in range(n)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_ranks_that_send_as_far_on_fewer_are_tried(name: str) -> None:
    assert explain(halo(RIGHT[name]), X).one_device == "tried"


@pytest.mark.sample(3, "around nodes of 16")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_ranks_that_send_elsewhere_on_fewer_are_not_tried(name: str) -> None:
    text = r"there are 128 ranks, and at smaller sizes ppermute\('cp', V -> V\) sends to other pl"
    with pytest.raises(ShardTypeError, match=text):
        check_program(halo(ELSEWHERE[name]), X)


def test_of_ranks_that_are_all_tried_numbers_tell_where_they_send() -> None:
    with pytest.raises(ShardTypeError, match="ried with numbers over 'cp'"):
        check_program(halo(ELSEWHERE["around nodes of 16"], ranks=32), X)
