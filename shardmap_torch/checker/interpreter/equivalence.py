"""Equivalence of a kernel, which has its own backward, with its composition.

An overlapped kernel has a backward that nobody derived, and what autograd derives from its unfused
composition says nothing about that. So both forms are interpreted on operands of the types that
the call has, and their backwards from every cotangent that fits the results. Each result and
gradient must have the same shape, dtype and types, and come through the same collectives: where V
stands for a pending sum, types cannot tell whether it has been taken.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.program import Equation, KernelCollective, use_of
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.checker.rules.registry import table_version
from shardmap_torch.collectives.protocol import Form
from shardmap_torch.core.caching import Memo
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z

_SEEDS: Final[Mapping[AxisType, tuple[AxisType, ...]]] = {
    I: (I,),
    R: (V, Partial),
    V: (V,),
    Partial: (R,),
    K: (I, V, Partial),
    Z: (V,),
}
"""The cotangents that fit a result of each type; the first suits whatever it was made of."""

_EQUAL: Final = frozenset({I, R, K})
_OWN: Final = frozenset({V, R, K})

X = TypeVar("X")
Through: TypeAlias = Mapping[int, frozenset[str]]
"""Axes by the identity of a storage type."""


def check_equivalent(
    interpreter: Interpreter,
    what: tuple[Hashable, ...],
    own: Form,
    composition: Form,
    operands: Sequence[Tensor],
) -> None:
    """Requires that `own` is typed as the composition is, forward and backward.

    What was found for forms and operands that are alike is remembered.

    Raises:
        ShardTypeError: it is not.
    """
    bases = [interpreter.base(operand) for operand in operands]
    name, mesh = str(what[0]), interpreter.mesh
    found = []
    for flowing in _flowing([interpreter.levels(base) for base in bases]):
        pairs = zip(bases, flowing, strict=True)
        likes = tuple(_Like.of(base, interpreter.types(base), flows) for base, flows in pairs)
        key = (what, mesh.axis_names, mesh.axis_sizes, likes, table_version())
        compare = partial(_compare, interpreter, name, own, composition, likes)
        found.append(_COMPARED.get(key, compare))
    site, backward = interpreter.site()
    storage_types = [(base, interpreter.storage_type(base)) for base in bases]
    uses = tuple(
        use_of("", base, storage_type, storage_type.types) for base, storage_type in storage_types
    )
    interpreter.add(Equation(name, uses, (), site, backward, compared=found[0]))


def _flowing(levels: Sequence[frozenset[int]]) -> Sequence[tuple[bool, ...]]:
    """Through which operands a gradient flows: in all, then at each level where it is otherwise."""
    all_levels = sorted(frozenset[int]().union(*levels))
    program_paths = [tuple(map(bool, levels))]
    program_paths += [tuple(level in operand for operand in levels) for level in all_levels]
    return list(dict.fromkeys(program_paths))


_COMPARED: Final = Memo[tuple[KernelCollective, ...]]()


@dataclass(frozen=True)
class _Like:
    """All of an operand that decides anything."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    types: Types
    flows: bool

    @staticmethod
    def of(base: Tensor, types: Types, flows: bool) -> "_Like":
        return _Like(base.shape, base.stride(), base.dtype, base.device, types, flows)

    def leaf(self, interpreter: Interpreter) -> Tensor:
        with interpreter.paused():
            made = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
            made.requires_grad_(self.flows)
        interpreter.bring(made, self.types, "an operand")
        return made


def _compare(
    interpreter: Interpreter, name: str, own: Form, composition: Form, likes: Sequence[_Like]
) -> tuple[KernelCollective, ...]:
    """The collectives of `own`, which is typed as the composition is."""
    with interpreter.aside(), temporarily_clear_interpreter_stack(), torch.enable_grad():
        comparison = _Comparison(interpreter, name, [like.leaf(interpreter) for like in likes])
        try:
            expected = composition(*comparison.leaves)
        except ShardTypeError:
            return ()  # The body comes to it next, and is told of its own lines.
        comparison.run(own, expected)
        through = _passed(interpreter.equations)
        for claim in comparison.claims:
            claim.check(interpreter, name, through)
    return tuple(
        KernelCollective(str(each.collective), str(each.operands[0]), each.sent, each.backward)
        for each in comparison.own
        if each.collective is not None
    )


@dataclass(frozen=True)
class _Claim:
    """A result or gradient of the one form, and that of the composition.

    Attributes:
        what: it is, in words.
        found: None where there is no gradient.
        expected: the same of the composition.
        alike: types of which any is as good as another, by axis.
    """

    what: str
    found: Tensor | None
    expected: Tensor | None
    alike: Sequence[frozenset[AxisType]]

    def check(self, interpreter: Interpreter, name: str, through: Through) -> None:
        """Requires that they are the same."""
        wrong = self._wrong(interpreter, through)
        if wrong is not None:
            raise _defect(interpreter, name, f"{self.what} is {wrong[0]}, and {wrong[1]}")

    def _wrong(self, interpreter: Interpreter, through: Through) -> tuple[str, str] | None:
        """Returns the types of the kernel and the composition where they differ."""
        found, expected = self.found, self.expected
        if found is None or expected is None:
            words = ["missing" if each is None else "there" for each in (found, expected)]
            return None if found is expected else (words[0], words[1])
        storage_types = interpreter.storage_type(found), interpreter.storage_type(expected)
        shown = [
            str(use_of("", x, storage_type, storage_type.types))
            for x, storage_type in zip((found, expected), storage_types, strict=True)
        ]
        if shown[0] != shown[1]:
            return shown[0], shown[1]
        ours, theirs = (map(plain, storage_type.types) for storage_type in storage_types)
        for axis, *pair, alike in zip(interpreter.axes, ours, theirs, self.alike, strict=True):
            if pair[0] != pair[1] and not alike.issuperset(pair):
                return f"{pair[0]} over {axis!r}", str(pair[1])
        program_paths = [
            ", ".join(sorted(through[id(storage_type)])) or "no collective"
            for storage_type in storage_types
        ]
        return (
            None
            if program_paths[0] == program_paths[1]
            else (f"made by {program_paths[0]}", f"by {program_paths[1]}")
        )


def _defect(interpreter: Interpreter, name: str, what: str) -> ShardTypeError:
    return ShardTypeError(
        f"{interpreter.name}: {name}: {what} in the composition.\n"
        f"  at {interpreter.site()[0]}\n"
        'Fix: pass overlap="off", and report it: this is a defect of the kernel.'
    )


class _Comparison:
    """Two forms on the same operands.

    Attributes:
        leaves: the operands.
        claims: what has to be the same.
        own: what the form does that is held against the composition, forward and backward.
    """

    def __init__(self, interpreter: Interpreter, name: str, leaves: Sequence[Tensor]) -> None:
        self._interpreter, self._name = interpreter, name
        self.leaves = leaves
        self._flowing = [(at, leaf) for at, leaf in enumerate(leaves) if leaf.requires_grad]
        self.claims: list[_Claim] = []
        self.own: Sequence[Equation] = ()

    def run(self, own: Form, expected: Sequence[Tensor]) -> None:
        """Runs the form, and both backwards."""
        found, self.own = self._tried(lambda: own(*self.leaves))
        alike = [_EQUAL] * len(self._interpreter.axes)
        for number, pair in enumerate(zip(found, expected, strict=True)):
            self.claims.append(_Claim(f"result {number}", *pair, alike))
        live = [at for at, out in enumerate(expected) if out.requires_grad]
        if not live:
            return
        pairs = [(found[at], expected[at]) for at in live]
        first, *others = _cotangents(
            [self._interpreter.storage_type(out).types for _, out in pairs]
        )
        self.own = [*self.own, *self._pull_back(pairs, first)]
        for cotangents in others:
            self._pull_back(pairs, cotangents)
        # A run may use any of the results; it does less then.
        for pair, types in zip(pairs, first, strict=True) if len(pairs) > 1 else ():
            self._pull_back([pair], [types])

    def _pull_back(
        self, pairs: Sequence[tuple[Tensor, Tensor]], cotangents: Sequence[Types]
    ) -> Sequence[Equation]:
        """Claims that the gradients are the same; gives what the form did for its own."""
        found, expected = zip(*pairs, strict=True)
        seeds = [self._seed(*pair) for pair in zip(expected, cotangents, strict=True)]
        try:
            theirs = self._gradients(expected, seeds)
        except ShardTypeError:
            return ()  # Nor will the body's own backward pass it.
        ours, equations = self._tried(lambda: self._gradients(found, seeds))
        for (at, leaf), *pair in zip(self._flowing, ours, theirs, strict=True):
            types = self._interpreter.storage_type(leaf).types
            alike = [
                _OWN if plain(axis_type) == V else frozenset[AxisType]() for axis_type in types
            ]
            self.claims.append(_Claim(f"the gradient of operand {at}", pair[0], pair[1], alike))
        return equations

    def _seed(self, out: Tensor, types: Types) -> Tensor:
        with self._interpreter.paused():
            seed = torch.empty_like(out)
        self._interpreter.bring(seed, types, "a cotangent")
        return seed

    def _gradients(
        self, outs: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        leaves = [leaf for _, leaf in self._flowing]
        with self._interpreter.differentiating(seeds):
            return torch.autograd.grad(outs, leaves, seeds, retain_graph=True, allow_unused=True)

    def _tried(self, run: Callable[[], Sequence[X]]) -> tuple[Sequence[X], Sequence[Equation]]:
        """Runs `run`, and returns its results and equations."""
        before = len(self._interpreter.equations)
        try:
            given = run()
        except Exception as error:
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            what = f"it fails ({first}), which nothing does"
            raise _defect(self._interpreter, self._name, what) from error
        return given, self._interpreter.equations[before:]


def _cotangents(types: Sequence[Types]) -> Iterator[Sequence[Types]]:
    """Types for the cotangents of all results: the first of each, then another over one axis."""
    first = [tuple(_SEEDS[plain(axis_type)][0] for axis_type in result) for result in types]
    yield first
    for axis in range(len(first[0])):
        choices = [_SEEDS[plain(result[axis])] for result in types]
        for turn in range(1, max(map(len, choices))):
            others = [choice[min(turn, len(choice) - 1)] for choice in choices]
            yield [
                (*usual[:axis], other, *usual[axis + 1 :])
                for usual, other in zip(first, others, strict=True)
            ]


def _passed(equations: Sequence[Equation]) -> Through:
    """The collectives through which each value has come."""
    through: dict[int, frozenset[str]] = defaultdict(frozenset)
    for equation in equations:
        names = {str(equation.collective)} if equation.collective is not None else set()
        names.update(*(through[id(use.storage_type)] for use in equation.operands))
        for use in equation.results:
            through[id(use.storage_type)] |= names
    return through
