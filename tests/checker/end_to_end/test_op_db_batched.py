"""PyTorch's operator database as simulated ranks run it, and as records of it are evaluated.

Each operator is called on operands that vary over the ranks of one axis, of two, or over none of
them, in a checked body on the default simulated mesh, which is one batched program. Its record is
what trials evaluate. Results and gradients must be those of plain calls on the operands of each
rank; what is refused, is refused by an error of ours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import chain, product
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, get_testing_overrides
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from shardmap_torch import P, ShardMapError, make_mesh, shard_map
from shardmap_torch.checker.ir.repairs import NONE
from shardmap_torch.checker.verify.verdict import attempt
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.modes import LOST, FunctionMode
from shardmap_torch.record.evaluation import Computer
from shardmap_torch.record.recorder import ProgramRecorder
from shardmap_torch.run.trials.draws import Like
from shardmap_torch.run.trials.runs import Program
from shardmap_torch.run.trials.watch import UntriedError
from tests.checker.support.fuzz import Case, cases, derive, precision
from tests.checker.support.fuzz_all import dtypes_of, name_of, runs_here
from tests.checker.support.global_fuzz import is_drawn
from tests.support.fuzzing import FUZZ

pytestmark = pytest.mark.usefixtures("quiet")
MESH: Final = make_mesh((2, 2), ("a", "b"), kind="simulated")
BY_RANK: Final = make_mesh((2, 2), ("a", "b"), kind="simulated", simulate="ranks")
RANKS: Final = (*product(range(2), repeat=2),)
SAMPLES: Final = 6 if FUZZ else 2
UNWRITTEN: Final = ("empty", "new_empty")
"""Operators whose results are memory that nobody has written."""
SPARSE: Final = ("sparse", "to_sparse")

NOT_BY_VALUES: Final = ("cov", "as_strided_scatter")
"""Operators that branch into a way without a derivative in torch, or go by places in memory."""

RUNNABLE: Final = [
    info
    for info in op_db
    if runs_here(info)
    and not is_drawn(info)
    and not info.name.startswith((*UNWRITTEN, *SPARSE, *NOT_BY_VALUES))
]
BY_NAME: Final = {name_of(info): info for info in RUNNABLE}


@dataclass(frozen=True)
class Trial:
    """One call of an operator, with the axis over which each operand varies, if one does.

    Attributes:
        case: the sample.
        over: the axis of each operand that varies.
        columns: the values of each operand along its axis.
    """

    case: Case
    over: Mapping[int, str]
    columns: Mapping[int, Sequence[Tensor]]

    def on_rank(self, rank: Sequence[int]) -> dict[int, Tensor]:
        """Returns the operands of a rank."""
        at = {"a": rank[0], "b": rank[1]}
        return {i: xs[at.get(self.over.get(i, ""), 0)] for i, xs in self.columns.items()}

    def specs(self) -> tuple[P, ...]:
        return tuple(P(self.over[i]) if i in self.over else P() for i in self.columns)

    def stacked(self) -> list[Tensor]:
        return [torch.stack([*xs]) if i in self.over else xs[0] for i, xs in self.columns.items()]

    def body(self, *shards: Tensor) -> tuple[Tensor, ...]:
        """Calls the operator on one rank."""
        pairs = zip(self.columns, shards, strict=True)
        own = {i: x[0] if i in self.over else x for i, x in pairs}
        return tuple(y[None, None] for y in self.case.call(own))


def trials(case: Case, generator: torch.Generator) -> Iterator[Trial]:
    """Yields calls of which all operands vary, each alone, or neighbours over different axes."""
    places = [i for i, x in enumerate(case.leaves) if isinstance(x, Tensor)]
    found = [dict.fromkeys(places, "a"), *({i: "a"} for i in places[:4])]
    found.append({i: "ab"[at % 2] for at, i in enumerate(places)})
    for over in [each for at, each in enumerate(found) if each and each not in found[:at]]:
        columns = {i: _column(case.leaves[i].detach(), generator) for i in places}
        yield Trial(case, over, columns)


def _column(x: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Returns the values on two ranks, near to the sample, which may have to be symmetric, say."""
    if is_smooth(x):
        return [x, x * (1 + 0.05 * torch.randn(x.shape, dtype=x.dtype, generator=generator))]
    return [x, x.roll(1, -1).contiguous() if x.ndim and x.numel() else x]


def leaves_of(values: Mapping[int, Tensor], smooth: Any) -> dict[int, Tensor]:
    return {i: x.detach().clone().requires_grad_(i in smooth) for i, x in values.items()}


Run = Callable[[Trial, dict[int, Tensor], Mapping[int, Tensor]], tuple[Sequence[Tensor], Any]]
"""From operands and cotangents of results to the results, and gradients of operands."""


def batched(trial: Trial, given: dict[int, Tensor], grids: Mapping[int, Tensor]) -> Any:
    mapped = shard_map(trial.body, mesh=MESH, in_specs=trial.specs(), out_specs=P("a", "b"))
    results = mapped(*given.values())
    return results, derive(results, given, grids)


def evaluated(trial: Trial, given: dict[int, Tensor], grids: Mapping[int, Tensor]) -> Any:
    """Evaluates the record.

    Raises:
        UnrecordedError: there is none.
    """
    mapped = shard_map(trial.body, mesh=BY_RANK, in_specs=trial.specs(), out_specs=P("a", "b"))
    args = [*given.values()]
    call = mapped._shardmap_call(args)  # type: ignore[attr-defined]
    verdict = attempt(call, NONE, "local", observe=ProgramRecorder)
    likes = {at: Like(x.shape, x.dtype, x.device, x.requires_grad) for at, x in enumerate(args)}
    program = Program(call, verdict, likes)
    try:
        evaluation = program.evaluation(dict(enumerate(args)), Computer())
    except UntriedError as error:
        raise UnrecordedError(str(error)) from None
    results = program.results(evaluation)
    pairs = enumerate(results)
    cotangents = {p: grids[i] for i, p in pairs if i in grids and p in program.record.seeds}
    found = program.gradients(evaluation, cotangents)
    return [*results.values()], [found.get(at) for at in range(len(args))]


class UnrecordedError(ShardMapError):
    """An operator whose record cannot be evaluated, as of one that takes numbers."""


def differences(trial: Trial, flows: bool, run: Run = batched) -> str | None:
    """Returns how the ranks differ from plain calls; None if not, or if nothing can be compared.

    Raises:
        ShardMapError: the checker refuses the body.
    """
    smooth = trial.case.smooth if flows else frozenset[int]()
    generator = torch.Generator().manual_seed(0)
    try:
        operands = [leaves_of(trial.on_rank(rank), smooth) for rank in RANKS]
        outputs = [trial.case.call(own) for own in operands]
        again = [trial.case.call(trial.on_rank(rank)) for rank in RANKS]
        cotangents = [_cotangents(outs, generator) for outs in outputs]
        expected = [*map(derive, outputs, operands, cotangents)]
    except (RuntimeError, ValueError, IndexError):  # a sample that is an error on these values
        return None
    pairs = zip(chain(*outputs), chain(*again), strict=True)
    if not all(_agree(*pair) for pair in pairs):
        return None  # it draws
    if len({tuple(y.shape for y in outs) for outs in outputs}) > 1:
        return None
    given = leaves_of(dict(zip(trial.columns, trial.stacked(), strict=True)), smooth)
    grids = {i: _grid([each[i] for each in cotangents]) for i in cotangents[0]}
    results, gradients = run(trial, given, grids)
    coarse = max((precision(each) for each in results), default=0.0)
    for place, result in enumerate(results):
        if not _agree(result, _grid([outs[place] for outs in outputs]), coarse):
            return f"result {place} differs"
    found = dict(zip(given, gradients, strict=True))
    for at, (i, gradient) in enumerate(found.items()):
        if not _agree(gradient, _total(trial, i, [each[at] for each in expected]), coarse):
            return f"gradient {at} differs"
    return None


def _cotangents(outputs: Sequence[Tensor], generator: torch.Generator) -> dict[int, Tensor]:
    return {
        at: torch.randn(y.shape, dtype=y.dtype, generator=generator)
        for at, y in enumerate(outputs)
        if y.requires_grad
    }


def _grid(values: Sequence[Tensor]) -> Tensor:
    grid: Tensor = torch.stack([*values]).unflatten(0, (2, 2))
    return grid


def _total(trial: Trial, place: int, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the gradient of an operand, of which each rank that has it gives an addend."""
    if None in gradients:
        return None
    grid, axis = _grid([x for x in gradients if x is not None]), trial.over.get(place)
    return grid.sum((0, 1) if axis is None else 1 if axis == "a" else 0)


def _agree(found: Tensor | None, expected: Tensor | None, coarse: float = 0.0) -> bool:
    if found is None or expected is None:  # a gradient that is zero may be None
        rest = expected if found is None else found
        return rest is None or not rest.any()
    if found.dtype != expected.dtype:
        return False
    rounding = max(1e-7, coarse, precision(expected))
    return torch.allclose(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


def faults(info: Any, samples: int = SAMPLES, run: Run = batched) -> list[str]:
    """Tries an operator, with a gradient or, where that is refused, without one."""
    found = []
    for dtype in dtypes_of(info, FUZZ):
        for number, case in enumerate(cases(info, dtype, samples)):
            for trial in trials(case, torch.Generator().manual_seed(number)):
                for flows in (True, False) if case.smooth else (False,):
                    try:
                        fault = differences(trial, flows, run)
                    except ShardMapError:
                        continue
                    except RuntimeError as error:
                        if "not implemented for" in str(error):  # a dtype that no CPU adds up
                            break
                        fault = f"{error}".splitlines()[0]
                    if fault is not None:
                        found.append(f"{dtype}, sample {number}, {trial.over}, {flows}: {fault}")
                    break
    return found


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", BY_NAME)
def test_an_operator_gives_each_rank_what_a_plain_call_does(name: str) -> None:
    assert faults(BY_NAME[name]) == []


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", BY_NAME)
def test_the_record_of_an_operator_has_what_a_plain_call_does(name: str) -> None:
    assert faults(BY_NAME[name], run=evaluated) == []


class Given(FunctionMode):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append((func, args, {**kwargs}))
        return func(*args, **kwargs)


class _FoundError(Exception):
    """Carries what a mode of torch's was called with."""


class Catching(TorchFunctionMode):
    """Stops where one function of torch is called."""

    def __init__(self, wanted: Any) -> None:
        super().__init__()
        self._wanted = wanted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._wanted:
            raise _FoundError((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


_BY_PLACE: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)


def lost_by(func: Any) -> list[str]:
    """Returns the names of the arguments of a function that its call in a mode does not have."""
    try:
        parameters = signature(func).parameters.values()
    except ValueError:  # it is in C
        return []
    named = {p.name: torch.ones(2) for p in parameters if p.kind is not Parameter.VAR_KEYWORD}
    first = [named[p.name] for p in parameters if p.kind in _BY_PLACE]
    rest = {p.name: named[p.name] for p in parameters if p.kind is Parameter.KEYWORD_ONLY}
    try:
        with Catching(func):
            func(*first, **rest)
    except _FoundError as found:
        seen = [id(x) for x in tree_leaves(found.args)]
        return [name for name, value in named.items() if id(value) not in seen]
    except Exception:  # it works on its arguments before any mode sees it
        return []
    return []


def in_python() -> list[Any]:
    """Returns the functions that modes see and that are written in Python."""
    return [each for each in get_testing_overrides() if hasattr(each, "__code__")]


def test_the_table_of_lost_arguments_has_all_that_torch_loses() -> None:
    found = {each: lost_by(each) for each in in_python()}
    assert {each: names for each, names in found.items() if names} == {
        each: [name] for each, name in LOST.items()
    }


X, Y, WEIGHT = (torch.rand(3, 3, dtype=torch.float64) for _ in range(3))
LOSING: Final[Mapping[str, tuple[Any, Sequence[Any], Mapping[str, Any]]]] = {
    "by name": (functional.l1_loss, (X, Y), {"weight": WEIGHT}),
    "by position": (functional.l1_loss, (X, Y, None, None, "sum", WEIGHT), {}),
    "of a matrix product": (torch.chain_matmul, (X, Y), {"out": torch.zeros(3, 3).double()}),
    "of an order": (Tensor.dim_order, (X,), {"ambiguity_check": True}),
}


@pytest.mark.parametrize("name", LOSING)
def test_modes_within_modes_get_the_argument_that_torch_loses(name: str) -> None:
    func, args, kwargs = LOSING[name]
    with Given() as outer, Given() as inner:
        func(*args, **kwargs)
    for mode in (inner, outer):
        called, _, given = next(each for each in mode.seen if each[0] is func)
        assert given[LOST[called]] is (kwargs or {"weight": WEIGHT})[LOST[called]]
