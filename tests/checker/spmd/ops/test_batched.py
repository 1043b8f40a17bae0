"""Operations on the matrices, rows or images that the last dims hold, of which ranks have some."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

MATRICES: Final = numbers(4, 3, 3)
IMAGES: Final = numbers(4, 2, 4, 6)


def symmetric(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(3, dtype=x.dtype) * torch.arange(1, 4)


def padded(*sides: int, mode: str) -> Callable[..., Tensor]:
    return lambda x: functional.pad(x, sides, mode=mode)


def warped(x: Tensor, maps: Tensor) -> Tensor:
    return functional.grid_sample(
        x, functional.affine_grid(maps, [*x.shape], False), align_corners=False
    )


BODIES: Final[dict[str, tuple[Callable[..., Any], Tensor]]] = {
    "tril": (lambda x: x.tril(), MATRICES),
    "triu": (lambda x: (x + 0).triu_(1), MATRICES),
    "eigenvalues": (lambda x: torch.linalg.eigvalsh(symmetric(x)), MATRICES),
    "projections": (lambda x: (q := torch.linalg.eigh(symmetric(x))[1][..., :1]) @ q.mT, MATRICES),
    "singular values": (torch.linalg.svdvals, MATRICES),
    "orthonormal": (lambda x: torch.linalg.qr(x)[1], MATRICES),
    "reflected rows": (padded(1, 2, mode="reflect"), IMAGES[:, 0]),
    "reflected": (padded(1, 2, 0, 1, mode="reflect"), IMAGES),
    "replicated rows": (padded(1, 2, mode="replicate"), IMAGES[:, 0]),
    "replicated": (padded(1, 2, 0, 1, mode="replicate"), IMAGES),
    "replicated volume": (padded(1, 2, 0, 1, 1, 1, mode="replicate"), IMAGES[:, None]),
    "folded": (
        lambda x: functional.fold(functional.unfold(x, 2, stride=2), (4, 6), 2, stride=2),
        IMAGES,
    ),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", BODIES)
def test_each_rank_has_all_of_some(name: str) -> None:
    body, x = BODIES[name]
    assert_is_one_device(body, [x], P("a"), P("a"))


@pytest.mark.parametrize("name", sorted(BODIES.keys() - {"folded"}))
def test_none_of_them_is_divided(name: str) -> None:
    body, x = BODIES[name]
    x = torch.cat([x, x], -1) if x.shape[-1] == 3 else x
    spec = P(*[None] * (x.dim() - 1), "a")
    assert_is_refused(body, [x], spec, P())


def test_each_image_has_a_map_of_its_own() -> None:
    assert_is_one_device(warped, [IMAGES, numbers(4, 2, 3)], P("a"), P("a"))


def test_a_map_of_a_part_of_an_image_is_refused() -> None:
    specs, out = (P(None, None, "a"), P()), P(None, None, "a")
    assert_is_refused(warped, [IMAGES, numbers(4, 2, 3)], specs, out)


def test_a_dim_is_copied_as_often_as_on_one_device() -> None:
    assert_is_one_device(lambda x: x.repeat(1, 2, 3), [IMAGES[0]], P("a"), P("a"))
    assert_is_refused(lambda x: x.repeat(1, x.shape[0]), [IMAGES[:, 0, 0]], P("a"), P("a"))
    assert_is_refused(lambda x: x.repeat(2, 1), [IMAGES[:, 0, 0]], P("a"), P("a"), 2)
