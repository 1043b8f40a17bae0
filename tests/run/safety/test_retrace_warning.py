"""A value that is another one in each call makes a warning, once, that names it."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, make_mesh, shard_map
from shardmap_torch.run.safety import retrace_warning

MESH = make_mesh((2,), ("i",), kind="simulated", simulate="ranks")
X = torch.ones(2)
STEP = 0


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrace_warning, "LIMIT", 4)
    monkeypatch.setattr(retrace_warning, "_ENDED", {})


def mapped(body: Any, *more: Any) -> Callable[..., Any]:
    specs = (P("i"), *more)
    return shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("i"))


def scaled(x: Tensor, step: Any) -> Any:
    return x * step


def warned(call: Callable[[int], Any], count: int = 6) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(count):
            call(number)
    assert all(warning.filename == __file__ for warning in found)
    return [str(warning.message) for warning in found]


def test_a_static_argument_that_counts_is_named_with_its_last_values_once() -> None:
    f = mapped(scaled, None)
    assert warned(lambda step: f(X, step / 4)) == [
        "scaled: each of the last 4 calls was checked again, since step was another one each time: "
        "..., 0.25, 0.5, 0.75. What is no tensor is a part of the program. Pass it as a tensor, "
        "such as torch.tensor(0.75), with P() as its spec."
    ]
    assert warned(lambda step: f(X, step / 4 + 100)) == []


def test_an_integer_of_which_the_program_is_a_function_makes_no_warning() -> None:
    f = mapped(scaled, None)
    assert warned(lambda step: f(X, step), 12) == []


def test_a_number_is_named_at_the_third_check_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrace_warning, "LIMIT", 32)
    f = mapped(scaled, None)
    assert warned(lambda step: f(X, step / 4), 3) == []
    (text,) = warned(lambda step: f(X, step / 4 + 3), 1)
    assert "each of the last 4 calls" in text


def test_an_integer_that_decides_steps_has_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrace_warning, "LIMIT", 7)
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    f = mapped(lambda x, layer: x * weights[layer], None)
    assert warned(lambda layer: f(X, layer), 6) == []
    (text,) = warned(lambda layer: f(X, layer + 6), 1)
    assert "since layer was another one each time" in text


def rows(x: Tensor, y: Tensor) -> Tensor:
    return x.add({y.shape[0]: 1}[y.shape[0]])


def test_a_size_is_named_at_the_third_check_anew_with_its_dim_and_a_remedy() -> None:
    f = mapped(rows, P())
    assert warned(lambda size: f(X, torch.ones(2 + size)), 3) == []
    assert warned(lambda size: f(X, torch.ones(5 + size)), 4) == [
        "rows: each of the last 4 calls was checked again, since dim 0 of y was another one each "
        "time: ..., 3, 4, 5. The verdict holds for one size only: NotGeneralError: the body uses "
        "it as a plain number, such as an index or a key. Pad it to one of a few sizes; of a cache "
        "that grows, pass all of its length, and the position as a tensor."
    ]


def test_sizes_that_the_body_does_not_ask_for_make_no_warning() -> None:
    f = mapped(lambda x, y: x + y.sum(), P())
    assert warned(lambda size: f(X, torch.ones(2 + size)), 8) == []


def test_what_the_warning_advises_is_checked_once() -> None:
    f = mapped(scaled, P())
    assert warned(lambda step: f(X, torch.tensor(step))) == []
    assert len(vars(f)["_shardmap_verdict"].__self__._checked._verdicts._known) == 1


def test_a_number_by_a_spec_is_named() -> None:
    f = mapped(scaled, P())
    (text,) = warned(lambda step: f(X, step / 2))
    assert "since step was another one each time: ..., 0.5, 1.0, 1.5." in text


def test_a_leaf_of_a_tree_is_named_by_its_path() -> None:
    f = mapped(lambda x, options: x * options["step"], None)
    (text,) = warned(lambda step: f(X, {"step": step / 4, "rate": 0.1}))
    assert "since options['step'] was another one each time" in text


def test_an_object_made_anew_for_each_call_is_named() -> None:
    f = mapped(lambda x, f: f(x), None)
    (text,) = warned(lambda step: f(X, lambda x: x + 1))
    assert "since f was another one each time: ..., <function" in text
    assert text.endswith("Pass what is equal from call to call.")


def refers_to_a_global() -> Callable[[int], Any]:
    f = mapped(lambda x: x * STEP)

    def call(step: int) -> None:
        global STEP
        STEP = step
        f(X)

    return call


def closes_over() -> Callable[[int], Any]:
    count = 0
    f = mapped(lambda x: x * count)

    def call(step: int) -> None:
        nonlocal count
        count = step
        f(X)

    return call


class Model:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.step


def has_an_attribute() -> Callable[[int], Any]:
    model = Model()
    f = mapped(model)

    def call(step: int) -> None:
        model.step = step
        f(X)

    return call


@pytest.mark.parametrize(
    ("way", "name"),
    [(refers_to_a_global, "STEP"), (closes_over, "count"), (has_an_attribute, "step")],
)
def test_what_the_code_refers_to_is_named(way: Callable[[], Any], name: str) -> None:
    (text,) = warned(way())
    assert f"since {name} was another one each time: ..., 1, 2, 3." in text


def test_values_that_come_again_make_no_warning() -> None:
    f = mapped(scaled, None)
    assert warned(lambda step: f(X, step % 3), 12) == []


def test_other_calls_in_between_make_no_warning() -> None:
    f = mapped(scaled, None)

    def call(step: int) -> None:
        f(X, step)
        f(X, 0)

    assert warned(call, 12) == []


def test_other_shapes_in_between_make_no_warning() -> None:
    f = mapped(scaled, None)
    assert warned(lambda step: f(torch.ones(2 + 2 * step), step), 12) == []


def test_only_what_changes_each_time_is_named() -> None:
    f = mapped(lambda x, epoch, step: x * step + epoch, None, None)
    (text,) = warned(lambda step: f(X, step // 3, step / 4))
    assert "since step was another one each time" in text


def test_arrays_of_several_truths_count_as_changing() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError

        __hash__ = object.__hash__

        def __repr__(self) -> str:
            return "odd"

    f = mapped(lambda x, odd: x, None)
    (text,) = warned(lambda step: f(X, Odd()))
    assert "since odd was another one each time: ..., odd, odd, odd." in text


def test_a_function_that_is_made_anew_for_each_call_is_warned_of_once_and_freed_at_once() -> None:
    mesh, held = make_mesh((2,), ("i",), kind="simulated"), []

    def step() -> None:
        big = torch.ones(2)
        held.append(weakref.ref(big))
        shard_map(lambda x: x + big.sum(), mesh=mesh, in_specs=P("i"), out_specs=P("i"))(big)

    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(9):
                step()
    finally:
        gc.enable()
    assert [str(warning.message) for warning in caught] == [
        "<lambda>: shard_map has been applied to this function 4 times, and each result was "
        "dropped, so that each was checked again. Apply shard_map once, outside of the loop."
    ]
    assert not any(ref() is not None for ref in held[:-1])


def test_a_function_for_each_of_many_layers_is_not_warned_of() -> None:
    mesh = make_mesh((2,), ("i",), kind="simulated")
    layers = [
        shard_map(lambda x, n=n: x + n, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        for n in range(9)
    ]
    for layer in layers:  # warnings are errors
        layer(torch.ones(2))
