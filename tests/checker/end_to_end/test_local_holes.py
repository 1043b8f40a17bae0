"""Programs that local strictness has once accepted, and that compute something else: all rejected.

Beside them what is right and looks like it, which is accepted and compared with one device.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_reduce,
    checkpoint,
    convert,
    make_mesh,
    reinterpret,
    shard_map,
)
from shardmap_torch.collectives.autograd import TypedFunction
from tests.checker.support.branching import program_paths
from tests.checker.support.rejections import RANKS, assert_right, numbers, rejection
from tests.support.golden import hold_own

X, W = numbers(8, 6), numbers(6)
DATA = X.detach()
BOTH: dict[str, Any] = {"in_specs": (P(), P("tp")), "out_specs": P()}
ONE: dict[str, Any] = {"in_specs": P("tp"), "out_specs": P()}

Layer = Callable[[Tensor], tuple[Tensor, Tensor]]


# ------------------------------------------------------------------ backwards inside of backwards


class Recomputed(TypedFunction):
    """Forgets what it has computed, and computes it again, as users write it themselves."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        ctx.save_for_backward(w)
        return layer(w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (w,) = ctx.saved_tensors
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            found = torch.autograd.grad(ctx.layer(w), w, grads)
        return None, found[0]


class Reentrant(Recomputed):
    """Differentiates by a backward that nobody sees start."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (w,) = ctx.saved_tensors
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(w), grads)
        assert w.grad is not None
        return None, w.grad


AGAIN: dict[str, Callable[[Layer, Tensor], Any]] = {
    "checkpoint": checkpoint,
    "a Function": Recomputed.apply,
    "a reentrant Function": Reentrant.apply,
}


@pytest.mark.parametrize("spec", [P(), P(invariant={"tp"}), P(replicate={"tp"})])
@pytest.mark.parametrize("again", AGAIN)
def test_what_is_needed_both_ways_is_so_when_it_is_computed_again(again: str, spec: P) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        whole, local = AGAIN[again](lambda w: (w * 3.0, (x * w.tanh()).sum()), w)
        total: Tensor = (whole * 1.5).sum() + 2 * all_reduce(local, "tp", dst=I)
        return total

    hold_own(rejection(body, W, X, in_specs=(spec, P("tp")), out_specs=P()))


@pytest.mark.parametrize("again", AGAIN)
def test_what_is_needed_one_way_is_right_when_it_is_computed_again(again: str) -> None:
    def layer(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (w * 3.0 * x).sum(), (x * w.tanh()).sum()

    def body(w: Tensor, x: Tensor) -> Tensor:
        a, b = AGAIN[again](lambda w: layer(w, x), w)
        total: Tensor = all_reduce(1.5 * a + b, "tp", dst=I)
        return total

    def one(w: Tensor, x: Tensor) -> Tensor:
        a, b = layer(w, x)
        return 1.5 * a + b

    assert_right(body, one, W, DATA, **BOTH)


class Buffered(TypedFunction):
    """Adds up the cotangents of two results in a buffer."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        return w * 1.0, w * 1.0

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        buffer = torch.zeros_like(a)
        buffer.add_(a * 1.0)
        return buffer + b


def test_a_cotangent_in_a_buffer_is_one() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        a, b = Buffered.apply(w)
        total: Tensor = a.sum() + all_reduce((b * x).sum(), "tp", dst=I)
        return total

    assert "is needed as I and as R over 'tp'" in rejection(body, W, X, **BOTH)


class BySign(TypedFunction):
    """A gradient of which only the sign counts."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        return w + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad > 0).to(grad.dtype), None


def test_what_is_made_of_the_sign_of_a_cotangent_has_its_type() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        y = BySign.apply(w, x.detach().sum(0))
        addend = reinterpret(x.sum(0), "tp", src=V, dst=Partial)
        total: Tensor = all_reduce(addend + y, "tp", dst=I).sum()
        return total

    assert "gives it a gradient that is R" in rejection(body, W, X, **BOTH)


class Constant(TypedFunction):
    """A Function whose gradient does not depend on the cotangent, as for an auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        return w.sum() + x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ones(6, dtype=torch.float64), None


def test_a_constant_gradient_is_all_of_it_for_i_and_told_apart_by_one_device_alone_for_k() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        y: Tensor = all_reduce(Constant.apply(w, x), "tp", dst=I)
        return y

    text = rejection(body, W, DATA, **BOTH)
    assert "an operand of Constant is K and its backward gives it a gradient that is K" in text
    mapped = shard_map(body, mesh=RANKS, in_specs=(P(invariant={"tp"}), P("tp")), out_specs=P())
    ones = torch.ones(6, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(mapped(W, DATA), W)[0], ones)
    text = rejection(body, W, DATA, in_specs=(P(replicate={"tp"}), P("tp")), out_specs=P())
    assert "an operand of Constant is R and its backward gives it a gradient that is K" in text


class Auxiliary(TypedFunction):
    """Adds the gradient of a loss that only its backward knows."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        w, x = ctx.saved_tensors
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            torch.autograd.backward(w.sum() + x.detach().sum())
        assert w.grad is not None
        return grad + w.grad, None


def test_the_gradient_of_a_varying_loss_that_starts_in_a_backward_is_each_rank_s_own() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        y: Tensor = Auxiliary.apply(w, x).sum()
        return y

    ones = torch.ones(6, dtype=torch.float64)
    mapped = shard_map(body, mesh=RANKS, **BOTH)
    torch.testing.assert_close(torch.autograd.grad(mapped(W, DATA), W)[0], (1 + 4) * ones)
    hold_own(rejection(body, W, DATA, in_specs=(P(invariant={"tp"}), P("tp")), out_specs=P()))


class InPlace(TypedFunction):
    """Writes into its operand, which then varies."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        w.mul_(x.sum())
        ctx.mark_dirty(w)
        ctx.save_for_backward(x)
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x.sum(), None


def test_a_function_that_writes_into_its_operand_is_typed_by_what_it_writes() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        y: Tensor = all_reduce(InPlace.apply(w * 1.0, x).sum(), "tp", dst=I)
        return y

    assert_right(body, lambda w, x: w.sum() * x.sum(), W, DATA, **BOTH)
    text = rejection(body, W, DATA, in_specs=(P(invariant={"tp"}), P("tp")), out_specs=P())
    assert "an operand of InPlace is I and its backward gives it a gradient that is V" in text


# --------------------------------------------------------------------- errors that a body catches


def caught_operation(w: Tensor, x: Tensor) -> Tensor:
    try:
        y = (w * x).sum()  # w is I
    except ShardTypeError:
        y = x.sum()
    return all_reduce(y, "tp", dst=I)


def caught_collective(w: Tensor, x: Tensor) -> Tensor:
    y = all_reduce(x.sum(), "tp", dst=I) + 0 * w.sum()
    with suppress(Exception):
        y = all_reduce(y, "tp", dst=I)
    return y


def caught_array(w: Tensor, x: Tensor) -> Tensor:
    try:
        total: Tensor = (w * x.detach().numpy().sum()).sum()
        return total
    except Exception:
        return w.sum()


class Catching(TypedFunction):
    """A Function whose backward catches its own errors."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return w * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, x = ctx.saved_tensors
        with suppress(Exception):
            return grad * x.sum(0), None
        return grad, None


def caught_in_backward(w: Tensor, x: Tensor) -> Tensor:
    y: Tensor = Catching.apply(w, x)
    return y.sum() + 0 * all_reduce(x.sum(), "tp", dst=I)


CATCHING = (
    caught_operation,
    caught_collective,
    caught_array,
    caught_in_backward,
)


@pytest.mark.parametrize("body", CATCHING)
def test_an_error_of_the_checker_that_the_body_catches_is_one(body: Callable[..., Any]) -> None:
    assert rejection(body, W, X, in_specs=(P(invariant={"tp"}), P("tp")), out_specs=P())


# --------------------------------------------------------------------------------- shared memory


@pytest.mark.parametrize("src", [R, I])
def test_writing_into_a_slice_that_a_conversion_made_is_rejected(src: Any) -> None:
    def body(x: Tensor) -> Tensor:
        whole = all_reduce(x.sum(0), "tp", dst=src)
        part = convert(whole.repeat(4), "tp", src=src, dst=V, dim=0)
        part.mul_(2)
        return whole

    assert "shares its memory with another value through convert" in rejection(body, DATA, **ONE)


def overlapping(x: Tensor) -> Tensor:
    y = x.flatten()[:4].clone()
    y.as_strided((2, 2), (1, 1)).fill_(1.0)  # the first three entries
    return y


def overlapping_out(x: Tensor) -> Tensor:
    y = x.flatten()[:4].clone()
    torch.add(torch.ones(2, 2), 1, out=y.as_strided((2, 2), (1, 1)).double())
    torch.add(torch.ones(2, 2).double(), 1, out=y.as_strided((2, 2), (1, 1)))
    return y


def twice_in_a_list(x: Tensor) -> Tensor:
    y = torch.ones_like(x)
    torch._foreach_add_([y, y], [x, torch.ones_like(x)])
    return y


@pytest.mark.parametrize("body", [overlapping, overlapping_out, twice_in_a_list])
def test_a_write_that_leaves_entries_as_they_were_leaves_their_type(body: Any) -> None:
    assert "varies over it" in rejection(body, DATA, **ONE)


def test_a_write_to_every_entry_gives_them_a_type_in_any_order_of_dims() -> None:
    def body(x: Tensor) -> Tensor:
        y = x.clone()
        y.t().unsqueeze(1).fill_(1.0)
        return y

    assert_right(body, lambda x: torch.ones_like(x[:2]), DATA, **ONE)


KEPT, PARAMETER = torch.ones(6), nn.Parameter(torch.ones(6))


def data_of_a_value(x: Tensor) -> Tensor:
    y = torch.ones(2, 6, dtype=x.dtype)
    y.data = x
    return y


def data_of_a_closed_over_tensor(x: Tensor) -> Tensor:
    KEPT.data = x.sum(0)
    return all_reduce(x, "tp", dst=I)


def grad_of_a_closed_over_tensor(x: Tensor) -> Tensor:
    PARAMETER.grad = x.sum(0)
    return all_reduce(x, "tp", dst=I)


def grad_that_is_read(x: Tensor) -> Tensor:
    return all_reduce(x, "tp", dst=I) if PARAMETER.grad is None else x


FIELDS: dict[Callable[[Tensor], Tensor], str] = {
    data_of_a_value: ".data of a tensor is set at test_local_holes.py",
    data_of_a_closed_over_tensor: ".data of a tensor is set at test_local_holes.py",
    grad_of_a_closed_over_tensor: ".grad of a closed-over tensor is used at test_local_holes.py",
    grad_that_is_read: ".grad of a closed-over tensor is used at test_local_holes.py",
}


@pytest.mark.parametrize("body", FIELDS)
def test_fields_of_tensors_that_no_operation_writes_are_left_alone(body: Any) -> None:
    text = rejection(body, DATA, **ONE)
    assert FIELDS[body] in text
    assert "\nFix: " in text
    assert type(KEPT) is Tensor
    torch.testing.assert_close(KEPT, torch.ones(6))
    assert PARAMETER.grad is None


class Rotary(nn.Module):
    """Fills a cache when it is first called."""

    places: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.places is None:
            self.places = torch.arange(6, dtype=x.dtype)
        return x * self.places


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
def test_a_cache_of_functools_that_the_body_fills_is_told(simulate: Any) -> None:
    @lru_cache
    def places() -> Tensor:
        return torch.arange(6, dtype=DATA.dtype)

    def body(x: Tensor) -> Tensor:
        return all_reduce(x, "tp", dst=I)[:2].sum(0) * places()

    mesh = make_mesh((4,), ("tp",), kind="simulated", simulate=simulate)
    mapped = shard_map(body, mesh=mesh, **ONE)
    for _ in range(2):
        with pytest.raises(ShardTypeError) as caught:
            mapped(DATA)
        assert "a tensor that has no data: it was kept when the body was" in str(caught.value)
        assert "Fix: compute it in each call, without functools.cache or what else keeps it" in str(
            caught.value
        )
    places.cache_clear()
    places()
    assert mapped(DATA).shape == (6,)


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
def test_an_attribute_that_the_body_fills_is_each_rank_s_own(simulate: Any) -> None:
    """A check leaves nothing in it, and each rank starts without."""
    rotate = Rotary()

    def body(x: Tensor) -> Tensor:
        y: Tensor = rotate(x)
        return all_reduce(y.sum(0), "tp", dst=I)

    mesh = make_mesh((4,), ("tp",), kind="simulated", simulate=simulate)
    mapped = shard_map(body, mesh=mesh, **ONE)
    expected = Rotary()(DATA).sum(0)
    for _ in range(3):
        torch.testing.assert_close(mapped(DATA), expected)
    assert type(rotate.places) in (Tensor, type(None))


# ------------------------------------------------------------------------------- Python's values


def test_a_bool_is_a_branch_when_it_is_taken() -> None:
    def body(x: Tensor) -> Tensor:
        positive = (all_reduce(x.sum(), "tp", dst=I) > 0).item()
        program_paths = {True: x, False: 2 * x}
        return program_paths[bool(positive)] if positive is not True else x * int(x[0, 0] < 9)

    hold_own(rejection(body, DATA, in_specs=P("tp"), out_specs=P("tp")))


def test_a_list_of_a_tensor_is_of_its_numbers() -> None:
    table = torch.tensor([1.0, -1.0])

    def body(x: Tensor) -> Tensor:
        first, second = table.tolist()
        scale = torch.tensor([[first, 1.0], [second, 2.0]], dtype=x.dtype).sum()
        return x * scale if first > second else x * 2

    def one(x: Tensor) -> Tensor:
        return x * 3.0

    specs: dict[str, Any] = {"in_specs": P(), "out_specs": P()}
    assert program_paths(body, DATA[0], **specs) == 2
    assert_right(body, one, DATA[0], **specs)


@pytest.mark.parametrize("take", [Tensor.numpy, Tensor.__array__, Tensor.__dlpack__])
@pytest.mark.parametrize("made", [True, False])
def test_arrays_of_tensors_are_refused(take: Callable[[Tensor], Any], made: bool) -> None:
    table = torch.ones(2)

    def body(x: Tensor) -> Tensor:
        take(x.detach() if made else table)
        return x

    hold_own(rejection(body, DATA, in_specs=P("tp"), out_specs=P("tp")))
