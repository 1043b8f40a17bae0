"""Random junk for the public API: each call must return, or raise an error of this package.

One seed is one call. Junk stands in the place of one or several arguments: objects whose methods
raise, tensors that cannot be sharded, trees that contain themselves, numbers and names that nothing
has. What the body itself does, and torch then refuses, is the user's error and may be torch's.
"""

import random
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn

import shardmap_torch as sm
from shardmap_torch import I, Mesh, P, Partial, R, S, V, lax
from shardmap_torch.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

Draw = random.Random
Call = Callable[[], object]


class EvilEqual:
    """Cannot be compared or hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("evil eq")


class EvilHash:
    def __hash__(self) -> int:
        raise ValueError("evil hash")


class EvilRepr:
    def __repr__(self) -> str:
        raise ValueError("evil repr")


class Sub(Tensor):
    """A subclass of tensors."""


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(400):
        found = [found]
    return found


JUNK: Final[tuple[Callable[[], Any], ...]] = (
    *(
        lambda value=value: value
        for value in (None, "junk", "", 3, -1, 0, 2.5, True, float("nan"), 10**30, 1j, b"x", ...)
    ),
    *(EvilEqual, EvilHash, EvilRepr, object, list, dict, tuple, set, _endless, _deep),
    *(lambda: [EvilRepr()], lambda: {"a": None}, lambda: (i for i in range(3)), lambda: {1, 2}),
    *(lambda: print, lambda: torch.float32, lambda: P, lambda: I, lambda: slice(None)),
    *(lambda: torch.tensor(1), lambda: torch.ones(2, 2), lambda: np.ones(3), lambda: "tp" * 1000),
    *(lambda: "a\0b", lambda: np.int64(3), lambda: range(10**12), lambda: partial(print)),
    *(lambda: Mesh, lambda: torch.ones(2, device="meta"), lambda: Path("a\0")),
    *(lambda: Fraction(1, 2), lambda: Sub, lambda: nn.LazyLinear(3), lambda: MagicMock()),
    *(lambda: torch.jit.script(nn.ReLU()), lambda: np),
    *(lambda: P("zz"), lambda: ("a", ("b",)), lambda: tuple(range(5000)), lambda: nn.Linear(2, 2)),
)
"""Makes what no argument can be, or only some."""


def junk(draw: Draw) -> Any:
    return draw.choice(JUNK)()


ODD: Final[tuple[Callable[[Tensor], Any], ...]] = (
    lambda x: x.to("meta"),
    lambda x: x.to_sparse(),
    lambda x: x.to_sparse_csr(),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    lambda x: x.to_mkldnn(),
    lambda x: x.as_subclass(Sub),
    lambda x: x.to_sparse_bsr((2, 2)),
    lambda x: x.to(torch.complex32),
    lambda x: nn.Parameter(x),
    lambda x: torch.complex(x, x).conj(),
    lambda x: torch._neg_view(x),
    lambda x: torch.ones(()).expand(x.shape),
    lambda x: x.requires_grad_() * 2,
    lambda x: torch.tensor(3.0),
    lambda x: x.numpy(),
    lambda x: x.tolist(),
)
"""Tensors that are not as others, from a matrix."""

DTYPES: Final = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64),
    *(torch.uint8, torch.uint16, torch.float8_e5m2, torch.float8_e8m0fnu),
)


def operand(draw: Draw) -> Any:
    shape = [draw.choice((0, 1, 2, 4, 6, 12)) for _ in range(draw.choice((0, 1, 2, 2, 3)))]
    x = torch.ones(shape)
    if draw.random() < 0.3:
        return draw.choice(ODD)(torch.randn(4, 4))
    return junk(draw) if draw.random() < 0.1 else x.to(draw.choice(DTYPES))


def some_mesh(draw: Draw) -> Mesh:
    shape = draw.choice(((1,), (2,), (3,), (2, 2)))
    names = ("a", "b")[: len(shape)]
    simulate: Any = draw.choice(("auto", "vmap", "ranks"))
    return sm.make_mesh(shape, names, kind="simulated", simulate=simulate)


def or_junk(draw: Draw, value: Any, chance: float = 0.4) -> Any:
    return junk(draw) if draw.random() < chance else value


def spec(draw: Draw) -> Any:
    """A spec, right or wrong, or none at all."""
    known: tuple[Any, ...] = (None, "a", ("a", "b"), "zz", ())
    entries = [draw.choice(known) for _ in range(draw.choice((0, 1, 2)))]
    keyword = draw.choice(("partial", "replicate", "invariant"))
    typed: dict[str, Any] = {keyword: draw.choice(({"a"}, "b", {"zz"}))}
    return or_junk(draw, P(*entries, **(typed if draw.random() < 0.2 else {})), 0.2)


def sine(x: Any) -> Tensor:
    return torch.sin(x)


def body(draw: Draw) -> Callable[..., Any]:
    """A body that calls one function, with junk in some places."""
    axis, dim = or_junk(draw, "a", 0.3), or_junk(draw, draw.choice((0, 1)), 0.3)
    src, dst = (or_junk(draw, draw.choice((I, R, V, Partial, S(0))), 0.3) for _ in range(2))
    other, pairs = junk(draw), or_junk(draw, [(0, 0)])
    specs = [spec(draw), spec(draw)]
    chosen: tuple[Callable[[Any], Any], ...] = (
        lambda x: x * 1,
        lambda x: other,
        lambda x: x.add_(1),
        lambda x: sm.all_reduce(x, axis, dst=dst, op=or_junk(draw, "max")),
        lambda x: sm.all_reduce(x, axis, dst=dst, comm_dtype=other),
        lambda x: sm.all_gather(x, axis, dim=dim, dst=dst),
        lambda x: sm.all_gather(x, axis, dst=dst, sizes=other),
        lambda x: sm.reduce_scatter(x, axis, dim=dim, op=or_junk(draw, "mean")),
        lambda x: sm.all_to_all(x, axis, split_dim=dim, concat_dim=0),
        lambda x: sm.ppermute(x, axis, pairs),
        lambda x: sm.shift(x, axis, other),
        lambda x: sm.broadcast(x, axis, other, dst=dst),
        lambda x: sm.convert(x, axis, src=src, dst=dst, dim=dim),
        lambda x: sm.reinterpret(x, axis, src=src, dst=dst),
        lambda x: sm.redistribute(x, axis, src=src, dst=dst),
        lambda x: sm.reshard(x, *specs),
        lambda x: x * sm.axis_index(axis),
        lambda x: x * sm.axis_size(axis),
        lambda x: (sm.typeof(other), x)[1],
        lambda x: sm.assert_type(x, other),
        lambda x: sm.checkpoint(or_junk(draw, sine), x),
        lambda x: sm.local_region(or_junk(draw, sine), other, specs[0])(x),
        lambda x: sm.shard_map(sine, in_specs=specs[0], out_specs=P(), axis_names=other)(x),
        lambda x: lax.psum(x, axis, axis_index_groups=other),
        lambda x: lax.all_gather(x, axis, axis=dim),
        lambda x: lax.pshuffle(x, axis, pairs),
        lambda x: lax.pcast(x, axis, to=dst),
        lambda x: draw.choice((all_gather_matmul, matmul_reduce_scatter))(x, x, axis),
        lambda x: matmul_all_reduce(x, x, axis, dst=dst),
    )
    return draw.choice(chosen)


def mapped_call(draw: Draw) -> Call:
    """A shard_map with junk in some of its arguments, and a call of it."""
    mesh, f, x = some_mesh(draw), body(draw), operand(draw)
    in_specs, out_specs = spec(draw), spec(draw)
    check = or_junk(draw, draw.choice((True, True, False, "global")), 0.05)
    arguments = {"mesh": or_junk(draw, mesh, 0.05), "axis_names": or_junk(draw, None, 0.1)}
    wrap = draw.choice((_plainly, _plainly, _twice, _grad, _named, _endlessly))

    def call() -> object:
        mapped = sm.shard_map(f, in_specs=in_specs, out_specs=out_specs, check=check, **arguments)
        return wrap(mapped, x)

    return call


def _plainly(mapped: Callable[..., Any], x: Any) -> Any:
    return mapped(x)


def _twice(mapped: Callable[..., Any], x: Any) -> Any:
    return mapped(x, x)


def _named(mapped: Callable[..., Any], x: Any) -> Any:
    return mapped(zzz=x)


def _endlessly(mapped: Callable[..., Any], x: Any) -> Any:
    return mapped([x, _endless()])


def _grad(mapped: Callable[..., Any], x: Any) -> Any:
    if isinstance(x, Tensor) and x.layout == torch.strided and x.is_floating_point():
        x = x.detach().requires_grad_()
    return mapped(x)


def outer_call(draw: Draw) -> Call:
    """One of the functions that are called outside of bodies, with junk."""
    mesh, x, one, two = some_mesh(draw), operand(draw), junk(draw), junk(draw)
    on, where = or_junk(draw, mesh), or_junk(draw, P("a"))
    good = sm.shard_map(sine, mesh=mesh, in_specs=P(), out_specs=P())
    given = or_junk(draw, good)
    linear = nn.Linear(4, 4)
    style = sm.ColwiseParallel()
    chosen: tuple[Call, ...] = (
        lambda: sm.make_mesh(one, or_junk(draw, ("a",)), kind="simulated"),
        lambda: sm.make_mesh((2,), one, kind="simulated", simulate=or_junk(draw, "vmap")),
        lambda: sm.make_mesh((2,), ("a",), kind=one, device=two),
        lambda: sm.make_mesh((2,), ("a",), kind="simulated", device=one),
        lambda: sm.device_put(x, on, where),
        lambda: sm.from_local(x, on, where),
        lambda: sm.full(x),
        lambda: sm.visualize_sharding(x, mesh=on, spec=where),
        lambda: sm.explain(given, x),
        lambda: sm.trace(given, x),
        lambda: sm.check_program(given, x),
        lambda: sm.validate_rule(one, x),
        lambda: sm.register_rule(one, two),
        lambda: P(one, two),
        lambda: sm.ShapeDtype(one, two),
        lambda: sm.functional(one),
        lambda: sm.functional(linear)[1](one, x),
        lambda: sm.ColwiseParallel(input_layouts=one),
        lambda: sm.SequenceParallel(sequence_dim=one),
        lambda: sm.PrepareModuleInput(input_layouts=one, desired_input_layouts=two),
        lambda: sm.PrepareModuleInput(input_kwarg_layouts=one),
        lambda: sm.PrepareModuleOutput(output_layouts=one, desired_output_layouts=two),
        lambda: sm.parallelize(or_junk(draw, linear), on, one),
        lambda: sm.parallelize(linear, mesh, style, axis=one, check=or_junk(draw, "local")),
        lambda: sm.parallelize(linear, mesh, {}, axis="a", in_specs=one, out_specs=two)(x),
        lambda: sm.loss_parallel(one, axis=two).__enter__(),
    )
    return draw.choice(chosen)


def any_call(draw: Draw) -> Call:
    return (mapped_call if draw.random() < 0.7 else outer_call)(draw)


def internal_errors(seeds: range, choose: Callable[[Draw], Call] = any_call) -> Iterator[str]:
    """Runs the calls, and tells of each error that is neither this package's nor the body's."""
    for seed in seeds:
        draw = Draw(seed)
        try:
            with warnings.catch_warnings(), limited():
                warnings.simplefilter("ignore")
                choose(draw)()
        except sm.ShardMapError:
            continue
        except Exception as error:
            if not _is_of_body(error):
                place = extract_tb(error.__traceback__)[-1]
                where = f"{place.filename}:{place.lineno}"
                yield f"seed {seed}: {type(error).__name__} at {where}: {str(error)[:200]}"


@contextmanager
def limited(seconds: float = 20.0, num_bytes: int = 4 << 30) -> Iterator[None]:
    """Raises TimeoutError after so much processor time, and MemoryError for that much memory."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"the call takes over {seconds} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, limits = signal.signal(signal.SIGVTALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _is_of_body(error: Exception) -> bool:
    """Returns whether an operation of a body or of this file failed, no function of ours."""
    frames = [(frame.filename, frame.name) for frame in extract_tb(error.__traceback__)]
    bodies = (str(Path(__file__).parent), _MODULES)
    last = max(i for i, (file, _) in enumerate(frames) if file.startswith(bodies))
    below = {name for file, name in frames[last + 1 :] if file.startswith(_PACKAGE)}
    return below <= _INTERPRETATION


_ROOT: Final = Path(__file__).parents[2]
_PACKAGE: Final = tuple(f"{_ROOT}/{name}/" for name in ("shardmap_torch", "ops", "kernels"))
_MODULES: Final = str(Path(nn.__file__).parent)
"""File with the forwards of the modules that are parallelized here."""

_INTERPRETATION: Final = frozenset({"__torch_function__", "__torch_dispatch__", "_call", "_apply"})
"""Functions that run torch's operations on stand-ins, and pass its errors on."""
