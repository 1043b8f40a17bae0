"""Operands are named as the code of their call writes them, or not at all where that is unclear."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmap_torch.core.source_text import call_text, first_operand, operand_texts

X: Final = torch.ones(2, 2)
W: Final = torch.ones(2, 2) * 2


class _Watch(TorchFunctionMode):
    """Notes the texts of the tensors that the last call of a body got."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self._code, self.call = code, ""
        self.texts: list[str | None] = []
        self.first: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        if frame is not None:
            values = [*args, *kwargs.values()]
            flat = [
                x for each in values for x in (each if isinstance(each, list | tuple) else [each])
            ]
            tensors = list({id(x): x for x in flat if isinstance(x, Tensor)}.values())
            self.texts = operand_texts(frame, tensors)
            self.call = call_text(frame)
            self.first = first_operand(frame.f_code, frame.f_lasti)
        return func(*args, **kwargs)


def watched(body: Callable[..., Any], *args: Any) -> _Watch:
    watch = _Watch(body.__code__)
    with watch:
        body(*args)
    return watch


def in_place(x: Tensor, w: Tensor) -> None:
    y = x * 1
    y += w


def over_lines(x: Tensor, w: Tensor) -> Tensor:
    return (
        x.relu()
        .add(w)
    )  # fmt: skip


def of_several_lines(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat(
        [
            x,
            w,
        ]
    )


CASES: Final[dict[str, tuple[Callable[..., Any], list[str | None]]]] = {
    "an operator": (lambda x, w: x @ w, ["x", "w"]),
    "an operator of calls": (lambda x, w: x.relu() + torch.relu(w), ["x.relu()", "torch.relu(w)"]),
    "a number on the left": (lambda x, w: 2 - w.sum(), ["w.sum()"]),
    "a method": (lambda x, w: x.sum(0).add(w), ["x.sum(0)", "w"]),
    "a method with an option": (lambda x, w: x.add(other=w.T), ["x", "w.T"]),
    "a function": (lambda x, w: torch.add(x, w), ["x", "w"]),
    "a function of a module in a module": (
        lambda x, w: torch.nn.functional.linear(x, w * 1),
        ["x", "w * 1"],
    ),
    "a list": (lambda x, w: torch.stack([x, w]), ["x", "w"]),
    "one tensor twice": (lambda x, w: x * x, ["x"]),
    "an item": (lambda x, w: {"a": x}["a"] + w, ['{"a": x}["a"]', "w"]),
    "an index": (lambda x, w: x[w[0].long() - 2], ["x", "w[0].long() - 2"]),
    "a comparison": (lambda x, w: x > w.mean(), ["x", "w.mean()"]),
    "a minus": (lambda x, w: -w.mT, ["w.mT"]),
    "a write": (in_place, ["y", "w"]),
    "several lines": (of_several_lines, ["x", "w"]),
    "what is not clear": (lambda x, w: (x + w).view(int(w.numel()), -1), [None]),
    "what is long": (
        lambda x, w: (
            ((x + w).log().exp().log().exp().log().exp().log().exp().log().exp() + x.log()) @ w
        ),
        [None, "w"],
    ),
    "the end of a chain over several lines": (over_lines, [None, None]),
}


@pytest.mark.parametrize("name", CASES)
def test_operands_have_the_text_of_their_call(name: str) -> None:
    body, texts = CASES[name]
    assert watched(body, X, W).texts == texts


def test_the_call_and_its_first_argument_have_a_text_too() -> None:
    watch = watched(lambda x, w: torch.add(x.T, w), X, W)
    assert (watch.call, watch.first) == ("torch.add(x.T, w)", "x.T")
    assert watched(lambda *xs: torch.add(*xs), X, W).first is None


def test_code_without_a_source_has_no_text() -> None:
    space: dict[str, Any] = {}
    exec("def body(x, w): return x @ w", space)
    watch = watched(space["body"], X, W)
    assert (watch.texts, watch.call, watch.first) == ([None, None], "", None)
