"""The generator computes Threefry-2x32-20, in every form and under vmap."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch.core.threefry import threefry_of_ints
from shardmap_torch.random import blocks as module
from shardmap_torch.random.blocks import threefry

# Random123's tests/kat_vectors, threefry 2 32 20: counter, key, result.
KNOWN = [
    (0x0000000000000000, 0x0000000000000000, 0x6B20015999BA4EFE),
    (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x1CB996FCBB002BE7),
    (0x243F6A8885A308D3, 0x13198A2E03707344, 0xC4923A9C483DF7A0),
]

WORDS = st.integers(-(2**63), 2**63 - 1)


def signed(block: int) -> int:
    return block - 2**64 if block >= 2**63 else block


def unsigned(block: int) -> int:
    return block % 2**64


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
@pytest.mark.parametrize("count", [1, 100])
def test_known_answers(counter: int, key: int, result: int, count: int) -> None:
    assert threefry_of_ints(key, counter) == result
    drawn = threefry(torch.tensor(signed(key)), torch.tensor([signed(counter)] * count))
    assert {unsigned(block) for block in drawn.tolist()} == {result}


@given(st.lists(st.tuples(WORDS, WORDS), min_size=33, max_size=40))
def test_tensors_and_python_numbers_give_the_same(pairs: list[tuple[int, int]]) -> None:
    keys, counters = (torch.tensor(values) for values in zip(*pairs, strict=True))
    expected = [signed(threefry_of_ints(key, counter)) for key, counter in pairs]
    assert threefry(keys, counters).tolist() == expected
    assert [threefry(k, c).item() for k, c in zip(keys[:3], counters[:3], strict=True)] == (
        expected[:3]
    )


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    key, counters = torch.tensor(7), torch.arange(1000)
    whole = threefry(key, counters)
    monkeypatch.setattr(module, "_CHUNK", 64)
    assert torch.equal(threefry(key, counters), whole)
    assert torch.equal(threefry(key.expand(1000), counters), whole)


def test_operands_broadcast() -> None:
    keys, counters = torch.arange(3).reshape(3, 1), torch.arange(50)
    drawn = threefry(keys, counters)
    assert drawn.shape == (3, 50)
    for i in range(3):
        assert torch.equal(drawn[i], threefry(keys[i], counters))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (0, 1)])
def test_vmap_draws_what_a_loop_draws(in_dims: tuple[int | None, int | None]) -> None:
    keys = torch.arange(5) * 3 if in_dims[0] is not None else torch.tensor(2)
    shape = {None: (4, 3), 0: (5, 4, 3), 1: (4, 5, 3)}[in_dims[1]]
    counters = torch.arange(60 if in_dims[1] is not None else 12).reshape(shape)
    drawn = torch.func.vmap(threefry, in_dims=in_dims)(keys, counters)
    for i in range(5):
        key = keys[i] if in_dims[0] is not None else keys
        counter = counters if in_dims[1] is None else counters.select(in_dims[1], i)
        assert torch.equal(drawn[i], threefry(key, counter))


def test_the_operator_keeps_the_contract_of_torch() -> None:
    for count in (2, 100):
        torch.library.opcheck(
            torch.ops.shardmap_torch.threefry.default, (torch.tensor(1), torch.arange(count))
        )
