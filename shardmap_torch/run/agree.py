"""Agreement of processes on a call before any of its data is sent.

Processes that make different calls would wait for one another in collectives until a time limit,
without knowing why; or would add numbers that do not belong together.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import unwrap
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.api import program_of
from shardmap_torch.checker.guards.monitor import Difference
from shardmap_torch.checker.guards.state import codes_in
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.control.control import Control, Values
from shardmap_torch.control.groups import shortest_timeout
from shardmap_torch.control.start import call_number, current, start
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import KernelError, ShardMapError, show_shape
from shardmap_torch.mesh import PROCESS_KINDS, Mesh

if TYPE_CHECKING:  # it takes a second to import
    from torch.distributed.tensor import DTensor

A = TypeVar("A")
Y = TypeVar("Y")

_PLAIN: Final = (bool, int, float, str, type(None))
"""Types of static arguments that are compared: the `repr` of others may differ by process."""


@dataclass(frozen=True)
class Description:
    """One process's description of a call and its checked program.

    Attributes:
        name: of the function.
        text: its lines, for errors; text from "  # " on is not compared.
        digest: hash of all that is compared.
    """

    name: str
    text: str
    digest: int

    @staticmethod
    def of(name: str, lines: Sequence[str], fingerprint: str = "") -> "Description":
        """Makes one from lines; `fingerprint` is that of a program that follows them."""
        compared = "\n".join([*(line.split("  # ")[0] for line in lines), fingerprint])
        return Description(name, "\n".join(lines), zlib.crc32(compared.encode()))

    def followed_by(self, lines: Sequence[str]) -> "Description":
        """Returns one of which more is known."""
        more = Description.of(self.name, lines, f"{self.digest}")
        return replace(more, text=f"{self.text}\n{more.text}")


def describe(call: Call, verdict: Verdict | None) -> Description:
    """Describes a call: its arguments, its specs, and its program if it has been checked."""
    lines = _head(call)
    if verdict is None:
        specs, _ = flatten(call.out_specs)
        lines += [f"  unchecked, out_specs: {specs!r}", _code(call.function)]
        return Description.of(call.name, lines)
    match = verdict.result.match
    lines += [
        f"  {path}: {spec!r}" for path, spec in zip(match.paths, match.specs, strict=True) if spec
    ]
    lines += [f"  a tensor, closed over: {values}" for values in verdict.elsewhere]
    program = program_of(verdict)
    lines += [_collective(equation) for equation in program.collectives]
    _, *equations = str(program).splitlines()
    head_only = Description.of(call.name, lines, program.fingerprint)
    text = "\n".join([head_only.text, *equations, *program.returned])
    return Description(call.name, text, head_only.digest)


def _head(call: Call) -> list[str]:
    site = call_site()
    head = f"{call.name} on the {call.mesh}" + (f"  # {site}" if site is not None else "")
    return [head, *_arguments(call)]


def _code(function: Any) -> str:
    """Formats a hash of a function's own code: that of two lambdas differs, and not their name.

    What is wrapped around it, as to log or to profile, may be one rank's alone.
    """
    while isinstance(function := unwrap(function), partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    found = [
        (each.co_code, each.co_names, [repr(x) for x in each.co_consts if is_compared(x)])
        for each in (codes_in(code) if code is not None else ())
    ]
    return f"  code of hash {zlib.crc32(repr(found).encode()):x}"


def _collective(equation: Equation) -> str:
    """Formats a collective with its arguments, which the program's text leaves out."""
    options = {} if equation.collective is None else equation.collective.options
    words = [f"{name}={value}" for name, value in options.items()]
    site = f"  # {equation.site}" if equation.site is not None else ""
    return "  " + ", ".join([equation.name, *words]) + site


def _arguments(call: Call) -> Iterator[str]:
    for leaf, path, spec in zip(call.leaves, call.match.paths, call.match.specs, strict=True):
        if isinstance(leaf, Tensor):
            grad = ", requires_grad" * leaf.requires_grad
            yield f"  {path}: {show_shape(leaf.dtype, leaf.shape)}, {spec!r}{grad}"
        elif is_compared(leaf):
            yield f"  {path} = {leaf!r}"


def is_compared(static: object) -> bool:
    """Returns whether the value of a static argument is part of a description."""
    return type(static) in _PLAIN


def refused(name: str, error: Exception, call: Call | None = None) -> Description:
    """Describes a call that the checker has rejected, or whose body raised an error.

    Its arguments come first: where they differ, one rank may go on.
    """
    known = isinstance(error, ShardMapError)
    why = f"is rejected: {error}" if known else f"raises {type(error).__name__}: {error}"
    lines = [*(_head(call) if call is not None else []), f"{name} {why}"]
    return Description(name, "\n".join(lines), zlib.crc32(f"{name} rejected".encode()))


def agree(
    own: Description,
    departure: Difference | None = None,
    now: bool = True,
    values: Values | None = None,
) -> None:
    """Requires that every process has the same description of a call, at the same step.

    A `departure` is the difference of the newest run from its program. Unless `now`, the first
    collective waits for the others, or the end of the call. `values` must be equal on processes.

    Raises:
        CollectiveMismatchError: another process has another description, or waits in a collective;
            shows the first difference, on every process.
        SpecError: another process has other values.
        CommunicationError: another process is gone.
    """
    control = current()
    if control is None:
        return
    digest, text, doing = own.digest, own.text, ""
    if departure is not None:
        difference = f"comes to {departure.found}, where the program has {departure.expected}"
        digest = zlib.crc32(f"{digest} {departure.depth}".encode())
        number = control.progress.call[0]
        text, doing = f"{difference}\n{text}", f"call {number} of {own.name}, where it {difference}"
    control.check(digest, text, now, values, doing)


def compared(
    name: str,
    mesh: Mesh | None,
    read: Callable[[], A],
    describe: Callable[[A], Iterable[str]],
    run: Callable[[A], Y],
    values: Callable[[A], Values | None] = lambda arguments: None,
) -> Y:
    """Runs what all ranks of a mesh call alike; processes compare what they call it with before.

    `describe` yields lines that are equal where arguments that `read` has checked may be taken for
    equal, and `values` has what must be equal beside. No mesh is that of all processes.

    Raises:
        CollectiveMismatchError: another process calls something else, or with other arguments.
        CommunicationError: another process is gone, or did not come in time.
    """
    is_local = mesh is not None and mesh.kind not in PROCESS_KINDS
    is_inside = current_scope() is not None or torch.compiler.is_compiling()
    if is_local or is_inside or control_of(mesh) is None:
        return run(read())

    def compare_and_run() -> Y:
        try:
            arguments = read()
        except ShardMapError as error:
            agree(refused(name, error))
            raise
        what = Description.of(name, [f"{name}  # {call_site()}", *describe(arguments)])
        agree(what, values=values(arguments))
        return run(arguments)

    return posting_errors(name, compare_and_run)


def control_of(mesh: Mesh | None) -> Control | None:
    """Returns the control; that of all processes is started where no mesh of theirs did so."""
    if mesh is None and current() is None and dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None  # it has been initialized
        return start(shortest_timeout([dist.group.WORLD]) or dist.default_pg_timeout)
    return current()


def posting_errors(name: str, run: Callable[[], Y], mesh: Mesh | None = None) -> Y:
    """Runs a call of the function `name`, and posts its error for the ranks that wait for it.

    Raises:
        MeshError: the mesh is closed, or broken since an error.
        CollectiveMismatchError: the other ranks make another call.
    """
    if mesh is not None:
        mesh.require_open()
    control = current()
    if control is None:
        return run()
    control.begin_call(name)
    try:
        result = run()
    except BaseException as error:
        if isinstance(error, KernelError) and isinstance(error.__cause__, RuntimeError):
            control.fail_quietly(error)  # a transfer has failed, and others may be in flight
        control.end_call(error)
        raise
    control.end_call()
    return result


def number(results: Iterable[object]) -> None:
    """Numbers the DTensors that a call returns: all processes make the same calls in one order."""
    call = call_number()
    for at, x in enumerate(results):
        if is_dtensor(x):
            x._shardmap_made = call, at  # type: ignore[attr-defined]  # read below


def made_by(x: "DTensor", at: int) -> tuple[int, int]:
    """Returns the call and the position of a DTensor there, as a result or else at its first use.

    Its values are of this rank alone, and another one in its place would not be noticed. Positions
    of arguments count down from -1; `at` is that in this call. After an error some ranks have used
    what others have not, so that first uses count anew.
    """
    made: tuple[int, int] | None = getattr(x, "_shardmap_made", None)
    if made is not None:
        return made
    control = current()
    errors = 0 if control is None else control.num_errors
    used: tuple[int, int, int] | None = getattr(x, "_shardmap_used", None)
    if used is None or used[0] != errors:
        used = x._shardmap_used = errors, call_number(), -1 - at  # type: ignore[attr-defined]
    return used[1:]


def shown_made(made: tuple[int, int]) -> str:
    """Formats what `made_by` returns."""
    call, at = made
    what = f"result {at}" if at >= 0 else f"argument {-1 - at}"
    return f", {what} of call {call}" if call else ""


def shown_shard(x: "DTensor", at: int = 0) -> str:
    """Formats shape, placements and number of a DTensor, whose values are not compared."""
    return f"{show_shape(x.dtype, x.shape)}, placed {x.placements}{shown_made(made_by(x, at))}"
