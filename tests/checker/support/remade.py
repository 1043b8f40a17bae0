"""Answers that the checker remembers, made anew each time and compared with what was remembered.

A key that does not say all that an answer depends on would be a wrong verdict. With

    pytest -p tests.checker.support.remade tests/checker

all programs of these tests are checked so, and the number of answers is printed at the end.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from shardmap_torch.checker.interpreter import operations, result_types
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir import fake_results
from shardmap_torch.checker.ir.fake_results import CallLookup
from shardmap_torch.checker.rules import infer
from shardmap_torch.checker.spmd import layout
from shardmap_torch.checker.spmd.operations import Operations, Repeated
from shardmap_torch.checker.verify import path, verdict
from shardmap_torch.core import source_location
from shardmap_torch.errors import ShardTypeError

source_location._USERS[__file__] = False  # messages name lines of the body


class ForgottenError(BaseException):
    """Raised where an answer made anew is not the one that was remembered.

    No Exception, which a body or a search for repairs might catch.
    """


def require(what: str, remembered: object, anew: object) -> None:
    """Requires that two answers are equal, which are compared by their texts too: 1 == 1.0."""
    if _differ(remembered, anew):
        raise ForgottenError(f"{what}: {remembered!r} was remembered, and is {anew!r} anew")


def _differ(one: Any, other: Any) -> bool:
    """Returns whether two answers differ.

    One object is not compared with itself: the text of a storage type has those that it was made
    of, and theirs, as often as they were used.
    """
    if one is other:
        return False
    if type(one) is type(other) and type(one) in (list, tuple) and len(one) == len(other):
        return any(map(_differ, one, other))
    return bool(one != other) or repr(one) != repr(other)


@contextmanager
def remaking() -> Iterator[Counter[str]]:
    """Makes all answers anew in this context; yields how many were compared, by what they say."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for remake in (_comparisons, _calls, _results, _positions, _layouts, _gradients):
            stack.enter_context(remake(counts))
        yield counts


@contextmanager
def _comparisons(counts: Counter[str]) -> Iterator[None]:
    """Of operations on ranks with those on one device."""
    learn, compare = Repeated.learn, Operations._compare_anew
    expected: list[Any] = [None]

    def note(self: Repeated, key: Any, call: Any) -> bool:
        expected[0] = None if key is None else self._known.get(key)
        return False

    def compare_anew(self: Operations, call: Any, *rest: Any) -> Any:
        known, expected[0] = expected[0], None  # a test may ask for no answer to the next call
        try:
            return compare(self, call, *rest)
        except layout.UnrelatedError as error:
            if known is not None:
                raise ForgottenError(f"{call.op}: {error}") from error
            raise

    def learn_again(self: Repeated, key: Any, call: Any, found: Any) -> None:
        known = None if key is None else self._known.pop(key, None)
        learn(self, key, call, found)
        if known is not None:
            counts["comparisons"] += 1
            require(f"{call.op}", known, self._known.get(key))

    with (
        patch.object(Repeated, "note", note),
        patch.object(Repeated, "learn", learn_again),
        patch.object(Operations, "_compare_anew", compare_anew),
    ):
        yield


@contextmanager
def _calls(counts: Counter[str]) -> Iterator[None]:
    """Types of results of calls, and their metadata."""
    call, type_, learn = operations._interpret, result_types.result_types, operations.learn
    expected: list[CallLookup | None] = [None]

    def call_anew(
        self: Interpreter, op: Any, args: Any, kwargs: Any, found: CallLookup | None = None
    ) -> Any:
        expected[0] = found
        return call(self, op, args, kwargs, found)

    def type_anew(self: Interpreter, op: Any, arguments: Any, out: Any) -> Any:
        try:
            return type_(self, op, arguments, out)
        except ShardTypeError as error:
            if expected[0] is not None and expected[0].outcome is not None:
                raise ForgottenError(f"{op}: {error}") from error
            raise

    def learn_again(self: Interpreter, found: CallLookup | None) -> None:
        if found is not None and found.known is not None and found.outcome is not None:
            counts["calls"] += 1
            _require_same_call(self, found)
        learn(self, found)

    with (
        patch.object(operations, "repeat", lambda *args: NotImplemented),
        patch.object(operations, "_interpret", call_anew),
        patch.object(operations, "result_types", type_anew),
        patch.object(operations, "learn", learn_again),
    ):
        yield


def _require_same_call(made_by: Interpreter, found: CallLookup) -> None:
    equation, known = made_by.equations[-1], found.known
    assert known is not None
    assert found.outcome is not None
    types, batched_over = found.outcome
    uses, op = equation.results, known.op
    require(f"{op}", known.name, equation.name)
    require(f"literals of {op}", known.literals, equation.literals)
    require(
        f"results of {op}",
        [(item.shape, item.dtype) for item in known.items if item is not None],
        [(use.shape, use.dtype) for use in uses],
    )
    operands = [(n, found.storage_types[at]) for n, at in known.operands]
    require(f"operands of {op}", operands, [(u.name, u.storage_type) for u in equation.operands])
    if known.is_view:
        sources = [id(each) for each in found.storage_types]
        if any(id(use.storage_type) not in sources for use in uses):
            raise ForgottenError(f"{op}: a result is no view of an operand")
        return
    require(f"types of {op}", list(types), [use.storage_type.types for use in uses])
    for use in uses:
        require(f"batched axes of {op}", batched_over, use.storage_type.batched_over)


@contextmanager
def _results(counts: Counter[str]) -> Iterator[None]:
    """Shapes, strides, dtypes, devices and memory of results on fake tensors."""
    run = fake_results.run_fake

    def run_anew(mode: Any, call: Any, op: Any, args: Sequence[Any], kwargs: Any) -> Any:
        known = None if call is None else call.known
        if known is None:
            return run(mode, call, op, args, kwargs)
        out = run(mode, None, op, args, kwargs)
        counts["results"] += 1
        require(
            f"metadata of {op}", known, fake_results._describe(op, args, kwargs, out, call.tensors)
        )
        return out

    with patch.object(operations, "run_fake", run_anew):
        yield


@contextmanager
def _positions(counts: Counter[str]) -> Iterator[None]:
    """Types at equal positions of lists."""
    each_position = infer._each_position

    def each_anew(row: Any, typing: Any, arguments: Mapping[str, Any]) -> Any:
        found = each_position(row, typing, arguments)
        for index, types in enumerate(found):
            here = infer._at(arguments, index)
            counts["positions"] += 1
            require("a position", types, infer._outcome(row, typing, here))
        return found

    with patch.object(infer, "_each_position", each_anew):
        yield


@contextmanager
def _layouts(counts: Counter[str]) -> Iterator[None]:
    """Layouts that fit shapes."""

    class Anew:
        def get(self, key: Any, make: Callable[[], Any]) -> Any:
            found = make()
            known = before.find(key)
            if known is not None:
                counts["layouts"] += 1
                require("a layout", known, found)
            return before.get(key, lambda: found)

    before = layout._FITTED
    with patch.object(layout, "_FITTED", Anew()):
        yield


@contextmanager
def _gradients(counts: Counter[str]) -> Iterator[None]:
    """Verdicts on programs whose gradients on one device are assumed."""
    verify = path.verify_path

    def verify_anew(request: Any, branches: Any) -> Any:
        outcome = verify(request, branches)
        if not request.met.assumed:
            return outcome
        computed = replace(request, reading=replace(request.reading, assumes=False))
        try:
            anew = verify(computed, branches.again())
        except Exception as error:
            raise ForgottenError(f"with gradients that are computed: {error}") from error
        counts["gradients"] += 1
        require("outputs", outcome.outputs, anew.outputs)
        require("their casts", outcome.exits, anew.exits)
        return anew

    with patch.object(verdict, "verify_path", verify_anew):
        yield


_SESSION = ExitStack()


def pytest_configure() -> None:
    """Remakes all answers of a session that has this as a plugin."""
    counts = _SESSION.enter_context(remaking())
    _SESSION.callback(lambda: print(f"\nanswers made anew and equal: {dict(counts)}"))


def pytest_unconfigure() -> None:
    """Prints how many there were."""
    _SESSION.close()
