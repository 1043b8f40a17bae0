"""Hashes of tensors depend on values and their order, and on nothing else."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardmap_torch.core import hashing
from shardmap_torch.core.hashing import Bits, has_bits, hash_of, hash_text


def tensors() -> Iterator[Tensor]:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        yield torch.arange(35).reshape(5, 7).to(dtype)
    yield torch.arange(35.0).reshape(5, 7).t()
    yield torch.ones(())
    yield torch.ones(0, 3)


@pytest.mark.parametrize("x", list(tensors()), ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_hashes_of_equal_values_are_equal_however_they_lie(x: Tensor) -> None:
    assert hash_of(x) == hash_of(x.clone())
    assert hash_of(x) == hash_of(x.contiguous())
    if x.numel() > 1:
        changed = x.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[-1] = changed.view(-1)[-1].logical_not()
        assert hash_of(x) != hash_of(changed)


@pytest.mark.parametrize("x", list(tensors()), ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_samples_depend_on_values_alone_and_come_to_each(x: Tensor) -> None:
    turns = range(1, 40)
    samples = [Bits([x], turn).digest() for turn in turns]
    strided = torch.stack([x, x], -1)[..., 0]
    assert samples == [Bits([strided], turn).digest() for turn in turns]
    for at in range(x.numel()):
        changed = x.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[at] = changed.view(-1)[at].logical_not()
        if not torch.equal(changed, x):
            assert samples != [Bits([changed], turn).digest() for turn in turns]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20), st.data())
def test_hashes_see_a_change_and_an_exchange(values: list[int], data: Any) -> None:
    x = torch.tensor(values)
    at = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(st.integers(0, len(values) - 1))
    swapped = x.clone()
    swapped[at], swapped[other] = values[other], values[at]
    assert (hash_of(x) == hash_of(swapped)) == (values[at] == values[other])
    flipped = x.clone()
    flipped[at] ^= 1
    assert hash_of(x) != hash_of(flipped)


def test_hashes_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(1000.0)
    whole = hash_of(x)
    monkeypatch.setattr(hashing, "_CHUNK", 16)
    assert hash_of(x) == whole


WAYS = (torch.Tensor.t, torch.Tensor.neg, torch.Tensor.conj, torch.Tensor._neg_view)


@given(
    st.sampled_from([torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
    st.integers(0, 90),
    st.sampled_from([None, 1, 2, 77]),
    st.sampled_from(WAYS),
)
def test_bits_depend_on_values_alone_and_all_of_them_see_any_change(
    dtype: torch.dtype, rows: int, turn: int | None, way: Any
) -> None:
    x = torch.arange(rows * 3).reshape(rows, 3).to(dtype)
    if not (dtype is torch.bool and way in (torch.Tensor.neg, torch.Tensor._neg_view)):
        x = way(x)  # lies otherwise, or is negated or conjugated when it is read
    plain = x.clone(memory_format=torch.contiguous_format).resolve_neg().resolve_conj()
    assert Bits([x, x], turn).digests() == Bits([plain, plain], turn).digests()
    assert Bits([x], turn).digest() == Bits([plain], turn).digest()
    if rows:
        plain.view(-1)[-1] = plain.view(-1)[-1].logical_not()
        assert turn is not None or Bits([x], None).digest() != Bits([plain], None).digest()


@pytest.mark.parametrize("shape", [(8191,), (91, 90), (4096, 64), (2048, 128)])
def test_the_hash_of_a_sample_sees_each_number_of_a_few_and_each_column_of_many(shape: Any) -> None:
    x = torch.arange(math.prod(shape)).reshape(shape)
    hashed = hash_text(x, 4096)
    assert hashed == hash_text(x.mT.clone().mT if x.ndim == 2 else x.clone(), 4096)
    for at in (*range(0, shape[-1], 37), shape[-1] - 1):
        changed = x.clone()
        changed[..., at] += 1
        assert hash_text(changed, 4096) != hashed
    one = x.flatten().index_fill(0, torch.tensor(x.numel() // 2), -1).view(x.shape)
    assert hash_text(one) != hash_text(x)
    assert hash_text(x.to("meta")) == "without data"


@pytest.mark.parametrize("turn", [None, 1])
def test_zeros_that_are_not_stored_are_zeros_and_freed_memory_is_not_read(turn: Any) -> None:
    zeros: Any = torch._efficientzerotensor((64,))
    assert has_bits(zeros)
    assert Bits([zeros], turn).digest() == Bits([torch.zeros(64)], turn).digest()
    freed = torch.ones(64)
    freed.untyped_storage().resize_(0)
    assert not has_bits(freed)
    assert has_bits(torch.ones(0))
