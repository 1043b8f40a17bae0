"""The bugs that ship in practice, each rejected, beside the right program, which is accepted.

An accepted program is run on ranks that are threads, each with its own autograd graph, and
compared with one device.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    TransformError,
    V,
    all_reduce,
    axis_index,
    make_mesh,
    reinterpret,
    shard_map,
)
from tests.checker.support.rejections import W, X, assert_right, gradient, numbers, rejection

pytestmark = pytest.mark.usefixtures("repairs")

DATA = numbers(8, 6, grad=False, seed=2)


# ----------------------------------------------------------------- missing backward reductions


def test_an_error_of_the_body_s_own_further_down_does_not_hide_what_is_wrong() -> None:
    """With the repair, the body gets as far as a sum of shapes that do not fit."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return x @ w + torch.zeros(3, 3)

    specs = (P(invariant={"tp"}), P(None, "tp"))
    rejection(body, X, W, in_specs=specs, out_specs=P(None, "tp"))


# -------------------------------------------------------------------------- gradients inside


def local_loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().sum()


# --------------------------------------------------------------------- ranks that part ways


# --------------------------------------------------------------------------- memory, closures


def test_writing_a_varying_value_into_a_replicated_buffer_makes_it_varying() -> None:
    def body(x: Tensor) -> Tensor:
        buffer = torch.ones(6, dtype=torch.float64)
        view = buffer[:3]
        view.copy_(x.sum(0)[:3])
        return buffer

    rejection(body, DATA, in_specs=P("tp"), out_specs=P())


def test_operators_that_call_functions_are_refused() -> None:
    def body(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, lambda a: a, lambda a: -a, (x,))
        return y

    rejection(body, DATA, in_specs=P(), out_specs=P())


def test_tensors_that_are_not_strided_are_refused() -> None:
    rejection(lambda x: x.to_sparse(), DATA, in_specs=P(), out_specs=P())


# ----------------------------------------------------------------------- right, and accepted


def test_statistics_that_batch_norm_writes_vary_though_its_schema_is_silent() -> None:
    def body(x: Tensor) -> Tensor:
        mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
        torch.nn.functional.batch_norm(x, mean, var, training=True)
        return mean

    rejection(body, DATA, in_specs=P("tp"), out_specs=P())


LINEAR_AS_A_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix_exp": torch.matrix_exp,
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "segment_reduce": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 3])),
}


@pytest.mark.parametrize("name", LINEAR_AS_A_WHOLE)
def test_a_backward_that_is_linear_as_a_whole_takes_a_sum(name: str) -> None:
    f = LINEAR_AS_A_WHOLE[name]

    def body(x: Tensor) -> Tensor:
        y = f(all_reduce(x.sin(), "tp", dst=R))
        # Its cotangent is a sum over the ranks, each of which uses it in its own way.
        own = reinterpret(y, "tp", src=R, dst=V)
        return all_reduce((own.sin() * (1 + axis_index("tp"))).sum(), "tp", dst=I)

    def one(x: Tensor) -> Tensor:
        return f(x.sin().reshape(4, 4, 4).sum(0)).sin().sum() * 10

    assert_right(body, one, numbers(16, 4), in_specs=P("tp"), out_specs=P())


def test_what_an_outer_vmap_batches_is_an_argument_unless_it_is_hidden() -> None:
    mesh = make_mesh((4,), ("tp",), kind="simulated")
    holder: dict[str, Tensor] = {}

    def scaled(x: Tensor, s: Tensor) -> Tensor:
        return all_reduce((x * s).sum(), "tp", dst=I)

    def closing(s: Tensor) -> Tensor:
        body = shard_map(lambda x: scaled(x, s), mesh=mesh, in_specs=P("tp"), out_specs=P())
        return body(DATA)

    def hiding(s: Tensor) -> Tensor:
        holder["s"] = s
        take = type("Hidden", (), {"__slots__": (), "__call__": lambda self: holder["s"]})()
        body = shard_map(lambda x: scaled(x, take()), mesh=mesh, in_specs=P("tp"), out_specs=P())
        return body(DATA)

    def passing(s: Tensor) -> Tensor:
        return shard_map(scaled, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())(DATA, s)

    scales = torch.arange(3, dtype=torch.float64)
    for f in (passing, closing):
        torch.testing.assert_close(torch.func.vmap(f)(scales), DATA.sum() * scales)
    with pytest.raises(TransformError) as caught:
        torch.func.vmap(hiding)(scales)
    text = str(caught.value)
    head = "<lambda>: the body closes over a tensor, which a torch.func transform outside batches"
    assert text.startswith(head)
    assert text.endswith("Pass it as an argument, with a spec of its own.")


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_torch_s_own_adam_on_reduced_gradients_is_right(how: str) -> None:
    def trained(w: Tensor, slope: Callable[[Tensor], Tensor]) -> Tensor:
        parameter = w.detach().clone().requires_grad_()
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **{how: True})  # type: ignore[arg-type]
        for _ in range(2):
            parameter.grad = slope(parameter.detach())
            optimizer.step()
        return parameter.detach()

    def body(w: Tensor, x: Tensor) -> Tensor:
        return trained(w, lambda p: all_reduce(gradient(local_loss, p, x), "tp", dst=I))

    def one(w: Tensor, x: Tensor) -> Tensor:
        return trained(w, lambda p: gradient(local_loss, p, x))

    assert_right(body, one, W.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())
