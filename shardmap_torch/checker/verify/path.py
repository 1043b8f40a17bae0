"""Verifies one path through a body: its forward and derived backward against its specs.

Under global strictness the same path is interpreted on one device before, and compared. What
compares them is imported where it is asked for: it is a large part of the checker.
"""

import dis
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.checker.interpreter import messages, modes, operations
from shardmap_torch.checker.interpreter.collectives import AbstractBackend
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import Observer
from shardmap_torch.checker.ir.own_functions import own_nodes
from shardmap_torch.checker.ir.paths import Branch, Branches, SymbolicNumber, format_branches
from shardmap_torch.checker.ir.program import Need, PathOutcome, ProgramPath, Where, use_of
from shardmap_torch.checker.ir.repairs import NONE, rejected
from shardmap_torch.checker.ir.sizes import EXACT
from shardmap_torch.checker.rewrites import distributed
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import accepts, plain
from shardmap_torch.checker.verify.interpretation import Interpretation
from shardmap_torch.checker.verify.outputs import (
    Exits,
    convert_results,
    repaired_result,
    report_values,
)
from shardmap_torch.checker.verify.request import (
    Request,
    enters_as,
    global_shape,
    input_sharing,
    local_shape,
    seeded_as,
)
from shardmap_torch.core.ambient import silently
from shardmap_torch.core.closures import name_in
from shardmap_torch.core.source_location import Site, error_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardMapError, ShardTypeError, SpecError
from shardmap_torch.types import COTANGENT, I, K, R, Z

if TYPE_CHECKING:
    from shardmap_torch.checker.spmd.recorder import Recorder


def require_end_of_path(request: Request, branches: Branches, error: Exception) -> None:
    """Returns if every rank raises this error at the end of a path; else the check fails with it.

    Raises:
        ShardTypeError: it may be due to the check, whose values have no data.
        Exception: the error, of a body that has but one path.
    """
    name, numbers = request.call.name, SymbolicNumber.__name__
    called = distributed.named_in(name, error)
    if called is not None:
        raise called from error
    branches.require()
    if "saved tensor hooks" in str(error):
        raise ShardTypeError(_HOOKED.format(name, error_site(error))) from error
    is_of_number = numbers in str(error)
    if isinstance(error, ShardMapError) or not (branches.taken or is_of_number):
        _note_cause(request, error)
        raise error
    if error is not branches.ending and (is_of_number or not is_raised_by_body(error)):
        raise ShardTypeError(f"{name}: {type(error).__name__}: {error}") from error


_CHECKER: Final = (modes.__file__, operations.__file__)
"""Files that call torch on values without data: what fails below is no `raise` of the body's."""
_STANDARD: Final = sysconfig.get_path("stdlib")


def is_raised_by_body(error: BaseException) -> bool:
    """Returns whether a `raise` or an `assert` raised it, and not an operation on stand-ins.

    Such an exception ends a path, and every rank raises it. An operation on fakes may fail because
    they have no data; what it would do with data is not known.
    """
    frames = list(walk_tb(error.__traceback__))
    codes = [frame.f_code for frame, _ in frames if frame.f_code not in modes.HANDS_ON]
    if not codes or any(code.co_filename in _CHECKER for code in codes):
        return False
    last = _last(error)
    code = last.tb_frame.f_code
    # Python's own library may reject a symbolic number.
    is_standard = code.co_filename.startswith(_STANDARD) and "site-packages" not in code.co_filename
    if is_standard or dis.opname[code.co_code[last.tb_lasti]] != "RAISE_VARARGS":
        return False
    return error.__context__ is None or is_raised_by_body(error.__context__)


def _last(error: BaseException) -> Any:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


_OF_CODE: Final = (TypeError, AttributeError, NameError)
"""Exceptions that do not come from shapes."""

_HOOKED: Final = (
    "{}: a gradient that is taken in the body goes through no saved tensor hooks, which torch's "
    "own checkpoint sets.\n  at {}\nFix: shardmap_torch.checkpoint(f, *args) in place of "
    "torch.utils.checkpoint.checkpoint."
)
"""In place of torch's error about hooks under its transforms."""

_SHOWN: Final = 3
"""Maximal number of inputs whose shapes are added to an error of the body."""


def _note_cause(request: Request, error: Exception) -> None:
    """Adds to an error of the body that shapes are those of shards, often its cause."""
    call = request.call
    sharded = [at for at in call.crossing if call.match.spec(at).mentioned]
    if not sharded or isinstance(error, (ShardMapError, *_OF_CODE)):
        return
    shown = []
    with DisableTorchFunction():  # which would refuse arguments of a transform outside
        for at in sharded[:_SHOWN]:
            shape, spec = request.sizes.of(call.leaves, at), call.match.spec(at)
            sizes = f"{list(local_shape(shape, spec, call.mesh))}, a shard of {list(shape)}"
            shown.append(f"{call.match.paths[at]} is {sizes} by {spec!r}")
    error.add_note(f"In the body of {call.name} tensors are shards: {'; '.join(shown)}.")


def verify_path(request: Request, branches: Branches) -> PathOutcome:
    """Verifies one path.

    Raises:
        ShardTypeError: it is not well-typed, or differs from the program on one device.
        AgainError: the body takes a rank's part of a tuple that is not marked.
    """
    branches.marks_parts = request.reading.marks_parts
    try:
        one = interpret_on_one_device(request, branches)
        return _verify(request, branches, one)
    except ShardTypeError as error:
        error.args = ("\n".join([str(error), *format_branches(branches.taken)]),)
        raise
    finally:
        branches.end()


def _verify(request: Request, branches: Branches, one: "OneDevice | None") -> PathOutcome:
    """Verifies a path in six steps."""
    call, made = request.call, Interpretation(request, branches)
    interpreter = made.interpreter
    # Where code fails on one device, that or the types of the ranks tell more than a comparison.
    if one is not None and isinstance(one.failure, ShardTypeError | None):
        one.compare(interpreter)
    elif request.observe is not None:
        interpreter.observer = request.observe(interpreter)

    # 1. Inputs enter as their specs say.
    with made.entered() as inputs:
        # 2. The body runs: each operation is typed, and compared with that on one device.
        try:
            result = made.run_body(inputs)
            branches.require_raised()
        except Exception as error:  # the user's code may raise anything
            require_end_of_path(request, branches, error)
            equations = tuple(interpreter.equations)
            way = ProgramPath(tuple(branches.taken), equations, f"raises {type(error).__name__}")
            return PathOutcome(way, None, error)

        # 3. Results leave as their specs promise. No body makes these casts, so that they are not
        # compared with one device; the user's own backwards are, later.
        observer = interpreter.observer
        with DisableTorchFunction():  # the boundary asks and casts, not the body
            result = repaired_result(call, made.backend, request.repair, result)
            exits = convert_results(request, made, result)
        interpreter.observer = observer
        observer.on_return(dict(zip(result.match.paths, result.leaves, strict=True)))

        # 4. The derived backward runs, and decides the axes that specs leave open.
        back = PullBack(call, interpreter, made.backend, inputs)
        with _noting_results(request, made):
            back.run(result)
            branches.require()
            interpreter.observer.on_end()
        made.inner.resolve()

    # 5. Both programs have taken the same branches and numbers.
    if one is not None:
        one.require(call.name, branches.taken, interpreter.numbers.sites)

    # 6. What runs and the other paths need of it is kept.
    outcome = _outcome(request, made, branches, result, exits, back)
    interpreter.end()
    return outcome


@contextmanager
def _noting_results(request: Request, made: Interpretation) -> Iterator[None]:
    """Notes if gradients do not fit where results were read as K; see `Reading`."""
    try:
        yield
    except ShardTypeError:
        request.met.results = made.uncommitted.met and made.uncommitted.assumed == K
        raise


def _outcome(
    request: Request,
    made: Interpretation,
    branches: Branches,
    result: Result,
    exits: Exits,
    back: "PullBack",
) -> PathOutcome:
    interpreter = made.interpreter
    outputs, sharing, returned = {}, {}, []
    leaves = list(result.leaves)
    for position in result.match.crossing:
        value, spec = result.leaves[position], result.match.spec(position)
        storage_type = interpreter.storage_type(value)
        shape = global_shape(tuple(value.shape), spec, request.call.mesh)
        outputs[position] = (shape, value.dtype, storage_type.types)
        returned.append(use_of(result.match.paths[position], value, storage_type))
        source = input_sharing(storage_type)
        if source is not None:
            sharing[position] = source
        leaves[position] = None  # its graph would stay alive
    program = ProgramPath(
        tuple(branches.taken),
        tuple(interpreter.equations),
        gradients=tuple(back.gradients),
        returned=tuple(returned),
    )
    return PathOutcome(
        program,
        replace(result, leaves=leaves),
        outputs=outputs,
        exits=exits,
        needs=back.needs,
        traits=interpreter.traits,
        sharing=sharing,
        observer=None if request.observe is None else interpreter.observer,
    )


# --------------------------------------------------------------------------------- backward

_SUMMED: Final = (R, "summed", "replicate")
_EQUAL: Final = (I, "equal on all ranks already, and not summed", "invariant")


class PullBack:
    """The derived backward of one path through a body.

    Attributes:
        needs: the types that the gradients of inputs need along open axes.
        gradients: the types that gradients have in the body, by the input's path.
    """

    def __init__(
        self,
        call: Call,
        interpreter: Interpreter,
        backend: AbstractBackend,
        locals_: Mapping[int, Tensor],
    ) -> None:
        """`locals_` are the inputs as the body got them, by position."""
        self._call, self._interpreter, self._backend = call, interpreter, backend
        self._locals = locals_
        self.needs: dict[Where, Need] = {}
        self.gradients: list[tuple[str, Types]] = []

    def run(self, result: Result) -> None:
        """Runs the backward that autograd derives, from cotangents of the results' own types.

        Raises:
            ShardTypeError: a gradient is not what its value needs.
        """
        interpreter, outputs = self._interpreter, []
        for position in result.match.crossing:
            spec = result.match.spec(position)
            types = tuple(seeded_as(spec, axis) for axis in interpreter.axes)
            outputs.append((result.match.paths[position], result.leaves[position], types))
        found = _differentiate(interpreter, outputs, self._locals.values())
        gradients = {position: found.get(id(local)) for position, local in self._locals.items()}
        self._commit(gradients)
        interpreter.observer.on_pulled_back([*gradients.values()])
        for closure in interpreter.closures.values():
            self._check_closure(closure, found.get(id(closure)))

    def _commit(self, gradients: dict[int, Tensor | None]) -> None:
        """Decides the open axes of the inputs by their gradients, and sums these over them."""
        call, interpreter = self._call, self._interpreter
        for position in call.crossing:
            spec, path = call.match.spec(position), call.match.paths[position]
            gradient = gradients.get(position)
            open_axes = [axis for axis in call.mapped if axis not in spec.named]
            if gradient is not None:
                replicate: list[str] = []
                storage_type = interpreter.storage_type(gradient)
                self.gradients.append((path, storage_type.types))
                for axis, have in interpreter.by_axis(storage_type.types).items():
                    at = interpreter.axes.index(axis)
                    axis_type = enters_as(spec, axis, call.mapped)
                    if not accepts(axis_type, have):
                        value = interpreter.storage_type(self._locals[position])
                        what = f"input {path}"
                        raise messages.cotangent(
                            interpreter, at, axis_type, storage_type, what, value
                        )
                    if axis in open_axes and have != Z:
                        need = Need(have.varies, storage_type.origin())
                        self.needs[position, axis] = need
                        replicate += [axis] * need.replicate
                if replicate:
                    gradients[position] = self._backend.reduce_gradient(replicate, gradient)
        self._check_asserted()

    def _check_asserted(self) -> None:
        """Compares what the body asserts of inputs with the types that they get in the end."""
        for asserted in self._interpreter.asserted:
            need = self.needs.get((asserted.leaf, asserted.axis))
            if need is None or asserted.expected == (R if need.replicate else I):
                continue
            have, word, keyword = _SUMMED if need.replicate else _EQUAL
            axis, path = asserted.axis, self._call.match.paths[asserted.leaf]
            raise ShardTypeError(
                f"{self._call.name}: assert_type expects {asserted.expected} over {axis!r}, but "
                f"the input {path} is {have}: its gradient is {word} over {axis!r}.\n"
                f"  at {asserted.site}\n"
                f"  the gradient is from {need.origin}\n"
                f"Fix: assert {have}, as {keyword}={{{axis!r}}} in its spec would say."
            )

    def _check_closure(self, closure: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        storage_type = self._interpreter.storage_type(gradient)
        name = name_in(self._call.function, closure) or "the tensor"
        by_call = _BY_CALL * isinstance(closure, torch.nn.Parameter)
        for axis, axis_type in self._interpreter.by_axis(storage_type.types).items():
            if axis_type not in (I, K, Z):
                raise rejected(
                    f"{self._call.name}: a closed-over tensor of shape {list(closure.shape)} gets "
                    f"a gradient that is {axis_type} over {axis!r}: "
                    f"{messages.wrong(I, axis_type)}.\n"
                    f"  the gradient is from {storage_type.origin()}\n"
                    f"Fix: pass {name} as an argument{by_call}.",
                    types=[axis_type],
                    closure=closure,
                )


def record_backward(
    interpreter: Interpreter, results: Iterable[Tensor], inputs: Iterable[Tensor]
) -> None:
    """Runs the derived backward for its observers, if the user's own code runs in it."""
    outputs = []
    for value in results:
        have = interpreter.types_of(value)
        types = tuple(I if t == K else COTANGENT.get(plain(t), t) for t in have)
        outputs.append(("", value, types))
    _differentiate(interpreter, outputs, inputs)


def _differentiate(
    interpreter: Interpreter,
    outputs: Iterable[tuple[str, Tensor, Types]],
    inputs: Iterable[Tensor],
) -> Mapping[int, Tensor | None]:
    """Runs the backward of a body; returns gradients by the identity of inputs and closures.

    Args:
        interpreter: interprets the body.
        outputs: its results with their paths, and the types of their cotangents.
        inputs: as the body got them.
    """
    with DisableTorchFunction():
        live = [each for each in outputs if each[1].requires_grad]
        leaves = [x for x in (*inputs, *interpreter.closures.values()) if x.requires_grad]
    if not live or not leaves:
        return {}
    paths, values, types = zip(*live, strict=True)
    label = "the cotangent of a result"
    seeds = [interpreter.bring_like(*each, label) for each in zip(values, types, strict=True)]
    interpreter.observer.on_pull_back(dict(zip(paths, seeds, strict=True)))
    with interpreter.differentiating(seeds):
        gradients = torch.autograd.grad(values, leaves, seeds, allow_unused=True)
    return dict(zip(map(id, leaves), gradients, strict=True))


_BY_CALL: Final = (
    ": parameters, apply = shardmap_torch.functional(module), and apply(parameters, x) in the body"
)


# ------------------------------------------------------------------------------ on one device


@dataclass(frozen=True)
class OneDevice:
    """The program on one device: every axis has one rank, and no collective does anything.

    Attributes:
        steps: the steps of the program.
        axes: those over which nothing is compared, and which keep their ranks.
        branches: the branches that it has taken.
        numbers: those that it has made of values taken from tensors, with their lines.
        failure: the exception that it raised, or None if it has returned.
    """

    steps: "Recorder"
    axes: frozenset[str]
    branches: Sequence[Branch]
    numbers: Mapping[str, Site | None]
    failure: Exception | None

    def compare(self, interpreter: Interpreter) -> None:
        """Has an interpretation compared with it, step by step."""
        interpreter.observer = self._relation(interpreter)

    def _relation(self, interpreter: Interpreter) -> Observer:
        from shardmap_torch.checker.spmd.axes import AxesRelation
        from shardmap_torch.checker.spmd.equivalence import Relation

        if self.axes:
            return AxesRelation(interpreter, self.steps, self.axes)
        return Relation(interpreter, self.steps)

    def require(
        self, name: str, branches: Sequence[Branch], numbers: Mapping[str, Site | None]
    ) -> None:
        """Raises an error that occurred on one device only, or where the programs differ."""
        if isinstance(self.failure, ShardTypeError):
            raise self.failure
        if self.failure is not None:
            # Here: importing the package of shardings takes a tenth of a second.
            from shardmap_torch.checker.spmd.ops.advice import SENT

            at, text = f"  at {error_site(self.failure)}", f"{self.failure}"
            raise ShardTypeError(
                f"{name}: check='global': on one device the body fails: "
                f"{type(self.failure).__name__}: {text}\n"
                + f"{at}\n" * (at not in text)
                + f"Fix: {SENT if 'source=' in text else _LOCAL}"
            ) from self.failure
        for mine, other in zip_longest(branches, self.branches, fillvalue="no branch"):
            if mine != other:
                raise ShardTypeError(
                    f"{name}: check='global': on one device the body takes other branches.\n"
                    f"  on a rank: {mine}\n  on one device: {other}\n{_SIZES}"
                )
        pairs = zip_longest(numbers.items(), self.numbers.items(), fillvalue=("none", None))
        for (here, site), (there, _) in pairs:
            if here != there:
                raise ShardTypeError(
                    f"{name}: check='global': a number made of values taken from tensors is {here} "
                    f"on a rank and {there} on one device.\n  at {site}\n{_SIZES}"
                )


_LOCAL: Final = (
    "write sizes that are right on one device too: -1, x.shape[...], or a size divided by "
    "axis_size(axis)."
)

_SIZES: Final = "Fix: multiply sizes by axis_size(axis)."


def interpret_on_one_device(request: Request, branches: Branches) -> OneDevice | None:
    """Interprets the same path where every axis that is compared has one rank; None if none is.

    What is tried as a repair, and sizes that are symbols, leave no gradient to be assumed.
    """
    if request.strictness == "local":
        return None
    from shardmap_torch.checker.spmd.assumed import assume
    from shardmap_torch.checker.spmd.recorder import Recorder

    is_usual = (request.repair, request.strictness, request.sizes) == (NONE, "global", EXACT)
    steps = Recorder(assume) if is_usual and request.reading.assumes else Recorder()
    axes, own = _uncompared_axes(request), branches.again()
    interpreter, failure = _record(request, own, steps, axes)
    request.met.assumed |= steps.has_assumed
    numbers = interpreter.numbers.sites
    return OneDevice(steps, axes, own.taken, numbers, failure)


def _uncompared_axes(request: Request) -> frozenset[str]:
    """Returns the axes over which strictness is local.

    Raises:
        SpecError: strictness names an axis that the mesh lacks.
    """
    if isinstance(request.strictness, str):
        return frozenset()
    mesh = request.call.mesh
    unknown = sorted(request.strictness - set(mesh.shape))
    if unknown:
        raise SpecError(f"{request.call.name}: check= names no axis {unknown[0]!r} in the {mesh}.")
    return frozenset(mesh.axis_names) - set(mesh.finest(sorted(request.strictness)))


def _record(
    request: Request, branches: Branches, observer: Observer, axes: frozenset[str]
) -> tuple[Interpreter, Exception | None]:
    """Shows an observer the forward where all axes but these have one rank."""
    full = request.call.mesh
    sizes = tuple(full.shape[axis] if axis in axes else 1 for axis in full.axis_names)
    call = replace(request.call, mesh=full.resized(sizes))
    alone = Request(call, request.repair, "local", request.sizes, casts=request.casts)
    made = Interpretation(alone, branches)
    try:
        with silently():  # it would print the sizes of one device
            _record_forward(alone, made, observer)
    except Exception as error:  # the user's code may raise anything
        return made.interpreter, error
    return made.interpreter, None


def _record_forward(request: Request, made: Interpretation, steps: Observer) -> None:
    """Interprets the forward, and shows its steps, also those of the user's own backwards.

    The backward that autograd derives is interpreted only where there is such code in it.
    """
    interpreter = made.interpreter
    interpreter.observer = steps
    steps.on_start(interpreter.flows_through)
    with made.entered() as inputs:
        result = made.run_body(inputs)
        with DisableTorchFunction():  # the boundary asks and casts, not the body
            outputs = _record_results(request, made, result)
            calls_own = interpreter.has_hooks or any(True for _ in own_nodes(outputs))
        if calls_own:
            with suppress(ShardTypeError):  # types are judged where there are ranks
                record_backward(interpreter, outputs, inputs.values())
    interpreter.end()


def _record_results(request: Request, made: Interpretation, result: Result) -> list[Tensor]:
    """Shows an observer what the body returns; returns its tensors."""
    steps = made.interpreter.observer
    result = repaired_result(request.call, made.backend, request.repair, result)
    for position in result.match.crossing:
        value = made.interpreter.fakify(result.leaves[position])
        steps.on_result(result.match.paths[position], value, result.match.spec(position))
    report_values(steps, result)
    return [result.leaves[position] for position in result.match.crossing]
