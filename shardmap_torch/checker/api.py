"""Public functions of the checker, `check_program`, `trace` and `explain`, and their results."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch

from shardmap_torch.checker.explanation import Explanation, explained, title_of
from shardmap_torch.checker.ir.observer import REGION
from shardmap_torch.checker.ir.program import Equation, ProgramPath, Use, orders, show_types
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.torch_private.fake_modes import CheckMode, postponing_imports
from shardmap_torch.core.tree import Tree, map_leaves
from shardmap_torch.errors import ShardTypeError, SpecError, TransformError, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.report.page import Page, Shown
from shardmap_torch.spec import P

T = TypeVar("T")


@dataclass(frozen=True)
class ShapeDtype:
    """Shape and dtype of a tensor without data: argument and result on an abstract mesh.

    Attributes:
        shape: global.
        dtype: any.
        requires_grad: whether it needs a gradient, so that the backward is checked too.

    Source: `jax.ShapeDtypeStruct`.

    Example:
        >>> ShapeDtype((8, 16), torch.bfloat16)
        ShapeDtype(shape=(8, 16), dtype=torch.bfloat16, requires_grad=False)
    """

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = False

    def __post_init__(self) -> None:
        """Validates the fields, for an error that names them."""
        sizes = isinstance(self.shape, tuple | list) and all(
            isinstance(size, int) and size >= 0 for size in self.shape
        )
        if not (sizes and isinstance(self.dtype, torch.dtype)):
            raise SpecError(
                "ShapeDtype takes a tuple of sizes and a torch.dtype, not "
                f"{show(self.shape)} and {show(self.dtype)}."
            )


def stand_ins(tree: Tree) -> Tree:
    """Replaces `ShapeDtype` values by fake tensors."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, ShapeDtype):
            return leaf
        with fake:
            return torch.empty(leaf.shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)

    with postponing_imports():
        fake = CheckMode()
        return map_leaves(make, tree)


def shapes_of(verdict: Verdict) -> Tree:
    """Returns the global results of a call, as shapes and dtypes."""
    outputs = [verdict.outputs[position] for position in verdict.result.match.crossing]
    shapes: list[Any] = [ShapeDtype(shape, dtype) for shape, dtype, _ in outputs]
    return verdict.result.rebuild(shapes)


@dataclass(frozen=True, repr=False)
class Program(Shown):
    """A typed program: every operation of a body and of its derived backward.

    In a notebook it is a page, and `html(path)` writes that.

    Attributes:
        name: name of the function.
        mesh: the mesh that it was checked for.
        in_specs: path and spec of every tensor argument, with every axis typed.
        program_paths: the program of each path through the body; several if it branches on numbers
            taken from tensors.
    """

    name: str
    mesh: Mesh
    in_specs: tuple[tuple[str, P], ...]
    program_paths: tuple[ProgramPath, ...]

    @property
    def equations(self) -> tuple[Equation, ...]:
        """The equations of all paths, each in the order of execution."""
        return tuple(equation for path in self.program_paths for equation in path.equations)

    @property
    def collectives(self) -> tuple[Equation, ...]:
        """The equations that connect ranks, or convert types."""
        return _collectives(self.equations)

    def bytes_sent(self) -> dict[str, int]:
        """Counts the bytes that each rank sends, by axis, forward and backward together.

        A collective over several axes counts under their joined names. Of several paths through the
        body, each axis has the maximum.
        """
        total: dict[str, int] = {}
        for path in self.program_paths:
            for axis, sent in _sent(path).items():
                total[axis] = max(sent, total.get(axis, 0))
        return total

    @property
    def fingerprint(self) -> str:
        """Hash of the program with its literals and without source locations.

        What lies between two steps that are ordered may be computed in any order: a loop over a set
        of strings has another one in each process.
        """
        lines = [f"  {path}: {spec!r}" for path, spec in self.in_specs]
        for number, path in enumerate(self.program_paths, 1):
            lines += [*title_of(number, path, False), *self._unordered(path), path.end]
        return _hash("\n".join(lines))

    @property
    def returned(self) -> Sequence[str]:
        """Lines that say which values the results are."""
        return [
            f"  {each.name} is {_operand(each)}"
            for path in self.program_paths
            for each in path.returned
        ]

    def _unordered(self, path: ProgramPath) -> Iterator[str]:
        """Yields equations on values that are known by what they are computed of, and the results.

        Those of which only the operands say when they are computed are sorted.
        """
        values: dict[int | None, str] = {}
        free: list[str] = []
        for at, equation in enumerate(path.equations):
            is_free = not orders(equation)
            text = f"{equation.backward} {self._line(equation, False, values)}"
            made = _hash(text if is_free else f"{at - len(free)} {text}")
            values |= {use.number: f"{made}.{i}" for i, use in enumerate(equation.results)}
            free.append(text)
            if not is_free:
                yield from (*sorted(free[:-1]), text)
                free = []
        yield from sorted(free)
        yield from (values.get(use.number) or _operand(use) for use in path.returned)

    def explained(self) -> Explanation:
        """Returns the program by lines, with equal layers that follow one another once."""
        numbered = enumerate(self.program_paths, 1)
        paths = [explained(number, path, self.mesh.axis_names) for number, path in numbered]
        return Explanation(self.name, self.mesh, self.in_specs, tuple(paths), self.bytes_sent())

    def page(self) -> Page:
        """Returns the page: the source, and beside each line what it makes."""
        return self.explained().page()

    def _lines(self, sites: bool) -> Sequence[str]:
        lines = [f"  {path}: {spec!r}" for path, spec in self.in_specs]
        for number, path in enumerate(self.program_paths, 1):
            lines += title_of(number, path, sites)
            for backward in (False, True):
                lines.append("backward:" if backward else "forward:")
                part = [e for e in path.equations if e.backward is backward]
                lines += [self._line(equation, sites) for equation in part]
            lines += [f"  {path.end}"] * bool(path.end)
        return lines

    def _line(
        self, equation: Equation, sites: bool, values: Mapping[int | None, str] | None = None
    ) -> str:
        """Formats an equation; with `values` operands are these, and results have no numbers."""
        known = values or {}
        operands = [known.get(use.number) or _operand(use) for use in equation.operands]
        if values is not None and equation.name in _COMMUTING and not equation.literals:
            operands.sort()  # as two gradients that meet
        literals = ", ".join([f"{name}={value}" for name, value in equation.literals])
        words = [*operands, literals] if literals else operands
        results = ", ".join(
            f"{'' if values is not None else f'%{use.number}: '}{use} "
            f"{show_types(use.types, self.mesh.axis_names)}"
            for use in equation.results
        )
        sent = f"  sends {equation.sent} B" if equation.sent else ""
        site = f"  # {equation.site}" if sites and equation.site is not None else ""
        prefix = f"{results} = " if results else ""
        return f"  {prefix}{equation.name}({'; '.join(words)}){sent}{site}"

    def __str__(self) -> str:
        """Formats one equation per line, with its source line."""
        return "\n".join([f"{self.name} on the {self.mesh}", *self._lines(sites=True)])

    __repr__ = __str__


def _collectives(equations: Sequence[Equation]) -> tuple[Equation, ...]:
    return tuple(e for e in equations if e.collective is not None)


def _sent(path: ProgramPath) -> dict[str, int]:
    total: dict[str, int] = {}
    for equation in _collectives(path.equations):
        assert equation.collective is not None  # by the filter
        axis = ",".join(equation.collective.axes)
        total[axis] = total.get(axis, 0) + equation.sent
    return total


_COMMUTING: Final = ("add", "mul")
"""Operators that give the same bits if their operands change places."""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _operand(use: Use) -> str:
    if use.number is not None:
        return f"%{use.number}"
    storage_type = use.storage_type
    return " ".join(filter(None, (storage_type.label, storage_type.numbers))) or "?"


def check_program(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Verdict:
    """Checks a shard_mapped function `f` for these arguments, without running it.

    Tensors may be replaced by `ShapeDtype`; the mesh may be abstract.

    Returns:
        The verdict: specs with every axis typed, results, equations.

    Raises:
        ShardTypeError: the program is not well-typed, or would compute wrong gradients.
        SpecError: the arguments do not match the specs.
        TransformError: `f` is not shard_mapped.

    Example:
        >>> from shardmap_torch import I, P, ShapeDtype, all_reduce, make_mesh, shard_map
        >>> mesh = make_mesh((8192,), ("dp",), kind="abstract")
        >>> @shard_map(mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
        ... def loss(w, x):
        ...     return all_reduce((x @ w).square().sum(), "dp", dst=I)
        >>> w, x = ShapeDtype((16,), requires_grad=True), ShapeDtype((8192, 16))
        >>> check_program(loss, w, x).specs
        (P(replicate={'dp'}), P('dp'))
    """
    return verdict_on(f, args, kwargs)


def verdict_on(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    strictness: Strictness | None = None,
) -> Verdict:
    """Checks a call, as strictly as the function says or as `strictness` does."""

    def ask(mapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
        found: Verdict = mapped._shardmap_verdict(args, kwargs, strictness)  # type: ignore[attr-defined]
        return found

    return ask_mapped("check_program", f, ask, args, kwargs)


def ask_mapped(
    name: str,
    f: Callable[..., Any],
    ask: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> T:
    """Returns what `ask` says of a mapped function, or of that of a parallelized module.

    Raises:
        TransformError: `f` is neither; `name` is who asks.
    """
    use = getattr(f, "_shardmap_mapped", None)
    if use is not None:
        found: T = use(lambda mapped, values: ask(mapped, values, {}), tuple(args), dict(kwargs))
        return found
    if not hasattr(f, "_shardmap_verdict"):
        raise TransformError(
            f"{name} takes a shard_mapped function or a parallelized module, not {show(f)}."
        )
    return ask(f, tuple(args), dict(kwargs))


def trace(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """Returns the typed program of `f` for these arguments, which are those of `check_program`.

    It prints one equation a line, forward and backward, with the types of its results, the bytes
    that each rank sends, and the line of the body.

    Raises:
        As `check_program`.

    Source: `jax.make_jaxpr`.

    Example:
        >>> from shardmap_torch import I, P, ShapeDtype, all_reduce, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="abstract")
        >>> @shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P())
        ... def total(x):
        ...     return all_reduce(x.sum(), "dp", dst=I)
        >>> program = trace(total, ShapeDtype((8,)))
        >>> [equation.name for equation in program.equations], program.bytes_sent()
        (['sum', "all_reduce('dp', Partial -> I)"], {'dp': 6})
    """
    return program_of(check_program(f, *args, **kwargs))


def program_of(verdict: Verdict) -> Program:
    """Returns the typed program of a verdict."""
    specs = tuple(
        (path, spec)
        for path, spec in zip(verdict.paths, verdict.specs, strict=True)
        if spec is not None
    )
    return Program(verdict.name, verdict.mesh, specs, verdict.program_paths)


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explains the program of `f`: each operation with its line, types, bytes and backward.

    Takes arguments as `check_program` does, and runs nothing. It prints the collectives, and ends
    with the verdict of global strictness: whether the forward is that of the same program on one
    device, and which `local_region`s that assumes to be right. Its `rows` and `bytes_sent` can be
    tested, in a notebook it is a page, and `html(path)` writes that.

    Raises:
        As `check_program`.

    Example:
        >>> from shardmap_torch import P, ShapeDtype, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="abstract")
        >>> double = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
        >>> explanation = explain(double, ShapeDtype((8,)))
        >>> print(explanation)
        <lambda> on the abstract mesh (dp=4)
        arguments:
          x: P('dp')
        collectives:
        bytes sent by each rank, forward and backward:
        global: the same program on one device
        >>> [(row.operation, row.results, row.types) for row in explanation.rows]
        [('mul', ('float32[2]',), ({'dp': V},))]
    """
    program = trace(f, *args, **kwargs)
    explanation = program.explained()
    try:
        verdict = verdict_on(f, args, kwargs, "global")
    except ShardTypeError as error:
        return replace(explanation, one_device="refused", refusal=error)
    how = "tried" if verdict.tried else "proven"
    assumed = _assumed(program, verdict)
    return replace(explanation, one_device=how, assumed=assumed, tried=verdict.tried)


def _assumed(program: Program, verdict: Verdict) -> tuple[str, ...]:
    """Formats what global strictness takes for right."""
    regions = [e for e in program.equations if e.name.startswith(REGION) and not e.backward]
    tried = dict(verdict.traits.promises) if verdict.tried else {}
    lines = [f"  {region.name}  # {region.site}" for region in regions if region.name not in tried]
    lines += [f"    could not be tried: {verdict.untried}"] * bool(verdict.untried)
    return (*lines, *[_COUNTED] * bool(verdict.traits.averages))


_COUNTED: Final = "  cross entropies: no target is their ignore_index, at which each run looks"
