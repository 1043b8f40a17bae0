"""A verdict is used again exactly as long as nothing that it depends on has changed."""

from argparse import Namespace
from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_reduce,
    assume_constant,
    axis_index,
    check_program,
    make_mesh,
    reinterpret,
    shard_map,
)
from shardmap_torch.checker.guards import state
from shardmap_torch.checker.guards.state import State
from tests.checker.support.states import STATES
from tests.support.golden import told

MESH = make_mesh((2,), ("i",), kind="simulated", simulate="ranks")
X = torch.ones(2)


def count_checks(body: Any, **options: Any) -> tuple[Any, list[int]]:
    """The mapped function, and a list that grows with each interpretation."""
    mapped = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P(), **options)
    verdicts = vars(mapped)["_shardmap_verdict"].__self__._checked._verdicts
    checks: list[int] = []
    before = verdicts.get

    def get(key: Any, make: Any) -> Any:
        def counted() -> Any:
            checks.append(1)
            return make()

        return before(key, counted)

    verdicts.get = get
    return mapped, checks


def reduced(x: Tensor) -> Tensor:
    return all_reduce(x, "i", dst=I)


def test_equal_calls_are_checked_once() -> None:
    f, checks = count_checks(reduced)
    for _ in range(3):
        f(X)
    assert len(checks) == 1
    f(torch.ones(4))
    f(X.double())
    f(X.clone().requires_grad_())
    assert len(checks) == 4
    with torch.no_grad():
        f(X)
    assert len(checks) == 5


def test_the_class_of_a_builtin_method_is_part_of_the_signature() -> None:
    """`Function.apply` of torch 2.14 is one, of the user's class."""

    class Flags(dict[str, bool]):
        reduce = True

    make: Any = Flags.fromkeys
    f, checks = count_checks(lambda x: all_reduce(x * (2 if make(()).reduce else 3), "i", dst=I))
    f(X)
    f(X)
    assert len(checks) == 1
    Flags.reduce = False
    f(X)
    assert len(checks) == 2


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("kind", STATES)
def test_a_verdict_does_not_outlive_a_change_of_state(
    kind: str, follow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collectives stay as they are, so that no run could tell."""
    if not follow:  # as in Python 3.13.0
        monkeypatch.setattr(state, "VERSIONS_FOLLOW", False)
        monkeypatch.setattr(state, "dict_version", lambda table: 0)
    undo: list[Callable[[], object]] = []
    read, change = STATES[kind].script(undo)

    def body(x: Tensor) -> Tensor:
        addend = reinterpret(x, "i", src=V, dst=Partial)
        return all_reduce(addend if read() else addend.relu(), "i", dst=I)

    f, checks = count_checks(body)
    try:
        for _ in range(3):
            check_program(f, X)
        assert len(checks) == 1
        change()
        with pytest.raises(ShardTypeError, match="relu over axis 'i' of Partial"):
            check_program(f, X)
    finally:
        for each in undo:
            each()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_body_that_refers_to_a_nested_tensor_is_checked_once() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    f, checks = count_checks(lambda x: all_reduce(x, "i", dst=I) if nested is not None else x)
    assert f(X).tolist() == f(X).tolist() == [2.0]
    assert len(checks) == 1


def test_another_tensor_of_the_same_kind_needs_no_check() -> None:
    weight = torch.ones(2)
    f, checks = count_checks(lambda x: all_reduce(x * weight[0], "i", dst=I))
    f(X)
    weight = torch.ones(2)
    f(X)
    assert len(checks) == 1
    weight = torch.ones(3)
    f(X)
    weight = torch.ones(3).double()
    f(X)
    assert len(checks) == 3
    weight.requires_grad_()  # it becomes an argument, whose gradient is summed
    f(X).sum().backward()
    assert len(checks) == 5
    assert weight.grad is not None
    assert weight.grad.tolist() == [X.sum(), 0, 0]


def test_an_object_at_the_address_of_an_old_one_is_another_object() -> None:
    """Objects that count by identity are kept alive as long as verdicts refer to them."""
    flags = array("b", [1])
    f, checks = count_checks(lambda x: all_reduce(x, "i", dst=I) if flags[0] else x)
    addresses = set()
    for count in range(1, 8):
        f(X)
        assert len(checks) == count
        addresses.add(id(flags))
        flags = array("b", [1])
    assert len(addresses) == 7


def test_a_value_that_comes_back_brings_its_verdict_back() -> None:
    scale = 1.0
    f, checks = count_checks(lambda x: all_reduce(x * scale, "i", dst=I))
    f(X)
    scale = 2.0
    f(X)
    scale = 1.0
    f(X)
    scale = 2.0
    f(X)
    assert len(checks) == 2


def test_a_static_argument_counts_by_value_and_type() -> None:
    def body(x: Tensor, n: float) -> Tensor:
        return all_reduce(x * n, "i", dst=I)

    mapped = shard_map(body, mesh=MESH, in_specs=(P("i"), None), out_specs=P())
    for n in (1, 2, True, 1.0, 1):
        torch.testing.assert_close(mapped(X, n), torch.full((1,), 2.0 * n))
    verdicts = vars(mapped)["_shardmap_verdict"].__self__._checked._verdicts
    assert len(verdicts._known) == 4


@pytest.mark.parametrize("strictness", ["global", "local"])
def test_what_is_in_a_static_argument_counts(strictness: Any) -> None:
    config = Namespace(is_linear=True)

    def summed(x: Tensor, is_linear: Callable[[], bool]) -> Tensor:
        parts = reinterpret(x.sum(0), "i", src=V, dst=Partial)
        return all_reduce(parts * 2 if is_linear() else parts.relu(), "i", dst=I)

    f = shard_map(
        summed, mesh=MESH, in_specs=(P("i"), None), out_specs=P(), check={"i": strictness}
    )

    def ask() -> bool:
        return bool(config.is_linear)

    x = torch.tensor([[1.0, -5.0], [-3.0, 2.0]])
    assert torch.equal(f(x, ask), 2 * x.sum(0))
    config.is_linear = False
    with pytest.raises(ShardTypeError, match="not linear"):
        f(x, ask)
    config.is_linear = True
    assert torch.equal(f(x, ask), 2 * x.sum(0))


def test_a_walk_does_not_enter_the_verdicts_of_mapped_functions() -> None:
    mapped, _ = count_checks(reduced)

    def body(x: Tensor) -> Any:
        return getattr(mapped, str(x.dim()))  # any attribute

    size = len(State(body).found)
    for length in (2, 4, 6):
        mapped(torch.ones(length))
    assert len(State(body).found) == size < 200


def test_an_entry_that_moves_to_the_next_container_is_seen() -> None:
    tables: list[dict[str, int]] = [{"a": 1, "b": 2}, {"c": 3}, {}]
    sequences, own = [[1, 2], [3], []], type("Own", (list,), {})([1])
    for change in (
        partial(tables.__setitem__, slice(2), [{"a": 1}, {"b": 2, "c": 3}]),
        partial(tables[2].update, d=4),
        partial(sequences[2].append, 4),
        partial(sequences.sort, key=len),
        partial(own.append, 2),
    ):
        found = State(lambda: (tables, sequences, own))
        assert found.holds()
        change()
        assert not found.holds()
        assert State(lambda: (tables, sequences, own)).found != found.found


def test_equal_states_are_found_equal_in_other_objects() -> None:
    def made() -> State:
        config = SimpleNamespace(sizes=[1, 2], names={"a": None}, layer=nn.Linear(2, 2))
        return State(None, [config])

    assert made().found == made().found


class Lazy(OrderedDict[str, int]):
    """Imports what it has when it is asked, as mappings of transformers do."""

    def _ask(self, *args: Any) -> Any:
        raise AssertionError("a method of the user's was called")

    values = items = keys = __iter__ = __len__ = __getitem__ = _ask
    __eq__ = __hash__ = __bool__ = __getattr__ = _ask  # type: ignore[assignment]


class Asks:
    """An object whose attributes are computed, and its class too."""

    def __init__(self) -> None:
        self.on = True

    @property
    def value(self) -> int:
        raise AssertionError("a property was asked")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("the class was asked")

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked")


def test_no_method_of_the_objects_is_called() -> None:
    lazy, asks = Lazy(), Asks()
    found = State(lambda: (lazy, asks))
    assert found.holds()
    dict.__setitem__(lazy, "a", 1)
    assert not found.holds()
    found = State(lambda: (lazy, asks))
    object.__getattribute__(asks, "__dict__")["on"] = False
    assert not found.holds()


HANDLED: ContextVar[Any] = ContextVar("HANDLED", default=None)


def test_a_context_variable_that_a_body_sets_and_resets_needs_no_other_check() -> None:
    def body(x: Tensor) -> Tensor:
        token = HANDLED.set([])
        y = all_reduce(x, "i", dst=I)
        HANDLED.reset(token)
        return y

    f, checks = count_checks(body)
    for _ in range(3):
        f(X)
    assert len(checks) == 1


def test_attributes_of_a_library_s_class_are_the_contract_s() -> None:
    """See docs/checker.md: a run is compared with the record at its collectives."""
    f, checks = count_checks(
        lambda x: all_reduce(x * (2 if hasattr(nn.Linear, "scaled") else 1), "i", dst=I)
    )
    f(X)
    with mock.patch.object(nn.Linear, "scaled", True, create=True):
        assert f(X).item() == 4
    assert len(checks) == 1


def test_a_module_in_another_mode_or_with_a_swapped_parameter_keeps_one_verdict() -> None:
    """`torch.func.functional_call` swaps parameters while ranks meet."""
    layer = nn.Linear(2, 2, bias=False).requires_grad_(False)

    def body(x: Tensor) -> Any:
        own = {"layer.weight": layer.weight * (1 + axis_index("i"))}
        return torch.func.functional_call(Meets(layer), own, x)

    f, checks = count_checks(body)
    x = torch.ones(2, 2)
    expected = sum((1 + rank) * layer(x[rank : rank + 1]) for rank in range(2))
    for _ in range(3):
        torch.testing.assert_close(f(x), expected)
    assert len(checks) == 1


class Meets(nn.Module):
    """Ranks meet between two looks at the layer's parameter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        met = all_reduce(x.sum(), "i", dst=R)
        return all_reduce(self.layer(x + 0 * met), "i", dst=I)


def test_state_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_LIMIT", 1_000)
    table = [object() for _ in range(1_001)]

    def body(x: Tensor) -> Tensor:
        return all_reduce(x, "i", dst=I) if table else x

    f, _ = count_checks(body)
    with told(ShardTypeError):
        f(X)
    assume_constant(table)
    f(X)


def test_what_is_declared_constant_is_not_followed() -> None:
    flags = assume_constant({"reduce": True})

    def body(x: Tensor) -> Tensor:
        return all_reduce(x, "i", dst=I) if flags["reduce"] else all_reduce(2 * x, "i", dst=I)

    f, checks = count_checks(body)
    f(X)
    flags["reduce"] = False
    f(X)
    assert len(checks) == 1
