"""Tests with numbers the types that the checker infers for an operation's results.

The results of a decomposition are compared with those of its operator as well.

One trial gives every operand a type. The checker interprets the operation, and its backward with
cotangents of the types that the results accept, and infers the types of results and gradients. Then
the same is computed on the values of each rank, which are of those types.
"""

import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.api import ShapeDtype, check_program
from shardmap_torch.checker.queries import typeof
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.core.tree import Placed, Structure, broadcast_prefix, flatten, unflatten
from shardmap_torch.errors import ShardTypeError, SpecError
from shardmap_torch.mesh import make_mesh
from shardmap_torch.run.trials.draws import random_like
from shardmap_torch.spec import P
from shardmap_torch.transform import shard_map
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z
from shardmap_torch.validate.numbers import (
    Fault,
    Findings,
    refute,
    shifted,
    tolerance_of,
    total,
    unequal,
)

AXIS: Final = "ranks"
_MAX_PAIRS: Final = 15

_SPECS: Final = {I: P(invariant=AXIS), R: P(replicate=AXIS), V: P(AXIS), Partial: P(partial=AXIS)}
_COTANGENTS: Final = {I: (I,), R: (Partial, V), V: (V,), Partial: (R,), Z: (V,), K: (I, Partial)}
"""Cotangent types for a result of each type, one choice per trial.

Where gradients are taken inside the body, a result that is equal on all ranks is K.
"""

Typing = tuple[AxisType, ...]
Columns = Sequence[Sequence[Tensor]]
"""Tensors by operand or result, and then by rank."""


@dataclass(frozen=True)
class Operation:
    """A function and an example of its arguments, the tensors of which are the operands.

    Attributes:
        function: a function of local tensors.
        name: its name in messages.
        leaves: leaves of the arguments.
        structure: structure of the arguments.
        places: indices of the leaves that are operands.
        paths: names of the operands.
    """

    function: Callable[..., Any]
    name: str
    leaves: Sequence[Any]
    structure: Structure
    places: tuple[int, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(
        cls, function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> "Operation":
        """Makes one from an example call."""
        leaves, structure = flatten((tuple(args), kwargs))
        named = [*zip(_parameters(function, len(args)), args, strict=True), *sorted(kwargs.items())]
        matched = [
            leaf
            for path, value in named
            for leaf in broadcast_prefix(None, value, path, lambda _: True)
            if isinstance(leaf, Placed)
        ]
        places = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.numel() > 0
        ]
        paths = tuple(matched[i].path for i in places)
        return cls(function, name, leaves, structure, tuple(places), paths)

    @property
    def smooth_paths(self) -> list[str]:
        """The names of the operands that get gradients."""
        return [path for path, x in zip(self.paths, self.examples, strict=True) if is_smooth(x)]

    @property
    def examples(self) -> list[Tensor]:
        """The operands of the example call."""
        return [self.leaves[i].detach() for i in self.places]

    def call(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors among the results; operands are copied, as the function may write."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, operands, strict=True):
            leaves[place] = tensor.clone()
        args, kwargs = unflatten(self.structure, leaves)
        results = flatten(self.function(*args, **kwargs))[0]
        return [leaf for leaf in results if isinstance(leaf, Tensor)]

    def shown(self, types: Typing) -> str:
        """Formats it as `(x: Partial, w: R)`."""
        words = [f"{path}: {axis_type}" for path, axis_type in zip(self.paths, types, strict=True)]
        return f"({', '.join(words)})"


def _parameters(function: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of the first positional parameters."""
    numbered = [f"argument[{i}]" for i in range(count)]
    if isinstance(function, OpOverload):
        names = [argument.name for argument in function._schema.arguments]
    else:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some builtins have none
            return numbered
        types = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in types]
    return [*names[:count], *numbered[len(names) :]]


def try_types(operation: Operation, num_ranks: Sequence[int], seed: int) -> Findings:
    """Tries every typing of the operands, on each number of ranks."""
    findings, trials = Findings(operation.name), 0
    generator = torch.Generator().manual_seed(seed)
    refusals: list[ShardTypeError] = []
    for types in typings([is_smooth(x) for x in operation.examples], random.Random(seed)):
        trials += 1
        try:
            for trial in _trials(operation, types, findings):
                for count in num_ranks:
                    trial.compare(count, generator, findings)
        except ShardTypeError as refusal:
            findings.refused[operation.shown(types)] = None
            refusals.append(refusal)
    if len(refusals) == trials:
        raise ShardTypeError(
            f"validate_rule: {operation.name} is refused whatever the types of its operands are, "
            f"so that nothing is claimed:\n{refusals[0]}"
        )
    return findings


def typings(real: Sequence[bool], rng: random.Random) -> Iterator[Typing]:
    """Yields typings: all operands alike; one or two not R; all but one Partial; integers R or V.

    Example:
        >>> list(typings([True], random.Random(0)))
        [(R,), (V,), (Partial,)]
    """
    distinct: dict[Typing, None] = {}
    places = range(len(real))

    def add(base: AxisType, others: dict[int, AxisType]) -> None:
        types = [others.get(i, base) for i in places]
        for i in places:
            if not real[i] and types[i] == Partial:
                types[i] = R
        distinct[tuple(types)] = None

    for axis_type in (R, V, Partial):
        add(axis_type, {})
    for place, axis_type in itertools.product(places, (V, Partial)):
        add(R, {place: axis_type})
        add(Partial, {place: R})
    pairs = list(itertools.combinations(places, 2))
    for pair in rng.sample(pairs, min(len(pairs), _MAX_PAIRS)):
        for two in itertools.product((V, Partial), repeat=2):
            add(R, dict(zip(pair, two, strict=True)))
    yield from distinct


@dataclass(frozen=True)
class _Result:
    """A result or gradient with its inferred type; `like.requires_grad` if it takes a cotangent."""

    axis_type: AxisType
    like: ShapeDtype


def _seeds(results: Sequence[_Result]) -> list[Typing]:
    """Returns the types of cotangents to try, for the results that take some."""
    choices = [_COTANGENTS[result.axis_type] for result in results if result.like.requires_grad]
    return list(
        dict.fromkeys(
            tuple(choice[min(turn, len(choice) - 1)] for choice in choices) for turn in range(2)
        )
    )


def _interpret(
    operation: Operation, types: Typing, cotangents: Sequence[Tensor] = (), seeds: Typing = ()
) -> list[_Result]:
    """Infers the types of the results, and of the gradients of floating operands if seeded.

    Raises:
        ShardTypeError: the checker refuses it.
    """
    every = (*types, *seeds)
    # Not a list: a check undoes what the body changes of plain data.
    found: SimpleQueue[list[_Result]] = SimpleQueue()

    def body(*values: Tensor) -> tuple[()]:
        local = [x.squeeze(0) if k == V else x for x, k in zip(values, every, strict=True)]
        outputs = _compute(operation, local[: len(types)], local[len(types) :])
        results = [
            _Result(plain(typeof(y)[AXIS]), ShapeDtype(tuple(y.shape), y.dtype, y.requires_grad))
            for y in outputs
        ]
        found.put(results)
        return ()

    body.__name__ = operation.name
    examples = (*operation.examples, *cotangents)
    stacked = [
        torch.stack([x, x]) if axis_type == V else x
        for x, axis_type in zip(examples, every, strict=True)
    ]
    specs = tuple(_SPECS[axis_type] for axis_type in every)
    mesh = make_mesh((2,), (AXIS,), kind="simulated", simulate="ranks")
    mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check=True)
    check_program(mapped, *stacked)
    results: list[_Result] = []
    while not found.empty():  # the last of its interpretations
        results = found.get()
    return results


def _compute(
    operation: Operation, operands: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [x.detach().clone() for x in operands]
        leaves = [x.requires_grad_() if is_smooth(x) else x for x in leaves]
        results = operation.call(leaves)
        if not cotangents:
            return results
        differentiable = [y for y in results if y.requires_grad]
        inputs = [x for x in leaves if x.requires_grad]
        gradients = torch.autograd.grad(differentiable, inputs, cotangents, materialize_grads=True)
    return [*results, *gradients]


@dataclass(frozen=True)
class _Trial:
    """An operation with types of its operands and cotangents, and claims about its results."""

    operation: Operation
    types: Typing
    claims: Sequence[tuple[str, AxisType]]
    seeds: Typing = ()
    cotangents: Sequence[Tensor] = ()

    def compare(self, num_ranks: int, generator: torch.Generator, findings: Findings) -> None:
        """Runs the operation, and records for every claim if it holds."""
        claimed = {axis_type for _, axis_type in self.claims} - {V}
        if not claimed:
            return
        types = (*self.types, *self.seeds)
        examples = (*self.operation.examples, *self.cotangents)
        columns = [
            _values(axis_type, like, num_ranks, generator)
            for axis_type, like in zip(types, examples, strict=True)
        ]
        ranks = self._run(columns)
        findings.tried += 1
        others = meant = None
        if Partial in claimed:
            pairs = list(zip(columns, types, strict=True))
            others = self._run([shifted(c, generator) if k == Partial else c for c, k in pairs])
            sums = [[total(c)] if k == Partial else c[:1] for c, k in pairs]
            meant = None if V in types else self._run(sums)
        tolerance = tolerance_of(c[0].dtype for c in (*columns, *ranks))
        for place, (claim, axis_type) in enumerate(self.claims):
            if axis_type == V or not bool(ranks[place][0].isfinite().any()):
                continue
            fault = refute(
                axis_type,
                ranks[place],
                None if others is None else others[place],
                None if meant is None else meant[place][0],
                tolerance,
            )
            findings.note(claim, fault)

    def _run(self, columns: Columns) -> Columns:
        """Computes every rank's result from its own values: ranks do not meet in it."""
        count = len(self.types)
        rows = zip(*columns, strict=True)
        ranks = [_compute(self.operation, row[:count], row[count:]) for row in rows]
        return [[y.detach() for y in made] for made in zip(*ranks, strict=True)]


def _values(
    axis_type: AxisType, like: Tensor, num_ranks: int, generator: torch.Generator
) -> list[Tensor]:
    if axis_type in (V, Partial):
        return [random_like(like, generator) for _ in range(num_ranks)]
    return [random_like(like, generator)] * num_ranks


def _trials(operation: Operation, types: Typing, findings: Findings) -> Iterator[_Trial]:
    """Yields trials with claims about results, and about gradients for each choice of cotangents.

    Raises:
        ShardTypeError: the checker refuses the forward.
    """
    results = _interpret(operation, types)
    if not results:
        raise SpecError(f"validate_rule: {operation.name} returns no tensor.")
    shown = operation.shown(types)
    many = len(results) > 1
    claims = [
        (f"{shown}: result{f'[{i}]' if many else ''} is {result.axis_type}", result.axis_type)
        for i, result in enumerate(results)
    ]
    device = operation.examples[0].device
    cotangents = [
        torch.zeros(result.like.shape, dtype=result.like.dtype, device=device)
        for result in results
        if result.like.requires_grad
    ]
    forward = _Trial(operation, types, claims)
    trials = [_pulled(forward, cotangents, seeds, findings) for seeds in _seeds(results) if seeds]
    yield from [trial for trial in trials if trial is not None] or [forward]


def _pulled(
    forward: _Trial, cotangents: Sequence[Tensor], seeds: Typing, findings: Findings
) -> _Trial | None:
    """Makes the trial with gradients; None without any, or if the checker refuses the backward."""
    operation, claims = forward.operation, forward.claims
    under = f"{operation.shown(forward.types)}, cotangent {', '.join(map(str, seeds))}"
    try:
        gradients = _interpret(operation, forward.types, cotangents, seeds)[len(claims) :]
    except ShardTypeError:
        findings.refused[under] = None
        return None
    except RuntimeError as problem:
        if _NO_GRADIENT not in str(problem):
            raise
        findings.refused[f"gradients: {problem}"] = None
        return None
    more = [
        (f"{under}: gradient of {path} is {gradient.axis_type}", gradient.axis_type)
        for path, gradient in zip(operation.smooth_paths, gradients, strict=True)
    ]
    return replace(forward, claims=[*claims, *more], seeds=seeds, cotangents=cotangents)


_NO_GRADIENT: Final = "no autograd formula was registered"
"""Torch's message about a custom operator without an autograd formula."""


_DRAWS: Final = 3


def try_values(
    operation: Operation, meaning: Callable[..., Any], seed: int, findings: Findings
) -> None:
    """Runs both on random operands of the example's shapes, and records if each result is equal.

    Their gradients need not be alike: the checker interprets those that the operator has.
    """
    generator = torch.Generator().manual_seed(seed)
    other = replace(operation, function=meaning)
    for _ in range(_DRAWS):
        operands = [random_like(like, generator) for like in operation.examples]
        findings.tried += 1
        with torch.no_grad():
            _compare(operation.call(operands), other.call(operands), findings)


def _compare(results: list[Tensor], expected: list[Tensor], findings: Findings) -> None:
    if len(results) != len(expected):
        fault = Fault(f"they give {len(results)} and {len(expected)} tensors", torch.inf, 0)
        findings.note("the results are those of the decomposition", fault)
        return
    for place, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        which = f"result[{place}]" if len(results) > 1 else "result"
        findings.note(f"{which} is that of the decomposition", _differ(mine, theirs))


def _differ(mine: Tensor, theirs: Tensor) -> Fault | None:
    if mine.dtype != theirs.dtype:
        return Fault(f"the dtypes are {mine.dtype} and {theirs.dtype}", torch.inf, 0)
    return unequal(mine, theirs, tolerance_of([mine.dtype]), "the operator gives something else")
