"""Programs in which one rank does something else, each a function of a kit and of who is odd."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    all_gather,
    all_reduce,
    device_put,
    full,
    make_mesh,
    ppermute,
    shard_map,
)
from shardmap_torch.saving import save

X = torch.arange(32.0).reshape(8, 4)

BAD = Path(tempfile.gettempdir()) / f"shardmap_torch-bad-data-{os.getpid()}"
SAVED = Path(tempfile.gettempdir()) / f"shardmap_torch-saved-{os.getppid()}"  # of all ranks


class Kit:
    """Functions on a mesh, all of them called once, so that they are known."""

    def __init__(self, mesh: Mesh, odd: bool) -> None:
        self.mesh, self.odd, self.flag = mesh, odd, False
        self.axes: Any = mesh.axis_names
        axis = mesh.axis_names[-1]
        self.unused: Any = device_put(X, mesh, P(self.axes)) * 1
        self.sum = self.map(lambda x: all_reduce(x.sum(0), self.axes, dst=I))
        self.double = self.map(lambda x: all_reduce((2 * x).sum(0), self.axes, dst=I))
        self.gather = self.map(lambda x: all_gather(x, self.axes, dst=I))
        self.squares = self.map(lambda x: all_reduce(x.square().sum(), self.axes, dst=I))
        specs = P(), P(self.axes)
        self.weighted = self.map(
            lambda w, x: all_reduce((w * x).sum(), self.axes, dst=I), in_specs=specs
        )
        self.gated = self.map(
            lambda w, x: all_reduce((w.sin() * x).sum(0), self.axes, dst=I), in_specs=specs
        )
        self.shifted = self.map(lambda x: ppermute(x, axis, [(0, 1)]), out=P(self.axes))
        self.flagged = self.map(self._flagged)
        self.failing = self.map(self._failing)
        self.failing_late = self.map(self._failing_late)
        for known in (self.sum, self.double, self.gather, self.squares, self.shifted):
            known(X)
        for known in (self.flagged, self.failing, self.failing_late):
            known(X)
        self.sum(torch.ones(16, 4))
        self.gather(torch.ones(16, 4))
        for name in ("weighted", "gated"):
            self.leaf(name).sum().backward()

    def map(self, body: Callable[..., Any], out: Any = None, **options: Any) -> Any:
        specs = {"in_specs": P(self.axes), "out_specs": P() if out is None else out, **options}
        return shard_map(body, mesh=self.mesh, **specs)

    def compiled(self, *functions: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
        return [torch.compile(f, backend="eager") for f in functions]

    def leaf(self, function: str = "weighted") -> Tensor:
        """A result whose backward communicates."""
        w = torch.ones(4, requires_grad=True)
        y: Tensor = getattr(self, function)(w, X)
        return y

    def _flagged(self, x: Tensor) -> Tensor:
        y = all_reduce(x.sum(0), self.axes, dst=I)
        return all_reduce(x.sum(0), self.axes, dst=I) if self.flag else y

    def _failing(self, x: Tensor) -> Tensor:
        if BAD.exists():  # which no check of the code can see
            raise ValueError("the data is bad")
        return all_reduce(x.sum(0), self.axes, dst=I)

    def _failing_late(self, x: Tensor) -> Tensor:
        y = all_reduce(x.sum(0), self.axes, dst=I)
        if BAD.exists():  # which no check of the code can see
            raise ValueError("the data is bad")
        return y + all_reduce(x.mean(0), self.axes, dst=I)


@contextmanager
def bad_data(k: Kit) -> Iterator[None]:
    """Makes what the body of the odd rank reads bad."""
    if k.odd:
        BAD.touch()
    try:
        yield
    finally:
        BAD.unlink(missing_ok=True)


def other_order(k: Kit) -> None:
    for known in (k.double, k.sum) if k.odd else (k.sum, k.double):
        known(X)


def left_out(k: Kit) -> None:
    if not k.odd:
        k.sum(X)
    k.double(X)


def other_known_shape(k: Kit) -> None:
    k.sum(torch.ones(16 if k.odd else 8, 4))


def other_gather_size(k: Kit) -> None:
    k.gather(torch.ones(16 if k.odd else 8, 4))


def other_new_shape(k: Kit) -> None:
    k.sum(torch.ones(24 if k.odd else 32, 4))


def other_in_specs(k: Kit) -> None:
    spec = P(None, k.axes) if k.odd else P(k.axes)
    k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I), in_specs=spec)(X)


def other_out_specs(k: Kit) -> None:
    k.map(lambda x: x * 1, out=P(None, k.axes) if k.odd else P(k.axes))(X)


def other_static(k: Kit) -> None:
    specs = (P(k.axes), None)
    f = k.map(lambda x, n: all_reduce((x * n).sum(), k.axes, dst=I), in_specs=specs)
    f(X, 3 if k.odd else 2)


def other_literal(k: Kit) -> None:
    n = 3.0 if k.odd else 2.0
    k.map(lambda x: all_reduce((x * n).sum(), k.axes, dst=I))(X)


def unchecked_on_one(k: Kit) -> None:
    k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I, src="P"), check=not k.odd)(X)


def unchecked_other_order(k: Kit) -> None:
    f, g = (
        k.map(lambda x, n=n: all_reduce(x.sum() * n, k.axes, dst=I, src="P"), check=False)
        for n in (1.0, 2.0)
    )
    f.__name__ = g.__name__ = "f"
    for known in (f, g):
        known(X if not k.odd else X[:4])


def unchecked_other_operator(k: Kit) -> None:
    op: Any = "max" if k.odd else "min"
    f = k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I, op=op), check=False)
    for _ in range(2):  # an error of the next call
        f(X)


def unchecked_other_comm_dtype(k: Kit) -> None:
    dtype = torch.bfloat16 if k.odd else torch.float32
    f = lambda x: all_reduce(x.sum(0), k.axes, dst=I, src="P", comm_dtype=dtype)  # noqa: E731
    k.map(f, check=False)(X)


def unchecked_other_size(k: Kit) -> None:
    n = 2 if k.odd else 4
    k.map(lambda x: all_reduce(x.sum(0)[:n], k.axes, dst=I, src="P"), check=False)(X)


def unchecked_other_function(k: Kit) -> None:
    one = k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I, src="P"), check=False)
    two = k.map(lambda x: all_reduce(x.prod(), k.axes, dst=I, src="P"), check=False)
    for f in (two, one) if k.odd else (one, two):
        f(X)


def autocast_on_one(k: Kit) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=k.odd):
        k.map(lambda x: all_reduce((x @ x.mT).sum(), k.axes, dst=I))(X)


def backward_left_out(k: Kit) -> None:
    y = k.leaf()
    if not k.odd:
        y.sum().backward()
    k.double(X)
    k.sum(X)


def backward_left_out_before_a_new_function(k: Kit) -> None:
    y = k.leaf()
    if not k.odd:
        y.sum().backward()
    k.map(lambda x: all_reduce(x.cos().sum(), k.axes, dst=I))(X)


def backward_of_another(k: Kit) -> None:
    one, two = k.leaf("weighted"), k.leaf("gated")
    (two if k.odd else one).sum().backward()
    k.sum(X)


def backward_in_place_of_a_forward(k: Kit) -> None:
    y = k.leaf()
    if k.odd:
        y.sum().backward()
    else:
        k.double(X)
    k.sum(X)


def error_in_a_body(k: Kit) -> None:
    with bad_data(k):
        k.failing(X)
    k.sum(X)


def error_before_a_first_use(k: Kit) -> None:
    if k.odd:
        raise ValueError("the data is bad")
    k.sum(k.unused)


def error_between_collectives(k: Kit) -> None:
    with bad_data(k):
        k.failing_late(X)
    k.sum(X)


def error_outside_that_is_caught(k: Kit) -> None:
    if not k.odd:
        k.sum(X)
    k.double(X)
    k.sum(X)


def hidden_flag(k: Kit) -> None:
    k.flag = k.odd
    k.flagged(X)
    k.sum(X)


def other_permutation(k: Kit) -> None:
    axis = k.mesh.axis_names[-1]
    pairs = [(1, 0)] if k.odd else [(0, 1)]
    k.map(lambda x: ppermute(x, axis, pairs), out=P(k.axes))(X)


def other_reduction(k: Kit) -> None:
    op: Any = "max" if k.odd else "sum"
    k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I, op=op))(X)


def other_collective(k: Kit) -> None:
    if k.odd:
        k.gather(X)
    else:
        k.sum(X)


def other_axis_order(k: Kit) -> None:
    axes = tuple(reversed(k.axes)) if k.odd else k.axes
    k.map(lambda x: all_gather(x, axes, dst=I).sum(), in_specs=P(k.axes))(X)


def other_mesh(k: Kit) -> None:
    make_mesh((4, 1) if k.odd else (1, 4), ("a", "b"))


def other_axis_names(k: Kit) -> None:
    make_mesh((4,), ("a",) if k.odd else ("b",))


def wrong_mesh_on_one(k: Kit) -> None:
    make_mesh((3,) if k.odd else (4,), ("a",))


def rejected_on_one(k: Kit) -> None:
    k.map(lambda x: x * 1 if k.odd else all_reduce(x, k.axes, dst=I))(X)


def arguments_do_not_match_on_one(k: Kit) -> None:
    k.sum(torch.ones(7 if k.odd else 8, 4))


def returns_early(k: Kit) -> None:
    if k.odd:
        raise RuntimeError("left")
    k.sum(X)


def loop_ends_early(k: Kit) -> None:
    for _ in range(3 if k.odd else 5):
        k.sum(X)
    k.gather(X)


def known_everywhere_but_on_one(k: Kit) -> None:
    f = k.map(lambda x: all_reduce(x.sin().sum(), k.axes, dst=I))
    g = k.map(lambda x: all_reduce(x.sin().sum() * 1.5, k.axes, dst=I))
    (g if k.odd else f)(X)


def other_values_later(k: Kit) -> None:
    k.sum(X + k.odd)


def other_batch_order(k: Kit) -> None:
    for x in (X, X.flip(0)) if k.odd else (X.flip(0), X):
        k.sum(x)


def an_update_left_out(k: Kit) -> None:
    w = torch.ones(4)
    for step in range(3):
        k.weighted(w, X)
        w = w if k.odd and step == 0 else w * 0.9


def one_number_of_many(k: Kit) -> None:
    x = torch.ones(8, 5000)
    if k.odd:
        x[3, 1234] += 1e-3
    k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I))(x)


def unchecked_other_values(k: Kit) -> None:
    f = k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I, src="P"), check=False)
    f(X)
    f(X + k.odd)


def replayed_other_values(k: Kit) -> None:
    f = k.map(lambda x: all_reduce(x.sum(), k.axes, dst=I), replay=True)
    for step in range(4):
        f(X + step + (k.odd and step == 3))


def a_copy_of_a_shard_differs(k: Kit) -> None:
    w: Any = device_put(torch.ones(4), k.mesh, P(), as_dtensor=True)
    w.to_local().add_(float(k.odd))
    k.weighted(w, X)


def _stale(k: Kit) -> Any:
    """A DTensor, sharded over the last axis of two, of which the odd rank has a stale copy."""
    spec = P(k.axes[-1]) if len(k.axes) > 1 else P()
    w: Any = device_put(torch.ones(4), k.mesh, spec, as_dtensor=True)
    w.to_local().add_(float(k.odd))
    return w


def full_of_a_stale_copy(k: Kit) -> None:
    full(_stale(k))


def placing_of_a_stale_copy(k: Kit) -> None:
    device_put(_stale(k), k.mesh, P())


def saving_of_a_stale_copy(k: Kit) -> None:
    save({"w": _stale(k)}, SAVED, 1)


def saving_of_one_number_of_many(k: Kit) -> None:
    x = torch.ones(9000).index_fill(0, torch.tensor(4321), 1 + k.odd)
    save({"x": x}, SAVED, 1)


def placed_in_another_order(k: Kit) -> None:
    one, two = [device_put(x, k.mesh, P(k.axes)) for x in (X, X.flip(0))]
    for x in (two, one) if k.odd else (one, two):
        k.sum(x)


def a_result_of_an_earlier_call(k: Kit) -> None:
    step, w = k.map(lambda w: w * 0.9, out=P(k.axes)), device_put(X, k.mesh, P(k.axes))
    for at in range(3):
        new = step(w)
        w = w if k.odd and at == 1 else new


def another_of_two_that_torch_made(k: Kit) -> None:
    one, two = [device_put(x, k.mesh, P(k.axes)) * 2 for x in (X, X.flip(0))]
    for x in (one, two, two if k.odd else one):  # each is known from its first use on
        k.sum(x)


def saving_of_another(k: Kit) -> None:
    one, two = [device_put(x, k.mesh, P(k.axes)) for x in (X, X.flip(0))]
    save({"x": two if k.odd else one}, SAVED, 1)


def a_dtensor_on_one(k: Kit) -> None:
    x = device_put(X, k.mesh, P(k.axes))
    k.gather(x if k.odd else X)


def compiled_other_order(k: Kit) -> None:
    one, two = k.compiled(k.sum, k.double)
    for f in (one, two, *((two, one) if k.odd else (one, two))):
        f(X)


def compiled_within_left_out(k: Kit) -> None:
    (f,) = k.compiled(lambda x: k.sum(x.sin()) + 1)
    f(X)
    if not k.odd:
        f(X)
    k.double(X)


def compiled_other_values(k: Kit) -> None:
    (f,) = k.compiled(k.sum)
    f(X)
    f(X + k.odd)


def other_placing(k: Kit) -> None:
    device_put(X, k.mesh, P(None, k.axes) if k.odd else P(k.axes))


def full_of_another(k: Kit) -> None:
    one, two = k.map(lambda x: x * 2, out=P(k.axes))(X), k.map(lambda x: x, out=P(k.axes))(X)
    full(two if k.odd else one)


CASES: Mapping[str, Callable[[Kit], None]] = {
    case.__name__.replace("_", " "): case
    for case in list(globals().values())
    if getattr(case, "__module__", "") == __name__ and not isinstance(case, type)
    if case not in (bad_data, _stale)
}
