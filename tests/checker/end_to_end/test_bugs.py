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
    check_program,
    convert,
    make_mesh,
    reinterpret,
    shard_map,
)
from tests.checker.support.rejections import (
    ABSTRACT,
    B,
    U,
    W,
    X,
    assert_right,
    gradient,
    numbers,
    rejection,
)

pytestmark = pytest.mark.usefixtures("repairs")

DATA = numbers(8, 6, grad=False, seed=2)


# ----------------------------------------------------------------- missing backward reductions


def mlp(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return all_reduce(torch.relu(x @ w) @ u, "tp", dst=I)


def test_the_reduction_of_an_input_s_gradient_is_inserted_where_its_axis_is_open() -> None:
    specs = (P(), P(None, "tp"), P("tp"))
    assert_right(mlp, lambda x, w, u: torch.relu(x @ w) @ u, X, W, U, in_specs=specs, out_specs=P())


def test_a_missing_backward_all_reduce_with_an_identical_forward_is_rejected() -> None:
    specs = (P(invariant={"tp"}), P(None, "tp"), P("tp"))
    rejection(mlp, X, W, U, in_specs=specs, out_specs=P())


def test_between_two_layers_the_activation_must_be_made_replicate() -> None:
    def two(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return mlp(mlp(x, w, u), w, u)

    def right(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return mlp(convert(mlp(x, w, u), "tp", src=I, dst=R), w, u)

    def one(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return torch.relu(torch.relu(x @ w) @ u @ w) @ u

    specs = (P(), P(None, "tp"), P("tp"))
    rejection(two, X, W, U, in_specs=specs, out_specs=P())
    assert_right(right, one, X, W, U, in_specs=specs, out_specs=P())


def test_a_norm_weight_in_a_sequence_parallel_region_has_its_gradient_reduced() -> None:
    def body(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, [6], weight)

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, [6], weight)

    assert_right(body, one, X, B, in_specs=(P("tp"), P()), out_specs=P("tp"))
    specs = (P("tp"), P(invariant={"tp"}))
    rejection(body, X, B, in_specs=specs, out_specs=P("tp"))


def test_an_error_of_the_body_s_own_further_down_does_not_hide_what_is_wrong() -> None:
    """With the repair, the body gets as far as a sum of shapes that do not fit."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return x @ w + torch.zeros(3, 3)

    specs = (P(invariant={"tp"}), P(None, "tp"))
    rejection(body, X, W, in_specs=specs, out_specs=P(None, "tp"))


# -------------------------------------------------------------------------- gradients inside


def local_loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().sum()


def test_a_gradient_used_before_its_reduction_is_rejected() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        return w - 0.1 * gradient(local_loss, w, x)

    rejection(step, W.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())


def test_an_optimizer_step_on_partial_gradients_is_rejected() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        parameter = w.detach().clone().requires_grad_()
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        local_loss(parameter, x).backward()
        optimizer.step()
        return parameter.detach()

    rejection(step, W.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())


def test_a_constant_gradient_that_is_not_reduced_is_rejected() -> None:
    """Equal on all ranks, so no comparison of ranks would show that it is too small."""

    def step(b: Tensor, x: Tensor) -> Tensor:
        def loss(b: Tensor) -> Tensor:
            return all_reduce((x + b).sum(), "tp", dst=I)

        return b - gradient(loss, b)

    rejection(step, B.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())


def test_a_constant_gradient_from_a_cotangent_of_the_user_s_is_rejected() -> None:
    def step(b: Tensor, x: Tensor) -> Tensor:
        loss, pull_back, *_ = torch.func.vjp(lambda b: (x + b).sum(), b)
        grads: tuple[Tensor] = pull_back(torch.ones_like(loss))
        return b - grads[0]

    rejection(step, B.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())


# --------------------------------------------------------------------- ranks that part ways


def test_a_shape_that_depends_on_the_rank_s_data_is_rejected() -> None:
    def body(x: Tensor) -> Tensor:
        return x[x > 0][:2].sum()

    rejection(body, DATA, in_specs=P("tp"), out_specs=P())


def test_a_dropout_mask_drawn_by_each_rank_is_no_replicate_value() -> None:
    def body(x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[1]) < 0.5)

    rejection(body, DATA, in_specs=P(), out_specs=P())


# --------------------------------------------------------------------------- memory, closures


def test_writing_a_varying_value_into_a_replicated_buffer_makes_it_varying() -> None:
    def body(x: Tensor) -> Tensor:
        buffer = torch.ones(6, dtype=torch.float64)
        view = buffer[:3]
        view.copy_(x.sum(0)[:3])
        return buffer

    rejection(body, DATA, in_specs=P("tp"), out_specs=P())


def test_writing_through_a_conversion_is_rejected() -> None:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x, "tp", dst=I)
        convert(total, "tp", src=I, dst=R).mul_(axis_index("tp"))
        return total

    rejection(body, DATA, in_specs=P("tp"), out_specs=P())


def test_of_a_module_that_is_closed_over_the_way_to_call_it_is_told() -> None:
    module = torch.nn.Linear(6, 6).double()

    def body(x: Tensor) -> Tensor:
        y: Tensor = module(x)
        return y

    rejection(body, DATA, in_specs=P("tp"), out_specs=P("tp"))


def test_operators_that_call_functions_are_refused() -> None:
    def body(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, lambda a: a, lambda a: -a, (x,))
        return y

    rejection(body, DATA, in_specs=P(), out_specs=P())


def test_tensors_that_are_not_strided_are_refused() -> None:
    rejection(lambda x: x.to_sparse(), DATA, in_specs=P(), out_specs=P())


def test_a_closed_over_parameter_in_a_repeated_computation_is_accepted() -> None:
    def body(x: Tensor) -> Tensor:
        return all_reduce(x, "tp", dst=I) @ W

    check_program(shard_map(body, mesh=ABSTRACT, in_specs=P("tp"), out_specs=P()), DATA)


def test_a_regulariser_on_an_invariant_weight_beside_a_local_loss_is_rejected() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return all_reduce(
            local_loss(convert(w, "tp", src=I, dst=R), x) + w.square().sum(), "tp", dst=I
        )

    rejection(body, W, DATA, in_specs=(P(invariant={"tp"}), P("tp")), out_specs=P())


# ----------------------------------------------------------------------- right, and accepted


def test_clipping_by_the_norm_of_each_rank_s_own_gradient_says_so() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        grad = reinterpret(gradient(local_loss, w, x), "tp", src="P", dst=V)
        norm = all_reduce(grad.square().sum(), "tp", dst=I).sqrt()
        return all_reduce(grad * (1 / norm), "tp", dst=I)

    def one(w: Tensor, x: Tensor) -> Tensor:
        grads = torch.stack([gradient(local_loss, w, part) for part in x.chunk(4)])
        return grads.sum(0) / grads.square().sum().sqrt()

    assert_right(step, one, W.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())


def test_statistics_that_batch_norm_writes_vary_though_its_schema_is_silent() -> None:
    def body(x: Tensor) -> Tensor:
        mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
        torch.nn.functional.batch_norm(x, mean, var, training=True)
        return mean

    rejection(body, DATA, in_specs=P("tp"), out_specs=P())


def test_closed_over_statistics_cannot_be_written_by_batch_norm() -> None:
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)

    def body(x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, var, training=True)

    rejection(body, DATA, in_specs=P("tp"), out_specs=P("tp"))


def test_batch_norm_that_writes_nothing_is_accepted() -> None:
    def body(x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, None, None, training=True)

    def one(x: Tensor) -> Tensor:
        return torch.cat([body(part) for part in x.chunk(4)])

    assert_right(body, one, X, in_specs=P("tp"), out_specs=P("tp"))


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


def test_a_closure_may_be_batched_in_the_body() -> None:
    def body(x: Tensor) -> Tensor:
        f = torch.func.vmap(lambda w: all_reduce((x @ w).sum(), "tp", dst=I))
        y: Tensor = f(W.detach().T)
        return y

    def one(x: Tensor) -> Tensor:
        return (x @ W.detach()).sum(0)

    assert_right(body, one, X, in_specs=P("tp"), out_specs=P())


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
