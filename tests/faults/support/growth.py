"""Objects and memory that many calls, signatures and meshes leave behind in a process.

python -m tests.faults.support.growth    # 20,000 calls, 2,000 signatures, 200 meshes, 2 processes
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from shardmap_torch import (
    Function,
    I,
    Mesh,
    P,
    ShardMapError,
    all_reduce,
    check_program,
    device_put,
    make_mesh,
    shard_map,
    use_mesh,
    value_and_grad,
)

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """Counts of a process, after so many of something."""

    after: int
    objects: int
    tensors: int
    resident: int
    threads: int

    def __str__(self) -> str:
        """Formats it as a row."""
        return (
            f"{self.after:7,} {self.objects:9,} objects {self.tensors:5,} tensors "
            f"{self.resident / 2**20:7.1f} MiB {self.threads:4} threads"
        )


def sample(after: int) -> Sample:
    """Counts, when what is garbage has gone."""
    for _ in range(3):  # tensors go after what has referred to them weakly
        gc.collect()
    objects = gc.get_objects()
    tensors = sum(type(each) is torch.Tensor for each in objects)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return Sample(after, len(objects), tensors, resident, len(os.listdir("/proc/self/task")))


def over(number: int, samples: int, do: Callable[[int], object]) -> list[Sample]:
    """Does it `number` times, and samples as often as said."""
    found = []
    for each in range(number):
        do(each)
        if (each + 1) % (number // samples) == 0:
            found.append(sample(each + 1))
    return found


def total(mesh: Mesh) -> Any:
    """Maps a sum over all ranks whose backward communicates."""

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return all_reduce((w * x).sum(), mesh.axis_names, dst=I)

    specs = P(), P(mesh.axis_names)
    return shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())


def calls(mesh: Mesh, number: int, samples: int = 4) -> list[Sample]:
    """Calls one function; every tenth time with a backward."""
    f, w, x = total(mesh), torch.ones((), requires_grad=True), torch.ones(8)

    def do(each: int) -> None:
        y = f(w, x)
        assert y.item() == 8
        if each % 10 == 0:
            w.grad = None
            y.backward()
            assert w.grad is not None
            assert w.grad.item() == 8

    return over(number, samples, do)


def signatures(mesh: Mesh, number: int, samples: int = 8) -> list[Sample]:
    """Calls one function with so many shapes."""
    f, w = total(mesh), torch.ones(())
    return over(number, samples, lambda each: f(w, torch.ones(4 * each + 4)))


class Doubled(Function):
    """Doubles, with a backward of its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        return gradient * 2


def dropped(strictness: Any, number: int, samples: int = 3) -> list[Sample]:
    """Checks so many functions with backwards and hooks, and drops each."""
    mesh = make_mesh((2,), ("tp",), kind="abstract")

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Doubled.apply(w)
        return all_reduce((doubled * x).sum(), "tp", dst=I)

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen = w * x
        seen.register_hook(lambda gradient: gradient * 1)
        value: torch.Tensor = value_and_grad(loss)(w, x)[0]
        return value * all_reduce(seen.sum(), "tp", dst=I)

    def do(each: int) -> None:
        f = shard_map(body, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P(), check=strictness)
        check_program(f, torch.ones((), requires_grad=True), torch.ones(8))

    return over(number, samples, do)


def refused(strictness: Any, number: int, samples: int = 2) -> list[Sample]:
    """Refuses so many functions, for which repairs are tried, of inputs that require grad."""
    mesh = make_mesh((2,), ("tp",), kind="abstract")

    def unsummed(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Doubled.apply(w)
        doubled.register_hook(lambda gradient: gradient * 1)
        gradient: torch.Tensor = torch.func.grad(lambda w: (w * x).square().sum())(doubled)
        return w - gradient

    def do(each: int) -> None:
        f = shard_map(unsummed, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P(), check=strictness)
        with suppress(ShardMapError):
            check_program(f, torch.ones((), requires_grad=True), torch.ones(8))
            raise AssertionError

    return over(number, samples, do)


def meshes(
    kind: Any, shape: Sequence[int], number: int, samples: int = 8, closes: bool = True
) -> list[Sample]:
    """Makes, uses and closes or drops so many; one function sees all, another each alone."""
    names = ("dp", "tp")[: len(shape)]

    def body(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x.sum(), names, dst=I)

    everywhere = shard_map(body, in_specs=P(names), out_specs=P())

    def do(each: int) -> None:
        mesh = make_mesh(shape, names, kind=kind)
        with use_mesh(mesh):
            x = torch.ones(8, requires_grad=True)
            everywhere(x).backward()
            assert x.grad is not None
            assert x.grad.sum().item() == 8
            assert total(mesh)(torch.ones(()), torch.ones(8)).item() == 8
            shards = device_put(torch.ones(8), mesh, P(names))
            assert everywhere(shards).item() == 8
        if closes:
            mesh.close()

    return over(number, samples, do)


def all_of(rank: int, sizes: tuple[int, int, int]) -> dict[str, list[Sample]]:
    """All of them, on two processes; `rank` is unused where a pool calls it."""
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    return {
        "calls": calls(mesh, sizes[0]),
        "signatures": signatures(mesh, sizes[1]),
        "meshes": meshes("process_group", (1, 2), sizes[2]),
        "unclosed meshes": meshes("process_group", (1, 2), sizes[2], closes=False),
    }


def main() -> None:
    """Prints a table of rank 0."""
    from tests.faults.support.world import World

    world = World(2, timeout=60)
    try:
        world.start(all_of, (20_000, 2_000, 200))
        outcome, _ = world.outcomes(3600)
    finally:
        world.close()
    for name, found in outcome.value.items():
        print(name)
        for each in found:
            print(each)
    if len(sys.argv) > 1:
        rows = {name: [asdict(s) for s in found] for name, found in outcome.value.items()}
        Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
