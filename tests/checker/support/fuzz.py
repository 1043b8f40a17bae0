"""Tries the rule tables on PyTorch's operator database, against what the ranks really compute.

For one operator, one sample and one type for each operand: rank 0 runs under a mode that types each
ATen operation of the forward and of the backward; then every rank runs on its own values. What is
typed R, I or K must agree on the ranks; what is typed P must depend on the operands' sums alone,
and its sum must be the operation on the sums; what is typed Z must be zero.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardmap_torch.checker.rules.infer import (
    is_in_linear_backward,
    name_arguments,
    signature_of,
    tensors_of,
    type_call,
)
from shardmap_torch.checker.rules.lattice import BITS, BRANCH, INTEGER, Refusal, add
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.run.trials.draws import random_like
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z
from shardmap_torch.validate.numbers import refute, shifted, total

NUM_RANKS: Final = 2
SEED_OF: Final = {I: (I,), R: (V, Partial), V: (V,), Partial: (R,), Z: (K,), K: (I, V, Partial)}
"""The cotangents that an output of each type may get."""


class RefusedError(Exception):
    """The tables refuse an operation."""


class UntypedError(Exception):
    """A tensor without strided memory: not what is typed here."""


class Typing(TorchDispatchMode):
    """Types every ATen operation by the tables, on one axis."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._types: dict[int, tuple[AxisType, Any]] = {}

    def bring(self, tensor: Tensor, axis_type: AxisType) -> None:
        """Types a tensor's memory, which stays alive so that its address stays its own."""
        storage = _storage(tensor)
        self._types[storage._cdata] = (axis_type, storage)

    def read(self, tensor: Tensor) -> tuple[AxisType]:
        return (self._types.get(_storage(tensor)._cdata, (K, None))[0],)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments = name_arguments(func, args, kwargs or {})
        if _only_views(func):
            self._refuse_bits(func, arguments)
            return func(*args, **(kwargs or {}))
        outcomes = type_call(func, arguments, self.read, 1)
        for each in outcomes:
            if isinstance(each, Refusal):
                raise RefusedError(f"{func}: {each.reason}")
        before = {id(t): self.read(t)[0] for v in arguments.values() for t in tensors_of(v)}
        out = func(*args, **(kwargs or {}))
        self._write(func, arguments, outcomes)
        self._resolve(func, arguments, outcomes, out, before)
        return out

    def _refuse_bits(self, func: Any, arguments: Mapping[str, Any]) -> None:
        if func is torch.ops.aten.view.dtype and self.read(arguments["self"])[0] == Partial:
            raise RefusedError(f"{func}: {BITS}")

    def _write(self, func: Any, arguments: Mapping[str, Any], outcomes: Sequence[Any]) -> None:
        for place, name in enumerate(signature_of(func).writes):
            for position, target in enumerate(tensors_of(arguments[name])):
                at = position if isinstance(arguments[name], list | tuple) else place
                axis_type = outcomes[at if at < len(outcomes) else 0][0]
                whole = target.numel() * target.element_size() == _storage(target).nbytes()
                total = axis_type if whole else add([self.read(target)[0], axis_type])
                if isinstance(total, Refusal):
                    raise RefusedError(f"{func}: {total.reason}")
                self.bring(target, total)

    def _resolve(
        self,
        func: Any,
        arguments: Mapping[str, Any],
        outcomes: Sequence[Any],
        out: Any,
        before: Mapping[int, AxisType],
    ) -> None:
        results = list(out) if isinstance(out, list | tuple) else [out]
        real = any(is_smooth(t) for value in arguments.values() for t in tensors_of(value))
        for place, result in enumerate(results):
            axis_type = outcomes[place if len(outcomes) == len(results) else 0][0]
            for tensor in tensors_of(result):
                rounded = not is_smooth(tensor) and (real or tensor.dtype is torch.bool)
                if axis_type == Partial and rounded and not is_in_linear_backward():
                    raise RefusedError(f"{func}: {INTEGER}")
                if id(tensor) not in before:
                    self.bring(tensor, axis_type)


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as problem:
        raise UntypedError(str(problem)) from None


def _only_views(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def _unseeded(op: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of op_db's wrapper, with which all ranks would draw the same."""
    return op(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One sample of one operator, taken apart into its floating tensors and the rest."""

    name: str
    op: Any
    leaves: Sequence[Any]
    spec: Any
    smooth: frozenset[int]

    @property
    def places(self) -> list[int]:
        """Returns the operands that get types: floating tensors, or all where there are none."""
        tensors = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        return [i for i in tensors if is_smooth(self.leaves[i])] or tensors

    def call(self, values: Mapping[int, Tensor]) -> list[Tensor]:
        """The floating results."""
        leaves = [
            values.get(i, leaf.clone() if isinstance(leaf, Tensor) else leaf)
            for i, leaf in enumerate(self.leaves)
        ]
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        with patch.object(common_methods_invocations, "wrapper_set_seed", _unseeded):
            out = self.op(first, *args, **kwargs)
        return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


def written_in_place(info: Any) -> Any:
    """The in-place variant of an operator on a copy, or None."""
    variant = info.inplace_variant
    if variant is None:
        return None
    return lambda first, *args, **kwargs: variant(first.clone(), *args, **kwargs)


def cases(info: Any, dtype: torch.dtype, limit: int, op: Any = None) -> Iterator[Case]:
    """The first samples of an operator, or of `op` in its place."""
    torch.manual_seed(0)
    real = dtype.is_floating_point or dtype.is_complex
    made = info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd and real)
    for number, sample in enumerate(made):
        if number >= limit:
            return
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        smooth = {i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
        plain = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        yield Case(info.name, op or info.op, plain, spec, frozenset(smooth))


@dataclass(frozen=True)
class Typings:
    """The types that one trial starts from: of operands by place, and which cotangents to take."""

    operands: Mapping[int, AxisType]
    seed: AxisType | None = None

    def cotangent(self, axis_type: AxisType) -> AxisType:
        allowed = SEED_OF[axis_type]
        return self.seed if self.seed in allowed else allowed[0]


@dataclass
class Report:
    """Findings of one trial.

    Attributes:
        refused: why the tables refuse it; None if they accept it.
        skipped: why the ranks could not run it.
        wrong: claims that do not hold.
        results: the types of results and of gradients.
    """

    refused: str | None = None
    skipped: str | None = None
    wrong: list[str] = field(default_factory=list)
    results: list[AxisType | None] = field(default_factory=list)


@dataclass
class Values:
    """The operands and cotangents of every rank, made from the sample's values."""

    case: Case
    types: Typings
    generator: torch.Generator

    def operand(self, place: int) -> list[Tensor]:
        base = self.case.leaves[place].detach()
        return self._spread(base, self.types.operands[place])

    def _noise(self, like: Tensor) -> Tensor:
        if not is_smooth(like):
            return random_like(like, self.generator)
        return torch.randn(like.shape, dtype=like.dtype, generator=self.generator)

    def _spread(self, base: Tensor, axis_type: AxisType) -> list[Tensor]:
        if axis_type in (V, Partial) and not is_smooth(base):
            return [
                random_like(base, self.generator) if base.numel() else base
                for _ in range(NUM_RANKS)
            ]
        if axis_type == Partial:
            return [base * self._noise(base) for _ in range(NUM_RANKS)]
        if axis_type == V:  # near the sample, which may have to be positive definite, say
            return [base * (1 + 0.05 * self._noise(base)) for _ in range(NUM_RANKS)]
        return [
            torch.zeros_like(base) if axis_type == Z else base.clone() for _ in range(NUM_RANKS)
        ]

    def resplit(
        self, columns: Mapping[int, Sequence[Tensor]], types: Mapping[int, AxisType]
    ) -> dict[int, Sequence[Tensor]]:
        """Every P as another sum."""
        return {
            i: shifted(column, self.generator) if types[i] == Partial else column
            for i, column in columns.items()
        }

    def cotangent(self, like: Tensor, axis_type: AxisType) -> list[Tensor]:
        fresh = [self._noise(like) for _ in range(NUM_RANKS)]
        return fresh if axis_type in (V, Partial) else [fresh[0].clone() for _ in range(NUM_RANKS)]


Row = list[dict[int, Tensor]]
"""Tensors by place, one dict a rank."""


def per_rank(columns: Mapping[int, Sequence[Tensor]]) -> Row:
    return [{i: column[r] for i, column in columns.items()} for r in range(NUM_RANKS)]


def meant(
    columns: Mapping[int, Sequence[Tensor]], types: Mapping[int, AxisType]
) -> dict[int, Tensor]:
    """The values that the operands mean: sums of P."""
    return {i: total(column) if types[i] == Partial else column[0] for i, column in columns.items()}


def run(
    case: Case, values: Mapping[int, Tensor], cotangents: Mapping[int, Tensor], seed: int
) -> list[Tensor | None]:
    """Results and gradients of one rank."""
    torch.manual_seed(seed)
    inputs = {i: value.detach().clone() for i, value in values.items()}
    for i, value in inputs.items():
        value.requires_grad_(i in case.smooth)
    outputs = case.call(inputs)
    return [*(out.detach() for out in outputs), *derive(outputs, inputs, cotangents)]


def derive(
    outputs: Sequence[Tensor], inputs: Mapping[int, Tensor], cotangents: Mapping[int, Tensor]
) -> list[Tensor | None]:
    chosen = [i for i in cotangents if outputs[i].requires_grad]
    wanted = [i for i, value in inputs.items() if value.requires_grad]
    if not chosen or not wanted:
        return [None for _ in inputs]
    gradients = torch.autograd.grad(
        [outputs[i] for i in chosen],
        [inputs[i] for i in wanted],
        [cotangents[i] for i in chosen],
        allow_unused=True,
    )
    found = dict(zip(wanted, gradients, strict=True))
    return [found.get(i) for i in inputs]


@dataclass
class Typed:
    """Types that the tables give one trial."""

    types: list[AxisType | None]
    columns: dict[int, list[Tensor]]
    cotangents: dict[int, list[Tensor]]
    seeds: dict[int, AxisType]
    refused: str | None


def interpret(case: Case, types: Typings, values: Values) -> Typed:
    """Runs rank 0 under the tables."""
    columns = {i: values.operand(i) for i in types.operands}
    mode = Typing()
    inputs = {i: column[0].detach().clone() for i, column in columns.items()}
    for i, tensor in inputs.items():
        tensor.requires_grad_(i in case.smooth)
        mode.bring(tensor, types.operands[i])
    torch.manual_seed(0)
    with mode:
        outputs = case.call(inputs)
    found: list[AxisType | None] = [mode.read(out)[0] for out in outputs]
    seeds = {
        i: types.cotangent(mode.read(out)[0]) for i, out in enumerate(outputs) if out.requires_grad
    }
    cotangents = {i: values.cotangent(outputs[i], axis_type) for i, axis_type in seeds.items()}
    first = {i: column[0].clone() for i, column in cotangents.items()}
    for i, tensor in first.items():
        mode.bring(tensor, seeds[i])
    refused = None
    try:
        with mode:
            gradients = derive(outputs, inputs, first)
        found += [None if each is None else mode.read(each)[0] for each in gradients]
    except RefusedError as refusal:  # the forward is still compared with the ranks
        found += [None for _ in inputs]
        refused = str(refusal)
    return Typed(found, columns, cotangents, seeds, refused)


def try_types(case: Case, types: Typings, seed: int = 0) -> Report:
    """Compares what the tables say of one trial with what the ranks compute."""
    report = Report()
    generator = torch.Generator().manual_seed(seed)
    values = Values(case, types, generator)
    try:
        typed = interpret(case, types, values)
    except RefusedError as refusal:
        report.refused = str(refusal)
        return report
    except Exception as problem:  # a sample that this build cannot run, or not on these values
        report.skipped = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return report
    report.results, report.refused = typed.types, typed.refused
    try:
        report.wrong = list(_compare(case, types, typed, values))
    except (RuntimeError, ValueError, NotImplementedError) as problem:
        report.skipped = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return report


def _compare(case: Case, types: Typings, typed: Typed, values: Values) -> Iterator[str]:
    results = _run_all(case, typed.columns, typed.cotangents)
    coarse = max((precision(each) for each in results[0] if each is not None), default=0.0)
    others: Sequence[list[Tensor | None]] = ()
    sums: list[Tensor | None] | None = None
    if Partial in typed.types:
        moved = values.resplit(typed.columns, types.operands)
        others = _run_all(case, moved, values.resplit(typed.cotangents, typed.seeds))
        if V not in types.operands.values() and V not in typed.seeds.values():
            operands, cotangents = (
                meant(typed.columns, types.operands),
                meant(typed.cotangents, typed.seeds),
            )
            sums = run(case, operands, cotangents, 0)
    for place, axis_type in enumerate(typed.types):
        column, other = _column(results, place), _column(others, place)
        if axis_type is None or column is None or not _is_told(case, axis_type, column):
            continue
        tolerance = max(1e-8, coarse) if is_smooth(column[0]) else 0.0
        one = None if sums is None else sums[place]
        fault = refute(axis_type, column, other, one, tolerance)
        if fault is not None:
            yield f"result {place} is typed {axis_type}, and {fault}"


def _run_all(
    case: Case,
    columns: Mapping[int, Sequence[Tensor]],
    cotangents: Mapping[int, Sequence[Tensor]],
) -> list[list[Tensor | None]]:
    """Results and gradients of every rank."""
    return [
        run(case, operands, seeds, rank)
        for rank, (operands, seeds) in enumerate(
            zip(per_rank(columns), per_rank(cotangents), strict=True)
        )
    ]


def _column(results: Sequence[Sequence[Tensor | None]], place: int) -> list[Tensor] | None:
    """One result of every rank; None where a rank has none."""
    column = [each[place] for each in results if each[place] is not None]
    return column if column and len(column) == len(results) else None  # type: ignore[return-value]


def _is_told(case: Case, axis_type: AxisType, column: Sequence[Tensor]) -> bool:
    """Returns whether the values say something about a claim."""
    if axis_type == Partial:
        return bool(torch.isfinite(total(column)).all())
    if case.name.startswith(("empty", "new_empty")):
        return False  # memory not yet written
    return axis_type != Z or is_smooth(column[0])


def precision(tensor: Tensor) -> float:
    """Returns what rounding costs in a dtype, with a few hundred operations to spare."""
    return 256 * float(torch.finfo(tensor.dtype).eps) if is_smooth(tensor) else 0.0


def floors(case: Case) -> dict[str, Typings]:
    """The trials that must be accepted, and those that ask what is linear."""
    places = case.places
    named = {
        "V": Typings(dict.fromkeys(places, V)),
        "R, cotangent V": Typings(dict.fromkeys(places, R), V),
        "R, cotangent P": Typings(dict.fromkeys(places, R), Partial),
        "I": Typings(dict.fromkeys(places, I)),
    }
    if len(places) > 1:
        named["P in all"] = Typings(dict.fromkeys(places, Partial))
    for number, place in enumerate(places[:4]):
        named[f"P in {number}"] = Typings({**dict.fromkeys(places, R), place: Partial})
    return named


def drawn(case: Case, rng: random.Random, count: int) -> Iterator[Typings]:
    """Random types for every operand: with I, or with what fits no I."""
    for _ in range(count):
        types = rng.choice(((I, K, Z), (V, R, K, Partial, Z), (R, K, Partial), (V, Partial, Z)))
        operands = {place: rng.choice(types) for place in case.places}
        yield Typings(operands, rng.choice((I, V, Partial)))


REASONS: Final = {BRANCH: "data-dependent", INTEGER: "rounds", BITS: "random"}
