"""Calls that torch.compile traces: checked while it traces them, and traced as they were checked.

On process groups it traces the body alone, on local tensors, where it is the call itself that is
compiled: DTensors are taken apart before and made after, as in calls that nothing compiles. Of a
call within other code that is compiled it traces all.

Dynamo calls the checker for real, on the shapes and dtypes that it traces with. The casts at the
boundary, types that only the checker knows, and copies of results are those of the verdict, as
outside of torch.compile. A call that cannot be checked, or not be traced as it was checked, is an
error.
"""

import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from types import FunctionType
from typing import Any, Final, NoReturn, TypeAlias
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.matching import Match, dtensor_problem, reject_inputs
from shardmap_torch.checker.guards.monitor import CheckedStep, StepMonitor
from shardmap_torch.checker.ir.program import ProgramPath
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Reruns
from shardmap_torch.control.start import current
from shardmap_torch.core.caching import Memo, Unguarded, constant
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.torch_private.engine import FakeTensorMode, set_compiler
from shardmap_torch.core.tree import Structure, Tree, map_leaves, put, unflatten
from shardmap_torch.errors import ShardMapError, TransformError
from shardmap_torch.mesh import PROCESS_KINDS, Mesh
from shardmap_torch.run.agree import Description, agree, describe, posting_errors
from shardmap_torch.run.runtimes import is_simulated
from shardmap_torch.run.safety.equal_values import EqualValues

Ask: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Call, Verdict]]
"""Matches a call with its specs, and checks it."""


class Asked:
    """Checks the calls of one function; an object, which Dynamo knows by its identity."""

    def __init__(self, name: str, ask: Ask) -> None:
        """Keeps the name and a weak reference to `ask`, a method that checks a call.

        Its object has this one, and is freed with the last reference to it, without gc.
        """
        self.name = name
        # Dynamo cannot trace the making of a weak reference, in a shard_map made in compiled code.
        self._ask: Any = ask if torch.compiler.is_dynamo_compiling() else WeakMethod(ask)
        self._count = 0

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Verdict]:
        """Matches a call with its specs, and checks it."""
        ask: Any = self._ask() if isinstance(self._ask, WeakMethod) else self._ask
        found: tuple[Call, Verdict] = ask(args, kwargs)
        return found

    def keep(self, found: "Found") -> str:
        """Keeps what a check has found, and returns the name of the attribute that has it.

        An attribute each: what was traced stays valid when others are added.
        """
        self._count += 1
        name = f"found_{self._count}"
        setattr(self, name, Unguarded(found))
        return name


@dataclass(frozen=True, eq=False)
class Shapes:
    """The global shapes of the leaves of a call; Dynamo knows them by their identity."""

    of: Sequence[Sequence[int]]


class UncompiledError(Exception):
    """torch.compile has given a call up, which then runs as if nothing compiled it."""


class Root:
    """The code that torch.compile compiles of one function: it counts compilations by code."""

    def __init__(self, name: str) -> None:
        self._run = FunctionType(_root.__code__.replace(co_name=name), globals())
        self._shapes: Memo[Shapes] = Memo()

    def run(self, compiler: Any, trace: Callable[..., Tree], *args: Any) -> Tree:
        """Runs `trace` on arguments, compiled.

        Raises:
            UncompiledError: the compiler has given it up.
        """
        set_compiler(compiler)
        try:
            return self._run(trace, args)
        finally:
            set_compiler(None)

    def run_body(
        self,
        compiler: Any,
        trace: Callable[..., Tree],
        call: Call,
        crossings: Any,
        local: Sequence[Tensor],
    ) -> Tree:
        """Runs `trace` on local tensors, and an object that stands for their global shapes.

        Raises:
            UncompiledError: the compiler has given it up.
        """
        args, kwargs = unflatten(call.structure, put(call.leaves, call.crossing, local))
        if crossings.shapes is None:
            of = tuple([tuple(x.shape) if isinstance(x, Tensor) else () for x in call.leaves])
            crossings.shapes = self._shapes.get(of, lambda: Shapes(of))
        run = partial(self.run, compiler, trace, crossings.shapes, args, kwargs)
        try:
            return run()
        except RuntimeError as error:
            if _ASKED_FOR_GRAD not in str(error):
                raise
        # Dynamo, at the start of a trace; it hides the warning unless warnings are errors.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ASKED_FOR_GRAD)
            return run()


_ASKED_FOR_GRAD: Final = "The .grad attribute of a Tensor that is not a leaf"


def _root(trace: Callable[..., Tree], args: tuple[Any, ...]) -> Tree:
    if not torch.compiler.is_dynamo_compiling():
        raise UncompiledError
    try:  # in which Dynamo breaks no graph: where the check gives up, this runs uncompiled
        return trace(*args)
    finally:
        pass


@dataclass(frozen=True, eq=False)
class Found:
    """The part of a verdict that tracing a call needs.

    Attributes:
        bound: as in `Call`.
        mapped: as in `Call`.
        match: of the arguments, with every axis typed.
        exits: conversions of results, as in `Call`.
        sharing: the input whose memory a result may have, by their positions.
        start: the notes of what the body asks of its mesh, with which the trace is compared.
        cannot: the start of an error that says why it cannot be traced.
        compared: what processes compare before each run of the graph; None where there is nothing.
        number: of `compared`, in `_COMPARED`.
        plain: positions of the plain tensors, which are compared too.
        averages: whether it averages losses, whose targets the graph reads.
    """

    bound: frozenset[str]
    mapped: tuple[str, ...]
    match: Match
    exits: Mapping[int, tuple[Collective, ...]]
    sharing: Mapping[int, int]
    start: CheckedStep
    cannot: str
    compared: "Compared | None" = None
    number: int = 0
    plain: tuple[int, ...] = ()
    averages: bool = False

    def follow(self) -> "TraceMonitor":
        """Makes the monitor that compares a trace with the checked program."""
        return TraceMonitor(self.cannot, self.start)


def check_traced(
    asked: Asked,
    mesh: Mesh,
    leaves: Sequence[Any],
    structure: Structure,
    shapes: Shapes | None = None,
) -> Found:
    """Returns what a check finds of the call that Dynamo traces; `shapes` where leaves are local.

    Raises:
        ShardMapError: the check's own; or the call cannot be traced as it was checked.
    """
    outline = unflatten(structure, range(len(leaves)))
    name = _check(asked, mesh, outline, shapes, *[_described(leaf) for leaf in leaves])
    found: Found = getattr(asked, name).value
    return found


_TENSOR: Final = "a tensor of"


def _described(leaf: Any) -> Any:
    """Describes a leaf by constants; numbers that Dynamo holds as dynamic become this call's."""
    if isinstance(leaf, Tensor):
        shape = tuple([operator.index(size) for size in leaf.shape])
        kind = leaf.dtype, leaf.device, leaf.layout, can_receive_gradient(leaf)
        return (_TENSOR, is_dtensor(leaf), shape, *kind)
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return operator.index(leaf)
    return float.fromhex(leaf.hex()) if isinstance(leaf, float) else leaf


@constant
def _check(asked: Asked, mesh: Mesh, outline: Tree, shapes: Shapes | None, *described: Any) -> str:
    """Returns the name of the findings: Dynamo calls this, and takes the result for a constant.

    It cannot look into a constant that is an object, and so finds that by its name.
    """
    fake = FakeTensorMode()

    def leaf(position: int) -> Any:
        found = described[position]
        if not (isinstance(found, tuple) and found[:1] == (_TENSOR,)):
            return found
        _, _, shape, dtype, device, layout, grad = found
        if shapes is not None:
            shape = shapes.of[position]
        with fake:
            return torch.empty(shape, dtype=dtype, device=device, layout=layout, requires_grad=grad)

    try:
        args, kwargs = map_leaves(leaf, outline)
        with fake:
            call, verdict = asked.ask(args, kwargs)
        if call.mesh != mesh:
            raise TransformError(f"{asked.name}: use_mesh in code that torch.compile traces.")
        if mesh.device_mesh is None:  # the stand-ins are plain
            odd = [verdict.paths[at] for at in verdict.crossing if described[at][1]]
            reject_inputs(asked.name, mesh, [dtensor_problem(mesh, path) for path in odd])
        cannot = _CANNOT.format(asked.name, "{}", "" if is_simulated(mesh) else _UNCHECKED)
        for obstacle in _obstacles(verdict, mesh):
            raise TransformError(cannot.format(obstacle))
    except ShardMapError as error:
        give_up(error)
    # Objects of its own: what runs remember in theirs would look like a change to Dynamo's guards.
    match = Match(verdict.paths, verdict.specs, verdict.crossing)
    exits = {at: tuple(map(replace, casts)) for at, casts in verdict.exits.items()}
    plain = tuple(at for at in verdict.crossing if not described[at][1])
    compared = None
    # Captured CUDA graphs would leave out what this process does beside its kernels.
    if current() is not None and mesh.kind in PROCESS_KINDS and mesh.device == _CPU:
        own = replace(call, leaves=[None] * len(described), match=replace(match, crossing=plain))
        compared = Compared(own, describe(call, verdict))
    number = 0 if compared is None else compared.number
    found = Found(call.bound, call.mapped, match, exits, verdict.sharing, verdict.start, cannot)
    averages = verdict.traits.averages
    found = replace(found, compared=compared, number=number, plain=plain, averages=averages)
    return asked.keep(found)


_CPU: Final = torch.device("cpu")

_COMPARED: Final[WeakValueDictionary[int, "Compared"]] = WeakValueDictionary()


class Compared:
    """A call in a graph, which processes compare before the graph runs it; `Found` holds it."""

    def __init__(self, call: Call, description: Description) -> None:
        self._call, self._description = call, description
        self._equal = EqualValues(False)
        self.number = next(_NUMBERS)
        _COMPARED[self.number] = self

    def require_equal(self, plain: Sequence[Tensor]) -> None:
        """Compares the call, and its plain tensors.

        Raises:
            CollectiveMismatchError: another process makes another call, or none.
            SpecError: it has other values.
        """
        control = current()
        if control is None:
            return
        leaves = put(self._call.leaves, self._call.crossing, plain)
        values = self._equal.of(replace(self._call, leaves=leaves), control)
        run = partial(agree, self._description, values=values)
        posting_errors(self._call.name, run, self._call.mesh)


_NUMBERS: Final = count(1)

_ORDER: Final = torch.zeros((), device="cpu")
"""Stands for the order of comparisons: what writes into it stays in a graph, and in its place."""


@torch.library.custom_op("shardmap_torch::compare", mutates_args={"order"})
def _compare(order: Tensor, plain: list[Tensor], number: int) -> None:
    _COMPARED[number].require_equal(plain)


@_compare.register_fake
def _compare_nothing(order: Tensor, plain: list[Tensor], number: int) -> None:
    """Returns nothing, of any shapes."""


def compare_traced(found: Found, leaves: Sequence[Any]) -> None:
    """Puts the comparison of a call into the graph that Dynamo traces; an export gets none."""
    if found.number and not torch.compiler.is_exporting():
        plain = [leaves[position].detach() for position in found.plain]
        _compare(_ORDER, plain, found.number)


_CANNOT: Final = "{}: torch.compile cannot compile what was checked: {}. Call it uncompiled{}."
_UNCHECKED: Final = ", or write its types and pass check=False"


def _obstacles(verdict: Verdict, mesh: Mesh) -> Iterator[str]:
    """Yields the reasons why a trace would not be the program that was checked."""
    if is_simulated(mesh):
        yield from _obstacles_to_batching(verdict, mesh)
    if verdict.traits.draws:
        yield (
            "it draws from torch's default generator, which ranks share by their types when they "
            "run uncompiled only; draw from a key of shardmap_torch.random"
        )
    if verdict.traits.untraced:
        yield f"torch.compile lacks the derivative of {verdict.traits.untraced}"
    if verdict.refusal is not None:
        yield (
            "it takes gradients by itself, and its results cannot be differentiated from outside; "
            "call it under torch.no_grad(), or with arguments that do not require gradients"
        )
    if len(verdict.program_paths) > 1:
        yield "it branches on numbers taken from tensors"
        return
    step = verdict.start
    while step.next:
        step = step.next[0]
        step.crossing.collectives  # noqa: B018 - computed here, for the same reason as below
        again = [each for start in step.later.values() for each in start.walk()]
        if any([isinstance(each.what, tuple) for each in again]):
            yield f"code that runs again in a backward asks for types, as {step} does"


def _obstacles_to_batching(verdict: Verdict, mesh: Mesh) -> Iterator[str]:
    """Yields the reasons why it cannot be traced as one batched program."""
    if mesh.simulate == "ranks":
        yield (
            'simulate="ranks" runs it in a thread for each rank; make the mesh with '
            'simulate="auto" or "vmap"'
        )
    if verdict.traits.rank_only:
        (what, *_) = verdict.traits.rank_only.splitlines()
        yield f"one batched program drops, or cannot run, {what.removesuffix('.')}"
    if verdict.traits.rank_only is not None and any(map(_names_dtypes, verdict.program_paths)):
        yield (
            "one batched program does not round gradients as comm_dtype and grad_comm_dtype say, "
            "which runs of single ranks do"
        )
    if verdict.traits.applies_functions:
        yield (
            "it applies autograd Functions, and under torch.func.vmap torch.compile leaves their "
            "backward out"
        )


def _names_dtypes(path: ProgramPath) -> bool:
    """Returns whether a collective of a path has values or cotangents travel in other dtypes."""
    moved = [equation.collective for equation in path.equations if equation.collective is not None]
    return any((each.comm_dtype, each.grad_comm_dtype) != (None, None) for each in moved)


def give_up(error: ShardMapError) -> NoReturn:
    """Ends the trace by this error: a call that may break graphs runs uncompiled then."""
    # Here: importing Dynamo takes a second.
    from shardmap_torch.core.torch_private import dynamo

    dynamo.give_up(error)


class TraceMonitor(StepMonitor):
    """Monitor that follows the checked program while Dynamo traces it."""

    depth = inf

    def __init__(self, cannot: str, start: CheckedStep) -> None:
        """Starts the trace; `cannot` is the start of errors."""
        self._cannot, self._at = cannot, start

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Takes the step.

        Raises:
            TransformError: the program that was checked does something else here.
        """
        if not self._at.next or not (self._at.next[0].what == what):
            _reject_different(self._cannot)
        self._at = self._at.next[0]

    def fork(self, what: object) -> Reruns:
        """Follows on; code that runs again asks for nothing that only the checker knows.

        Whether a gradient is taken of it, which decides if it was seen, is not known here.
        """
        if self._at.next and self._at.next[0].what == what:
            self._at = self._at.next[0]
        return _traced_with_its_forward

    def rerun(self, later: dict[Hashable, CheckedStep], kind: Hashable) -> None:
        """Returns no monitor: code that runs again is traced with its forward."""

    def end(self, leaves: Sequence[object] = ()) -> None:
        if not self._at.last:
            _reject_different(self._cannot)


def _traced_with_its_forward(key: Hashable) -> None:
    """Returns no monitor: code that runs again is traced with its forward."""


@constant
def _reject_different(cannot: str) -> NoReturn:
    give_up(TransformError(cannot.format("traced, it asks for other collectives")))
