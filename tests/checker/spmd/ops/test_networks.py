"""Convolutions, norms over groups, and bags of embeddings on shards, against one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, all_reduce, axis_size
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

Body = Callable[..., Tensor]

X: Final = numbers(4, 8, 5, 4)
KERNEL: Final = numbers(6, 8, 3, 3)
UP: Final = numbers(8, 6, 3, 3)
IDS: Final = torch.tensor([[0, 1, 2], [3, 1, 0], [2, 2, 2], [1, 0, 3]])
TABLE: Final = numbers(4, 6)


def conv(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return functional.conv2d(x, w, b, padding=1, stride=2)


def contracted(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(conv(x, w), "a", dst=I)


def groups(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.conv2d(x, w, b, groups=4 // axis_size("a"))


def groups_up(x: Tensor, w: Tensor) -> Tensor:
    return functional.conv_transpose2d(x, w, groups=4 // axis_size("a"))


def up(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return functional.conv_transpose2d(x, w, b, stride=2)


def up_contracted(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(up(x, w), "a", dst=I)


def block(x: Tensor, w: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Convolves by columns and then by rows, with a norm over groups between."""
    h = functional.group_norm(functional.conv2d(x, w, padding=1), 4 // axis_size("a"), g, b)
    return all_reduce(functional.conv2d(h.relu(), v), "a", dst=I)


def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.group_norm(x, 4 // axis_size("a"), w, b)


def patches(x: Tensor) -> Tensor:
    return functional.unfold(x, 2).sin()


def bags(mode: str) -> Body:
    return lambda ids, table: functional.embedding_bag(ids, table, mode=mode)


def weighted(ids: Tensor, table: Tensor, weights: Tensor) -> Tensor:
    return functional.embedding_bag(ids, table, per_sample_weights=weights, mode="sum")


def normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Normalizes each channel of each sample, alone and scaled."""
    return functional.instance_norm(x, weight=w, bias=b) * functional.instance_norm(x, eps=0.1)


def combined(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    first, second = x.flatten(2).unbind(1)[:2]
    return functional.bilinear(first, second, w, b) + functional.bilinear(second, first, w)


def averaged(x: Tensor) -> Tensor:
    """Averages all positions, also where torch lays the result out for channels that lie last."""
    y = functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1)
    y = y * functional.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last), 1).flatten(1)
    y = y + functional.adaptive_avg_pool1d(x.flatten(2).transpose(1, 2), 1).sum(1)
    return y * functional.adaptive_avg_pool3d(x, output_size=1).flatten(1)


RIGHT: Final[dict[str, tuple[Body, tuple[Tensor, ...], Any, P]]] = {
    "channels of samples": (normed, (X, numbers(8), numbers(8)), (P("a"), P(), P()), P("a")),
    "channels of ranks": (
        normed,
        (X, numbers(8), numbers(8)),
        (P("b", "a"), P("a"), P("a")),
        P("b", "a"),
    ),
    "pairs of features": (
        combined,
        (X, numbers(3, 20, 20), numbers(3)),
        (P("a"), P(), P()),
        P("a"),
    ),
    "pairs of features, and features of the result": (
        combined,
        (X, numbers(4, 20, 20), numbers(4)),
        (P("b"), P("a"), P("a")),
        P("b", "a"),
    ),
    "averages of samples": (averaged, (X,), (P("a"),), P("a")),
    "samples": (conv, (X, KERNEL, numbers(6)), (P("a"), P(), P()), P("a")),
    "output channels": (
        conv,
        (X, KERNEL, numbers(6)),
        (P("b"), P("a"), P("a")),
        P("b", "a"),
    ),
    "input channels": (contracted, (X, KERNEL), (P("b", "a"), P(None, "a")), P("b")),
    "groups": (
        groups,
        (X, numbers(8, 2, 3, 3), numbers(8)),
        (P("b", "a"), P("a"), P("a")),
        P("b", "a"),
    ),
    "groups, upwards": (groups_up, (X, numbers(8, 2, 3, 3)), (P(None, "a"), P("a")), P(None, "a")),
    "upwards, samples": (up, (X, UP, numbers(6)), (P("a"), P(), P()), P("a")),
    "upwards, output channels": (
        up,
        (X, UP, numbers(6)),
        (P(), P(None, "a"), P("a")),
        P(None, "a"),
    ),
    "upwards, input channels": (up_contracted, (X, UP), (P(None, "a"), P("a")), P()),
    "one dim": (
        lambda x, w: functional.conv1d(x, w),
        (X[..., 0], KERNEL[..., 0]),
        (P("b"), P("a")),
        P("b", "a"),
    ),
    "block": (
        block,
        (X, numbers(8, 8, 3, 3), numbers(6, 8, 1, 1), numbers(8), numbers(8)),
        (P("b"), P("a"), P(None, "a"), P("a"), P("a")),
        P("b"),
    ),
    "norm of groups": (
        norm,
        (X, numbers(8), numbers(8)),
        (P("b", "a"), P("a"), P("a")),
        P("b", "a"),
    ),
    "norm of groups of samples": (
        lambda x, w, b: functional.group_norm(x, 4, w, b),
        (X, numbers(8), numbers(8)),
        (P(("a", "b")), P(), P()),
        P(("a", "b")),
    ),
    "norm of groups of channels over two axes": (
        lambda x: functional.group_norm(x, 4 // axis_size(("a", "b"))),
        (X,),
        (P(None, ("a", "b")),),
        P(None, ("a", "b")),
    ),
    "instances": (lambda x: functional.instance_norm(x), (X,), (P("b", "a"),), P("b", "a")),
    "channels of a batch": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        (X, numbers(8), numbers(8)),
        (P(None, "a"), P("a"), P("a")),
        P(None, "a"),
    ),
    "known statistics": (
        lambda x, m, v: (
            functional.batch_norm(x, m.detach(), v.detach().square()) * m[:, None, None]
        ),
        (X, numbers(8), numbers(8)),
        (P("b", "a"), P("a"), P("a")),
        P("b", "a"),
    ),
    "patches": (patches, (X,), (P("b", "a"),), P("b", "a")),
    **{
        f"bags of samples, {mode}": (bags(mode), (IDS, TABLE), (P("a"), P(None, "b")), P("a", "b"))
        for mode in ("sum", "mean")
    },
    "weighted bags": (weighted, (IDS, TABLE, numbers(4, 3)), (P("a"), P(), P("a")), P("a")),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RIGHT)
def test_networks_on_shards_are_those_of_one_device(name: str) -> None:
    assert_is_one_device(*RIGHT[name])


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return all_reduce(conv(x, w, b), "a", dst=I)


def offset_bags(ids: Tensor, table: Tensor) -> Tensor:
    offsets = torch.arange(0, ids.numel(), 4)
    return functional.embedding_bag(ids.reshape(-1), table, offsets)


def counted_bags(ids: Tensor, table: Tensor) -> Tensor:
    """Takes the numbers that count a rank's entries for positions."""
    return table[torch.arange(ids.shape[0])]


WRONG: Final[dict[str, tuple[Body, tuple[Tensor, ...], Any, P]]] = {
    "rows": (conv, (X[..., :4, :], KERNEL), (P(None, None, "a"), P()), P(None, None, "a")),
    "a kernel's columns": (
        lambda x, w: functional.conv2d(x, w),
        (X, numbers(6, 8, 2, 2)),
        (P(), P(None, None, None, "a")),
        P(),
    ),
    "the edges of equal rows": (
        lambda x, w: functional.conv1d(x.new_ones(1, 1, x.shape[0]), w, padding=1)[0, 0] * x,
        (numbers(4), numbers(1, 1, 3)),
        (P("a"), P()),
        P("a"),
    ),
    "bias of a pending sum": (
        biased,
        (X, KERNEL, numbers(6)),
        (P(None, "a"), P(None, "a"), P()),
        P(),
    ),
    "sum left out": (conv, (X, KERNEL), (P(None, "a"), P(None, "a")), P()),
    "bias of all channels": (
        lambda x, w, b: conv(x, w, b[: w.shape[0]]),
        (X, KERNEL, numbers(6)),
        (P(), P("a"), P()),
        P(None, "a"),
    ),
    "norm of a part of a group": (
        lambda x: functional.group_norm(x, 1),
        (X,),
        (P(None, "a"),),
        P(None, "a"),
    ),
    "norm over rows": (
        lambda x: functional.group_norm(x, 2),
        (X[..., :4, :],),
        (P(None, None, "a"),),
        P(None, None, "a"),
    ),
    "statistics of a shard": (
        lambda x: functional.batch_norm(x, None, None, training=True),
        (X,),
        (P("a"),),
        P("a"),
    ),
    "patches over rows": (patches, (X[..., :4, :],), (P(None, None, "a"),), P()),
    "rows of a table": (bags("sum"), (IDS, TABLE), (P(), P("a")), P()),
    "entries of a bag": (bags("sum"), (IDS[:, :2], TABLE), (P(None, "a"), P()), P()),
    "bags of another size": (offset_bags, (IDS, TABLE), (P("a"), P()), P("a")),
    "positions counted on each rank": (counted_bags, (IDS, numbers(8, 2)), (P("a"), P()), P("a")),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", WRONG)
def test_networks_that_mix_shards_are_refused(name: str) -> None:
    assert_is_refused(*WRONG[name])
