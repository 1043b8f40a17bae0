"""One program, three ways: values and every derivative of a program, on any mesh or one device.

A program is a per-rank body with specs, and a plain function that computes the same on one device.
All of it pickles, so that gloo workers run the very same program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch import Mesh, MeshError, P, make_mesh, shard_map

Outcome = dict[str, list[Tensor]]
"""The values of a program and its derivatives, by the way in which they were taken."""

INNER = ("inner vjp", "inner jvp")
VMAP = ("values", "backward", "vjp", "jvp", "double backward", *INNER)
RANKS = ("values", "backward", "vjp", "inner autograd", "inner vjp")  # first order, reverse mode
PROCESSES = ("values", "backward", "vjp", "double backward", "inner autograd", *INNER)
"""Not jvp: torch's forward mode cannot make a dual number of a DTensor."""


@dataclass(frozen=True)
class Program:
    """A per-rank function, its specs and inputs, and the same on one device.

    Attributes:
        body: takes local tensors, returns a tuple of local tensors.
        in_specs: one P per input, which types every axis.
        out_specs: one P per output.
        shapes: global shape of each input.
        reference: `body` on one device.
        meshes: axis sizes by number of ranks.
        axis_names: the axes of all of these meshes.
        check: whether the type checker sees the body first, also where no batched program runs it.
    """

    body: Callable[..., tuple[Tensor, ...]]
    in_specs: tuple[P, ...]
    out_specs: tuple[P, ...]
    shapes: tuple[tuple[int, ...], ...]
    reference: Callable[..., tuple[Tensor, ...]]
    meshes: Mapping[int, tuple[int, ...]]
    axis_names: tuple[str, ...]
    check: bool = False

    def inputs(self) -> list[Tensor]:
        """Unit-variance values, the same on every process."""
        return [random(shape, seed) for seed, shape in enumerate(self.shapes)]


def random(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def dual(spec: P) -> P:
    """The spec of a cotangent of what `spec` describes, inside a body: R and P swap."""
    return P(
        *spec.entries, replicate=spec.partial, partial=spec.replicate, invariant=spec.invariant
    )


def global_value(value: Tensor) -> Tensor:
    """A detached plain tensor of the global value."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def one_device(program: Program) -> Outcome:
    """Returns what the reference gives, under the names of all ways to run."""
    inputs = program.inputs()
    values = program.reference(*inputs)
    gradients = _by_vjp(program.reference, inputs, _cotangents(values))
    pushed = torch.func.jvp(program.reference, tuple(inputs), tuple(_tangents(inputs)))[1]
    return {
        "values": list(values),
        **{way: list(gradients) for way in ("backward", "vjp", "inner vjp", "inner autograd")},
        **{way: list(pushed) for way in ("jvp", "inner jvp")},
        "double backward": _double(program.reference, inputs, _cotangents(values)),
    }


def on_mesh(program: Program, mesh: Mesh, ways: Sequence[str]) -> Outcome:
    """Runs the program on `mesh` and differentiates it in these `ways`."""
    return {way: [global_value(value) for value in _WAYS[way](program, mesh)] for way in ways}


def simulated(program: Program, num_ranks: int, strategy: Any) -> Outcome:
    shape = program.meshes[num_ranks]
    mesh = make_mesh(shape, program.axis_names, kind="simulated", simulate=strategy)
    return on_mesh(program, mesh, VMAP if strategy == "vmap" else RANKS)


def in_worker(program: Program, num_ranks: int) -> Outcome:
    """For `Pool.run`: this process' part of the program."""
    return on_mesh(program, worker_mesh(program.meshes[num_ranks], program.axis_names), PROCESSES)


def worker_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Mesh:
    """Returns a process-group mesh, made once per worker, after errors of other tests too."""
    mesh = _made_once(shape, axis_names)
    try:
        mesh.require_open()
    except MeshError:
        mesh.recover()
    return mesh


@lru_cache
def _made_once(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Mesh:
    return make_mesh(shape, axis_names)


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Compares in float64 to 1e-10: sums of at most some hundred products of unit variance."""
    for way, values in actual.items():
        assert len(values) == len(expected[way])
        for i, (value, wanted) in enumerate(zip(values, expected[way], strict=True)):
            note = partial("{}[{}]: {}".format, way, i)
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10, msg=note)


def _mapped(program: Program, mesh: Mesh) -> Callable[..., tuple[Tensor, ...]]:
    return shard_map(
        program.body,
        mesh=mesh,
        in_specs=program.in_specs,
        out_specs=program.out_specs,
        check=program.check or mesh.simulate == "vmap",
    )


def _cotangents(values: Sequence[Tensor]) -> list[Tensor]:
    return [random(value.shape, 100 + i) for i, value in enumerate(values)]


def _tangents(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [random(value.shape, 200 + i) for i, value in enumerate(inputs)]


def _placed_cotangents(program: Program, mesh: Mesh, values: Sequence[Tensor]) -> list[Tensor]:
    """Cotangents that lie as the outputs do; that of a partial output is whole on each rank."""
    specs = tuple(P(*spec.entries) for spec in program.out_specs)
    place = shard_map(_identity, mesh=mesh, in_specs=specs, out_specs=specs, check=False)
    return list(place(*_cotangents(values)))


def _identity(*values: Tensor) -> tuple[Tensor, ...]:
    return values


def _values(program: Program, mesh: Mesh) -> Sequence[Tensor]:
    return _mapped(program, mesh)(*program.inputs())


def _backward(program: Program, mesh: Mesh) -> Sequence[Tensor]:
    inputs = [x.requires_grad_() for x in program.inputs()]
    values = _mapped(program, mesh)(*inputs)
    torch.autograd.backward(values, _placed_cotangents(program, mesh, values))
    gradients = [x.grad for x in inputs]
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


def _vjp(program: Program, mesh: Mesh) -> Sequence[Tensor]:
    cotangents = _placed_cotangents(program, mesh, _values(program, mesh))
    return _by_vjp(_mapped(program, mesh), program.inputs(), cotangents)


def _inner(program: Program, mesh: Mesh, gradient: Callable[..., Any]) -> Sequence[Tensor]:
    count = len(program.in_specs)

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = gradient(program.body, values[:count], values[count:])
        return found

    specs = program.in_specs + tuple(dual(spec) for spec in program.out_specs)
    out_specs = tuple(dual(spec) for spec in program.in_specs)
    check = mesh.simulate == "vmap"
    step = shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check=check)
    values = [global_value(value) for value in _values(program, mesh)]
    return step(*program.inputs(), *_cotangents(values))


def _by_vjp(body: Callable[..., Any], inputs: Any, cotangents: Any) -> tuple[Tensor, ...]:
    pull_back: Any = torch.func.vjp(body, *inputs)[1]
    gradients: tuple[Tensor, ...] = pull_back(tuple(cotangents))
    return gradients


def _by_autograd(body: Callable[..., Any], inputs: Any, cotangents: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(body(*leaves), leaves, cotangents)


def _jvp(program: Program, mesh: Mesh) -> Sequence[Tensor]:
    inputs = program.inputs()
    tangents = tuple(_tangents(inputs))
    pushed: Sequence[Tensor] = torch.func.jvp(_mapped(program, mesh), tuple(inputs), tangents)[1]
    return pushed


def _inner_jvp(program: Program, mesh: Mesh) -> Sequence[Tensor]:
    count = len(program.in_specs)

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        pushed: tuple[Tensor, ...] = torch.func.jvp(program.body, values[:count], values[count:])[1]
        return pushed

    specs = program.in_specs * 2
    outs = program.out_specs
    check = mesh.simulate == "vmap"
    step = shard_map(body, mesh=mesh, in_specs=specs, out_specs=outs, check=check)
    inputs = program.inputs()
    return step(*inputs, *_tangents(inputs))


def _double(f: Callable[..., Any], inputs: Sequence[Tensor], cotangents: Any) -> list[Tensor]:
    """The gradient of a random combination of the gradients."""

    def combined(*xs: Tensor) -> Tensor:
        gradients = _by_vjp(f, xs, cotangents)
        terms = zip(gradients, _tangents(inputs), strict=True)
        return torch.stack([(g * w).sum() for g, w in terms]).sum()

    argnums = tuple(range(len(inputs)))
    return list(torch.func.grad(combined, argnums=argnums)(*inputs))


def _double_backward(program: Program, mesh: Mesh) -> Sequence[Tensor]:
    values = _values(program, mesh)
    cotangents = _placed_cotangents(program, mesh, values)
    return _double(_mapped(program, mesh), program.inputs(), cotangents)


_WAYS: Mapping[str, Callable[[Program, Mesh], Sequence[Tensor]]] = {
    "values": _values,
    "backward": _backward,
    "vjp": _vjp,
    "inner vjp": lambda program, mesh: _inner(program, mesh, _by_vjp),
    "inner autograd": lambda program, mesh: _inner(program, mesh, _by_autograd),
    "inner jvp": _inner_jvp,
    "jvp": _jvp,
    "double backward": _double_backward,
}
