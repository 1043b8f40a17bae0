"""Under global strictness, backwards and hooks of the user's own are those of one device.

What backwards and hooks compute is drawn by `checker/support/classes`; here is where they stand.
"""

from collections.abc import Callable, Iterable
from functools import partial
from traceback import walk_tb
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional

import shardmap_torch
from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    ShardTypeError,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    grad,
    local_region,
    make_mesh,
    shard_map,
)
from tests.support.golden import told

SIZES: Final = (2, 2)
NAMES: Final = ("dp", "tp")
ABSTRACT: Final = make_mesh(SIZES, NAMES, kind="abstract")
RANKS: Final = make_mesh(SIZES, NAMES, kind="simulated", simulate="ranks")
ONE: Final = make_mesh((1, 1), NAMES, kind="simulated", simulate="ranks")
IN: Final = (P("dp"), P())
X: Final = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
W: Final = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()

Body = Callable[[Tensor, Tensor], Any]


def function(back: Callable[[Any, Tensor], Tensor], base: Any = torch.autograd.Function) -> Any:
    """A Function that is the identity, with that backward."""

    class Own(base):  # type: ignore[misc]
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            """Keeps nothing."""

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return back(ctx, g)

    return Own


def norm_over_ranks(g: Tensor) -> Tensor:
    return all_reduce(g.square().sum(), "dp", dst=R).sqrt()


def with_function(
    back: Callable[[Any, Tensor], Tensor], base: Any = torch.autograd.Function
) -> Body:
    own = function(back, base)
    return lambda x, w: own.apply(x) @ w


def mapped(body: Body, mesh: Any, out: P, check: Any = "global") -> Callable[..., Any]:
    return shard_map(body, mesh=mesh, in_specs=IN, out_specs=out, check=check)


def outcome(f: Callable[..., Any]) -> list[Tensor]:
    """The value and the gradients."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = f(x, w)
    if not y.requires_grad:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, (x, w), torch.linspace(0, 1, y.numel()).view_as(y))]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y, g * x


def test_operands_are_known_that_nothing_but_a_function_uses() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        made: Tensor = Product.apply(x.sin(), x.cos())  # type: ignore[no-untyped-call]  # torch's
        return made @ w

    found, expected = (outcome(mapped(body, mesh, P("dp"))) for mesh in (RANKS, ONE))
    for mine, there in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, there)


def test_a_norm_over_all_ranks_is_accepted_and_right() -> None:
    body = with_function(lambda ctx, g: g / (1 + norm_over_ranks(g)), shardmap_torch.Function)
    found, expected = (outcome(mapped(body, mesh, P("dp"))) for mesh in (RANKS, ONE))
    for mine, there in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, there)


def of_squares(back: Callable[[Tensor, Tensor], Tensor]) -> Body:
    """A sum of squares over the batch, whose backward gets the cotangent of a pending sum."""

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return y.square().sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return back(g, *ctx.saved_tensors)

    apply: Callable[..., Any] = Squares.apply
    return lambda x, w: all_reduce(apply(x @ w), "dp", dst=I)


def hooked(back: Callable[[Tensor, Tensor], Tensor]) -> Body:
    def body(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        y.register_hook(lambda g: back(g, y.detach()))
        return all_reduce(y.square().sum(), "dp", dst=I)

    return body


WAYS: Final = {"Function": of_squares, "hook": hooked}


def by_parts(g: Tensor, y: Tensor) -> Tensor:
    g = torch.stack([g, (g * 2).exp().log()]).mean(0)
    return g.expand_as(y).mul(y)


OF_SUMS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "twice": lambda g, y: g * 2 * y,
    "no linear one": lambda g, y: g.square() * y,
    "in place": lambda g, y: g.clone().mul_(2) * y,
    "copies": by_parts,
    "by the number of all rows": lambda g, y: g * 2 * y / (len(y) * axis_size("dp")),
    "drawn alike": lambda g, y: g * torch.ones(3, dtype=g.dtype)[1] * y,
}


def ways_of(names: Iterable[str], but: str) -> list[tuple[str, str]]:
    """Each by a Function and by a hook, but one that asks for its axis, which hooks cannot do."""
    return [(name, way) for name in names for way in WAYS if (name, way) != (but, "hook")]


@pytest.mark.parametrize(("name", "way"), ways_of(OF_SUMS, "by the number of all rows"))
def test_backwards_of_pending_sums_and_shards_are_proven_by_layouts(name: str, way: str) -> None:
    """The cotangent of a pending sum is equal on all ranks: nothing has to be tried."""
    body, x = WAYS[way](OF_SUMS[name]), X.clone().requires_grad_()
    assert not check_program(mapped(body, ABSTRACT, P()), x, W).tried
    found, expected = (outcome(mapped(body, mesh, P())) for mesh in (RANKS, ONE))
    for mine, there in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, there)


WRONG_OF_SUMS: Final[dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]]] = {
    "rows": (
        lambda g, y: g * 2 * y / y.shape[0],
        r"2 times that value, because of div, whose argument other is 2 on a rank and 4 on one "
        r"device, at test_user_code.py",
    ),
    "entries": (lambda g, y: g * y / y.numel(), "is 8 on a rank and 16 on one device"),
    "a reciprocal": (lambda g, y: (1 / len(y)) * g * y, "is 0.5 on a rank and 0.25 on one"),
    "the cotangent alone": (lambda g, y: g / len(y) * y, "is 2 on a rank and 4 on one device"),
    "a mean of rows": (lambda g, y: g * (y - y.mean(0)), "it is the mean of a rank's part"),
    "each rank's own": (
        lambda g, y: g * axis_index("dp") * y,
        "over 'dp' every rank has a value of its own, from axis_index",
    ),
    "drawn": (lambda g, y: g * torch.rand_like(g) * y, "from rand_like at"),
    "a sum of rows": (lambda g, y: (g * y.sum()) * y, "a pending sum over 'dp'"),
}


@pytest.mark.parametrize(("name", "way"), ways_of(WRONG_OF_SUMS, "each rank's own"))
def test_a_backward_by_a_rank_s_own_numbers_is_told_which(name: str, way: str) -> None:
    back, text = WRONG_OF_SUMS[name]
    with pytest.raises(ShardTypeError, match=text) as caught:
        check_program(mapped(WAYS[way](back), ABSTRACT, P()), X.clone().requires_grad_(), W)
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(caught.value.__traceback__)]
    assert not any(name.endswith("contextlib.py") for name in frames)


def test_a_refusal_names_the_line_and_the_way_out() -> None:
    body = with_function(lambda ctx, g: g / (1 + g.norm()))
    with told(ShardTypeError):
        check_program(mapped(body, ABSTRACT, P("dp")), X.clone().requires_grad_(), W)


BROKEN: Final = "a region is not what it promises: the gradient of x is"


def test_in_a_local_region_the_backward_is_promised_too() -> None:
    own = function(lambda ctx, g: g / g.shape[0])

    def body(x: Tensor, w: Tensor) -> Any:
        apply: Callable[..., Any] = own.apply
        return local_region(apply, in_types=(P("dp"),), out_types=P("dp"))(x) @ w

    with pytest.raises(ShardTypeError, match=BROKEN):
        check_program(mapped(body, ABSTRACT, P("dp")), X.clone().requires_grad_(), W)


@pytest.mark.parametrize("part", [lambda x: x, torch.sin])
def test_no_step_of_a_backward_in_a_checkpoint_has_to_tell(part: Callable[..., Tensor]) -> None:
    """A backward may stop a gradient without an operation, or be that of one device alone."""
    own = function(lambda ctx, g: g if axis_size("dp") == 1 else None)  # type: ignore[arg-type,return-value]
    other = function(lambda ctx, g: 2 * g)

    def stopped(x: Tensor, w: Tensor) -> Any:
        return shardmap_torch.checkpoint(lambda x: own.apply(part(x)) @ w, x)

    def on_one_device(x: Tensor, w: Tensor) -> Any:
        def run(x: Tensor) -> Any:
            return (other.apply(x) if axis_size("dp") == 1 else x.clone()) @ w

        return shardmap_torch.checkpoint(run, x)

    for body in (stopped, on_one_device):
        with pytest.raises(ShardTypeError, match=r"backward of Own runs|the Function Own"):
            check_program(mapped(body, ABSTRACT, P("dp")), X.clone().requires_grad_(), W)


def hooked_again(x: Tensor) -> Tensor:
    """Registers its hook only where a checkpoint runs it again: the first time has no graph."""
    h = x.sin()
    if h.requires_grad:
        h.register_hook(lambda g: g / g.shape[0])
    return h


def test_a_hook_that_is_registered_inside_of_a_checkpoint_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        return shardmap_torch.checkpoint(hooked_again, x) @ w

    def on_one_device(x: Tensor, w: Tensor) -> Any:
        run = hooked_again if axis_size("dp") == 1 else torch.sin
        return shardmap_torch.checkpoint(run, x) @ w

    for each in (body, on_one_device):
        with pytest.raises(
            ShardTypeError, match=r"requires_grad in a checkpoint|one device has ended"
        ):
            check_program(mapped(each, ABSTRACT, P("dp")), X.clone().requires_grad_(), W)
    check_program(mapped(body, ABSTRACT, P("dp")), X, W)  # nothing is differentiated


@pytest.mark.parametrize("rows", [X.shape[0], X.shape[0] // SIZES[0]])
@pytest.mark.parametrize("way", ["hook", "Function"])
def test_a_backward_of_ones_own_in_one_program_only_is_refused(rows: int, way: str) -> None:
    doubled = function(lambda ctx, g: g * 2)

    def body(x: Tensor, w: Tensor) -> Any:
        own = x.shape[0] == rows
        h = doubled.apply(x) if own and way == "Function" else x.clone()
        if own and way == "hook":
            h.register_hook(lambda g: g * 2)
        return h @ w

    with pytest.raises(ShardTypeError, match=r"the ranks come|in one program|what it changes"):
        check_program(mapped(body, ABSTRACT, P("dp")), X.clone().requires_grad_(), W)


def test_nodes_and_hooks_of_modules_are_tried() -> None:
    def node(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        made: Any = y.grad_fn
        made.register_hook(lambda grads, _: grads)
        return y

    def module(x: Tensor, w: Tensor) -> Any:
        layer = torch.nn.Identity()
        layer.register_full_backward_hook(lambda *_: None)
        return layer(x) @ w

    def doubled(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        made: Any = y.grad_fn
        made.register_hook(lambda grads, _: [None if g is None else 2 * g for g in grads])
        return y if axis_size("dp") > 1 else x @ w

    x = X.clone().requires_grad_()
    for body in (node, module):
        assert check_program(mapped(body, ABSTRACT, P("dp")), x, W).tried
    with pytest.raises(ShardTypeError, match="grad_fn is used"):
        check_program(mapped(doubled, ABSTRACT, P("dp")), x, W)


@pytest.mark.parametrize(
    ("value", "is_right"),
    [
        (lambda x: x.shape[0], False),
        (lambda x: 1 / x.shape[0], False),
        (lambda x: f"{x.numel()} numbers", False),
        (lambda x: x.shape[1], True),
        (lambda x: x.shape[0] * axis_size("dp"), True),
        (lambda x: "ready", True),
        (lambda x: float("nan"), True),
    ],
)
def test_a_python_result_is_that_of_one_device(
    value: Callable[[Tensor], Any], is_right: bool
) -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        return x @ w, value(x)

    program = shard_map(body, mesh=ABSTRACT, in_specs=IN, out_specs=(P("dp"), None), check="global")
    if is_right:
        check_program(program, X, W)
    else:
        with pytest.raises(ShardTypeError, match=r"the result out\[1\] is .* on one device"):
            check_program(program, X, W)


def test_counts_of_ids_are_those_of_all_ranks() -> None:
    def body(ids: Tensor, table: Tensor) -> Tensor:
        return functional.embedding(ids, table, scale_grad_by_freq=True)

    ids = torch.tensor([0, 1, 1, 2])
    with pytest.raises(ShardTypeError, match="counts a rank's ids only"):
        check_program(mapped(body, ABSTRACT, P("dp")), ids, W.clone().requires_grad_())
    check_program(mapped(body, ABSTRACT, P("dp")), ids, W)  # nothing is differentiated


def test_inference_mode_takes_the_steps_of_no_grad() -> None:
    """torch takes no composite operator apart there, and few of those have sharding rules."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        q = functional.linear(x, w.T).unflatten(1, (1, 2, 2)).flatten(1, 2)
        return functional.scaled_dot_product_attention(q, q, q)

    with torch.inference_mode():
        found, expected = (mapped(body, m, P("dp"))(X, W) for m in (RANKS, ONE))
        assert found.is_inference()
    assert torch.equal(found, expected)


def test_a_body_may_ask_for_inference_mode() -> None:
    def asks(x: Tensor, w: Tensor) -> Tensor:
        total = x.sum()
        return all_reduce(
            total * len(x) if torch.is_inference_mode_enabled() else total, "dp", dst=I
        )

    def asks_a_tensor(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(x.sum() * (len(x) if x.is_inference() else 1), "dp", dst=I)

    with torch.inference_mode():
        for body, match in (asks, "1/2 times that value"), (asks_a_tensor, r"is_inference\(\)"):
            with pytest.raises(ShardTypeError, match=match):
                mapped(body, RANKS, P())(X, W)


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.tanh()


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        found = x.tanh()
    return found.clone()


@pytest.mark.parametrize("off", [without_grad, inferred])
def test_gradients_are_switched_off_in_a_checkpoint_as_on_one_device(
    off: Callable[[Tensor], Tensor],
) -> None:
    """Its first run records none anywhere; what it runs again is not compared."""

    def on_ranks(x: Tensor) -> Tensor:
        return (off(x) if axis_size("dp") > 1 else x.tanh()) * x

    def body(part: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
        return shardmap_torch.checkpoint(part, x) @ w

    def nested(x: Tensor) -> Tensor:
        """In the first run nothing asks for a checkpoint in it."""
        found: Tensor = shardmap_torch.checkpoint(lambda x: off(x) * x, x)
        return found

    def slope(part: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = grad(lambda x: all_reduce(body(part, x, w).sum(), "dp", dst=I))(x)
        return found

    x = X.clone().requires_grad_()
    for program in (body, slope):
        check_program(mapped(partial(program, nested), ABSTRACT, P("dp")), x, W)
        with pytest.raises(ShardTypeError, match=r"switch of gradients|in one program only"):
            check_program(mapped(partial(program, on_ranks), ABSTRACT, P("dp")), x, W)


def test_gradients_are_switched_off_in_checkpoints_of_all_microbatches() -> None:
    def body(count: int, x: Tensor, w: Tensor) -> Tensor:
        def part(number: int, rows: Tensor) -> Tensor:
            return (without_grad(rows) if number < count else rows.tanh()) * rows

        parts = [
            shardmap_torch.checkpoint(partial(part, number), rows).sum(0)
            for number, rows in enumerate(x.chunk(2))
        ]
        return all_reduce(sum(parts[1:], parts[0]), "dp", dst=I) @ w

    x = X.clone().requires_grad_()
    for count in (0, 2):
        check_program(mapped(partial(body, count), ABSTRACT, P()), x, W)
    with pytest.raises(ShardTypeError, match="split is not"):
        check_program(mapped(partial(body, 1), ABSTRACT, P()), x, W)


def test_a_checkpoint_in_another_runs_as_it_was_checked() -> None:
    def sums(x: Tensor) -> Tensor:
        return all_reduce(x.sin().sum(0), "dp", dst=I)

    def body(x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = shardmap_torch.checkpoint(
            lambda x: shardmap_torch.checkpoint(sums, x) * w[:, 0], x
        )
        return found

    found, expected = (
        torch.func.grad(lambda x, f=f: f(x, W).sum())(X)
        for f in (mapped(body, RANKS, P()), lambda x, w: x.sin().sum(0) * w[:, 0])
    )
    torch.testing.assert_close(found, expected)


PACKS: Final[dict[str, tuple[bool, Callable[..., Any]]]] = {
    "keeps": (True, lambda x: saved_tensors_hooks(Tensor.clone, lambda saved: saved)),
    "of torch": (True, lambda x: save_on_cpu()),
    "a local size": (False, lambda x: saved_tensors_hooks(lambda t: t * len(x), lambda t: t)),
    "a local norm": (False, lambda x: saved_tensors_hooks(lambda t: t, lambda t: t / x.norm())),
}


@pytest.mark.parametrize("name", PACKS)
def test_what_hooks_make_of_saved_tensors_is_tried(name: str) -> None:
    is_right, hooks = PACKS[name]

    def body(x: Tensor, w: Tensor) -> Tensor:
        with hooks(x.detach()):
            return x @ w

    f, w = mapped(body, ABSTRACT, P("dp")), W.clone().requires_grad_()
    if is_right:
        assert bool(check_program(f, X, w).tried) == (name == "keeps")
        return
    with pytest.raises(ShardTypeError, match="saved_tensors_hooks is used"):
        check_program(f, X, w)


class Rounded(Function):
    """A straight-through estimator: its gradient passes what rounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


def test_a_function_is_proven_at_any_size_where_numbers_could_not_decide() -> None:
    rounded: Any = Rounded.apply

    def body(x: Tensor, w: Tensor) -> Tensor:
        for layer in w.unbind(0):
            x = x + rounded(x @ layer)
        return all_reduce(x.square().mean(), "dp", op="mean", dst=I)

    mesh = make_mesh((1024, 2), NAMES, kind="abstract")
    f = mapped(body, mesh, P())
    weights = ShapeDtype((32, 4096, 4096), torch.float32, requires_grad=True)
    verdict = check_program(f, ShapeDtype((4096, 4096), torch.float32), weights)
    assert not verdict.tried
