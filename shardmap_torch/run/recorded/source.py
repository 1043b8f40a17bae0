"""Writes a program as the Python function that runs it: a line for each step."""

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import isfinite
from typing import Any, Final
from weakref import finalize

import torch
from torch import Tensor

from shardmap_torch.backends.recorder import RecordedOp, Slot
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.run.recorded.simplify import Program, storage_of

Runnable = Callable[[Sequence[Tensor]], list[Tensor]]

_LITERALS: Final = frozenset((int, bool, str, type(None)))

_DIRECT: Final = frozenset(
    "add.Tensor bmm.default cat.default clone.default cos.default div.Tensor exp.default "
    "log.default mean.dim mm.default mul.Tensor neg.default pow.Tensor_Scalar relu.default "
    "rsqrt.default sigmoid.default sin.default sqrt.default stack.default sub.Tensor "
    "sum.dim_IntList tanh.default".split()
)
"""Operators that the function of the same name in torch takes with the same arguments.

A call by the name of an overload costs 0.6 us more.
"""

_NUMBERS = count(1)


def runnable(program: Program, name: str) -> Runnable:
    """Returns the function that runs a program."""
    return _Writer(program).function(f"<recording {next(_NUMBERS)} of {name}>")


@dataclass(frozen=True, eq=False, slots=True)
class _Line:
    """A line, and the local names that it reads."""

    text: str
    reads: frozenset[str] = frozenset()
    site: Site | None = None

    def __str__(self) -> str:
        """Formats it with the user's line, which tracebacks show then."""
        return self.text if self.site is None else f"{self.text}  # {self.site}"


class _Writer:
    """The lines of one function, and the objects that they refer to."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._objects: dict[str, Any] = {"as_strided": torch.as_strided}
        self._names: dict[Any, str] = {}
        self._waiting: dict[int, str] = {}
        self._read: dict[int, int] = {}  # the memory that what is waited for is read from
        self._lines: list[_Line] = []

    def function(self, file: str) -> Runnable:
        """Writes all lines, and compiles them; `file` is their name in tracebacks."""
        program = self._program
        inputs = [self._local(number) for number in program.inputs]
        if inputs:
            self._lines.append(_Line(f"{', '.join(inputs)}, = inputs"))
        for step in program.steps:
            self._write(step)
        for number in list(self._waiting):  # nothing may be under way after the run
            self._wait(number)
        reads = set[str]()
        returned = [self._returned(number, reads) for number in program.outputs]
        self._lines.append(_Line(f"return [{', '.join(returned)}]", frozenset(reads)))
        text = "\n    ".join(["def run(inputs):", *self._with_deletions()]) + "\n"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        exec(compile(text, file, "exec"), self._objects)
        found: Runnable = self._objects.pop("run")
        finalize(found, linecache.cache.pop, file, None)
        return found

    def _write(self, step: RecordedOp) -> None:
        if step.writes:
            self._wait_for_readers(step)
        reads = set[str]()
        args = [self._argument(arg, reads) for arg in step.args]
        args += [f"{name}={self._argument(arg, reads)}" for name, arg in step.kwargs.items()]
        call = f"{self._called(step.function)}({', '.join(args)})"
        target = self._waiting_for(step) if step.starts else self._target(step.result)
        text = call if set(target) <= set("_[], ") else f"{target} = {call}"
        self._lines.append(_Line(text, frozenset(reads), step.site))

    def _waiting_for(self, step: RecordedOp) -> str:
        """Returns the name of what waits for the result of a step, where that is needed."""
        (number,) = step.results or (-len(self._lines),)
        (operand,) = step.operands
        self._read[number] = storage_of(self._program.tensors[operand])
        return self._waiting.setdefault(number, f"w{len(self._lines)}")

    def _wait(self, number: int) -> None:
        """Adds the line that waits for a tensor, unless it is there."""
        waiting, _ = self._waiting.pop(number, None), self._read.pop(number, None)
        if waiting is not None:
            text = f"{self._local(number)} = {waiting}()"
            self._lines.append(_Line(text, frozenset({waiting})))

    def _wait_for_readers(self, step: RecordedOp) -> None:
        """Waits for what is on its way from memory into which a step writes."""
        tensors = self._program.tensors
        written = {storage_of(tensors[n]) for n in step.operands}
        for number in [n for n, read in self._read.items() if read in written]:
            self._wait(number)

    def _called(self, function: Callable[..., Any]) -> str:
        name = str(function).removeprefix("aten.")
        if isinstance(function, OpOverload) and name in _DIRECT:
            function = getattr(torch, name.partition(".")[0])
        return self._object(function, "f")

    def _target(self, result: Any) -> str:
        """Returns what a result is assigned to."""
        if type(result) is Slot:
            return "_" if result.number in self._names else self._local(result.number)
        if isinstance(result, list | tuple):
            return f"[{', '.join(map(self._target, result))}]" if result else "_"
        return "_"

    def _argument(self, arg: Any, reads: set[str]) -> str:
        if type(arg) is Slot:
            return self._tensor(arg.number, reads)
        if isinstance(arg, list | tuple):
            items = "".join(f"{self._argument(item, reads)}, " for item in arg)
            return f"[{items}]" if isinstance(arg, list) else f"({items})"
        if type(arg) in _LITERALS or (type(arg) is float and isfinite(arg)):
            return repr(arg)
        return self._object(arg, "o")

    def _tensor(self, number: int, reads: set[str]) -> str:
        """Returns the name of a tensor, after a line that makes it where it is a view."""
        program = self._program
        source = program.sources[number]
        if source in program.computed:
            return self._object(program.tensors[number], "t")
        if source in program.captured:
            own = self._object(program.tensors[source], "t")
        else:
            self._wait(source)
            own = self._names[source]
        shape, base = _geometry(program.tensors[number]), _geometry(program.tensors[source])
        if shape == base:
            reads.add(own)
            return own
        known = self._names.get((source, shape))
        if known is None:
            known = self._names[source, shape] = f"v{number}"
            size, stride, offset = shape
            moved = offset - base[2]
            start = f", {own}.storage_offset() + {moved}" if moved else ""
            text = f"{known} = as_strided({own}, {size}, {stride}{start})"
            self._lines.append(_Line(text, frozenset({own})))
        reads.add(known)
        return known

    def _returned(self, number: int, reads: set[str]) -> str:
        """Returns what is returned for a tensor: an object of its own, that no other one is."""
        name = self._tensor(number, reads)
        is_own = self._program.sources[number] == number or name == f"v{number}"
        return name if is_own else f"{name}.detach()"

    def _local(self, number: int) -> str:
        return self._names.setdefault(number, f"v{number}".replace("-", "_"))

    def _object(self, value: Any, letter: str) -> str:
        name = self._names.get(("object", id(value)))
        if name is None:
            name = self._names["object", id(value)] = f"{letter}{len(self._objects)}"
            self._objects[name] = value
        return name

    def _with_deletions(self) -> list[str]:
        """Returns the lines, each followed by the deletion of names that it reads last."""
        read, found = set[str](), list[str]()
        for index, line in reversed(list(enumerate(self._lines))):
            last = {name for name in line.reads - read if name not in self._objects}
            read |= line.reads
            if last and index < len(self._lines) - 1:
                found.append(f"del {', '.join(sorted(last))}")
            found.append(str(line))
        return found[::-1]


def _geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(x.shape), x.stride(), int(x.storage_offset())
