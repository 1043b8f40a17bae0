"""Checks that a kernel with its own backward has the types of its unfused composition.

An overlapped kernel has a handwritten backward, and what autograd derives from its unfused
composition says nothing about that. So both forms are interpreted on operands of the types that
the call has, and their backwards from every cotangent type that the results accept. Each result and
gradient must have the same shape, dtype and types, and depend on the same collectives: where V
stands for a pending sum, types cannot tell if it has been summed.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.program import Equation, KernelCollective, use_of
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.checker.rules.registry import table_version
from shardmap_torch.collectives.protocol import Form
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.torch_private.engine import temporarily_clear_interpreter_stack
from shardmap_torch.errors import ShardTypeError, show_shape
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z

_SEEDS: Final[Mapping[AxisType, tuple[AxisType, ...]]] = {
    I: (I,),
    R: (V, Partial),
    V: (V,),
    Partial: (R,),
    K: (I, V, Partial),
    Z: (V,),
}
"""The cotangent types that a result of each type accepts; the first is valid for any operands."""

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
    """Requires that `own` has the types of the composition, forward and backward.

    Results are cached by forms and operands' properties.

    Raises:
        ShardTypeError: it has not.
    """
    bases = [interpreter.base(operand) for operand in operands]
    name, mesh = str(what[0]), interpreter.mesh
    results = []
    for flowing in _flowing([interpreter.levels(base) for base in bases]):
        pairs = zip(bases, flowing, strict=True)
        likes = tuple(
            _Like(x.shape, x.stride(), x.dtype, x.device, interpreter.types(x), flows)
            for x, flows in pairs
        )
        key = (what, mesh.axis_names, mesh.axis_sizes, likes, table_version())
        compare = partial(_compare, interpreter, name, own, composition, likes)
        results.append(_COMPARED.get(key, compare))
    site, backward = interpreter.site()
    uses = tuple([use_of("", base, interpreter.storage_type(base)) for base in bases])
    interpreter.add(Equation(name, uses, (), site, backward, compared=results[0]))


def _flowing(levels: Sequence[frozenset[int]]) -> Sequence[tuple[bool, ...]]:
    """Lists which operands are differentiable: at any level, then at each level that differs."""
    all_levels = sorted(frozenset[int]().union(*levels))
    patterns = [tuple(map(bool, levels))]
    patterns += [tuple(level in operand for operand in levels) for level in all_levels]
    return list(dict.fromkeys(patterns))


_COMPARED: Final = Memo[tuple[KernelCollective, ...]]()


@dataclass(frozen=True)
class _Like:
    """The properties of an operand that the comparison depends on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    types: Types
    flows: bool

    def leaf(self, interpreter: Interpreter) -> Tensor:
        with interpreter.paused():
            leaf = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
            leaf.requires_grad_(self.flows)
        interpreter.bring(leaf, self.types, "an operand")
        return leaf


def _compare(
    interpreter: Interpreter, name: str, own: Form, composition: Form, likes: Sequence[_Like]
) -> tuple[KernelCollective, ...]:
    """Compares both forms; returns the collectives of `own`."""
    with interpreter.aside(), temporarily_clear_interpreter_stack(), torch.enable_grad():
        comparison = _Comparison(interpreter, name, [like.leaf(interpreter) for like in likes])
        try:
            expected = composition(*comparison.leaves)
        except ShardTypeError:
            return ()  # The body runs it next, and gets an error with its own lines.
        comparison.run(own, expected)
        through = _collectives_behind(interpreter.equations)
        for claim in comparison.claims:
            claim.check(interpreter, name, through)
    return tuple(
        KernelCollective(str(each.collective), str(each.operands[0]), each.sent, each.backward)
        for each in comparison.own
        if each.collective is not None
    )


@dataclass(frozen=True)
class _Claim:
    """A result or gradient of a form, and that of the composition.

    Attributes:
        what: its description.
        found: that of the form; None without a gradient.
        expected: that of the composition.
        alike: types that count as equal, by axis.
    """

    what: str
    found: Tensor | None
    expected: Tensor | None
    alike: Sequence[frozenset[AxisType]]

    def check(self, interpreter: Interpreter, name: str, through: Through) -> None:
        """Requires that both have the same types."""
        wrong = self._wrong(interpreter, through)
        if wrong is not None:
            raise _defect(interpreter, name, f"{self.what} is {wrong[0]}, and {wrong[1]}")

    def _wrong(self, interpreter: Interpreter, through: Through) -> tuple[str, str] | None:
        """Returns texts of the first difference of the form and the composition, or None."""
        found, expected = self.found, self.expected
        if found is None or expected is None:
            words = ["missing" if each is None else "there" for each in (found, expected)]
            return None if found is expected else (words[0], words[1])
        storage_types = interpreter.storage_type(found), interpreter.storage_type(expected)
        shown = [show_shape(x.dtype, x.shape) for x in (found, expected)]
        if shown[0] != shown[1]:
            return shown[0], shown[1]
        ours, theirs = (map(plain, storage_type.types) for storage_type in storage_types)
        for axis, *pair, alike in zip(interpreter.axes, ours, theirs, self.alike, strict=True):
            if pair[0] != pair[1] and not alike.issuperset(pair):
                return f"{pair[0]} over {axis!r}", str(pair[1])
        dependencies = [
            ", ".join(sorted(through[id(storage_type)])) or "no collective"
            for storage_type in storage_types
        ]
        if dependencies[0] == dependencies[1]:
            return None
        return f"made by {dependencies[0]}", f"by {dependencies[1]}"


def _defect(interpreter: Interpreter, name: str, what: str) -> ShardTypeError:
    return ShardTypeError(
        f"{interpreter.name}: {name}: {what} in the composition.\n"
        f"  at {interpreter.site()[0]}\n"
        'Fix: pass overlap="off", and report it: this is a defect of the kernel.'
    )


class _Comparison:
    """Comparison of two forms on the same operands.

    Attributes:
        leaves: the operands.
        claims: pairs that have to be the same.
        own: equations of the form that is compared with the composition, forward and backward.
    """

    def __init__(self, interpreter: Interpreter, name: str, leaves: Sequence[Tensor]) -> None:
        self._interpreter, self._name = interpreter, name
        self.leaves = leaves
        self._flowing = [(at, leaf) for at, leaf in enumerate(leaves) if leaf.requires_grad]
        self.claims: list[_Claim] = []
        self.own: Sequence[Equation] = ()

    def run(self, own: Form, expected: Sequence[Tensor]) -> None:
        """Interprets the form, and both backwards."""
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
        # A run may use only some of the results, with less in the backward.
        for pair, types in zip(pairs, first, strict=True) if len(pairs) > 1 else ():
            self._pull_back([pair], [types])

    def _pull_back(
        self, pairs: Sequence[tuple[Tensor, Tensor]], cotangents: Sequence[Types]
    ) -> Sequence[Equation]:
        """Adds claims that the gradients are the same; returns the form's equations for its own."""
        found, expected = zip(*pairs, strict=True)
        bring = partial(self._interpreter.bring_like, label="a cotangent")
        seeds = list(map(bring, expected, cotangents))
        try:
            theirs = self._gradients(expected, seeds)
        except ShardTypeError:
            return ()  # The body's own backward will be rejected too.
        ours, equations = self._tried(lambda: self._gradients(found, seeds))
        for (at, leaf), *pair in zip(self._flowing, ours, theirs, strict=True):
            types = self._interpreter.storage_type(leaf).types
            alike = [
                _OWN if plain(axis_type) == V else frozenset[AxisType]() for axis_type in types
            ]
            self.claims.append(_Claim(f"the gradient of operand {at}", pair[0], pair[1], alike))
        return equations

    def _gradients(
        self, outs: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        leaves = [leaf for _, leaf in self._flowing]
        with self._interpreter.differentiating(seeds):
            return torch.autograd.grad(outs, leaves, seeds, retain_graph=True, allow_unused=True)

    def _tried(self, run: Callable[[], Sequence[X]]) -> tuple[Sequence[X], Sequence[Equation]]:
        """Runs `run`; returns its results and equations."""
        before = len(self._interpreter.equations)
        try:
            results = run()
        except Exception as error:
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            what = f"it fails ({first}), which nothing does"
            raise _defect(self._interpreter, self._name, what) from error
        return results, self._interpreter.equations[before:]


def _cotangents(types: Sequence[Types]) -> Iterator[Sequence[Types]]:
    """Yields types for the cotangents of all results: the first of each, then variants per axis."""
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


def _collectives_behind(equations: Sequence[Equation]) -> Through:
    """Collects the collectives on which each value depends."""
    through: dict[int, frozenset[str]] = defaultdict(frozenset)
    for equation in equations:
        names = {str(equation.collective)} if equation.collective is not None else set()
        names.update(*(through[id(use.storage_type)] for use in equation.operands))
        for use in equation.results:
            through[id(use.storage_type)] |= names
    return through
