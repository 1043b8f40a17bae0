"""Programs in the style of JAX's documentation, as they run under JAX and under shardmap_torch.

Each takes a namespace `n` and returns a function of global arrays and the shapes of its arguments.
`n` has what both libraries call by one name: `shard_map`, `P`, `lax`, `grad`, `value_and_grad`,
`vmap`, `jvp`, `checkpoint`; `xp`, which is jax.numpy or torch; and `mesh(shape, names)`. No program
says a type that JAX does not say.
"""

from collections.abc import Callable
from typing import Any, Final

Program = Callable[[Any], tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]]
PROGRAMS: Final[dict[str, Program]] = {}
STEPS: Final[set[str]] = set()
"""Programs that take their own gradients, and whose results are not differentiated again."""


def program(made: Program) -> Program:
    PROGRAMS[made.__name__] = made
    return made


def step(made: Program) -> Program:
    STEPS.add(made.__name__)
    return program(made)


def mapped(
    n: Any, body: Any, in_specs: Any, out_specs: Any, shape: Any = (4,), names: str = "i"
) -> Any:
    mesh = n.mesh(shape, tuple(names))
    return n.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@program
def blocked_matmul(n: Any) -> Any:
    def body(a: Any, b: Any) -> Any:
        return n.lax.psum(a @ b, "y")

    specs = (n.P("x", "y"), n.P("y", None))
    return mapped(n, body, specs, n.P("x", None), (2, 2), "xy"), ((4, 6), (6, 3))


@program
def scattered_matmul(n: Any) -> Any:
    def body(a: Any, b: Any) -> Any:
        return n.lax.psum_scatter(a @ b, "i", scatter_dimension=0, tiled=True)

    return mapped(n, body, (n.P(None, "i"), n.P("i")), n.P("i")), ((4, 8), (8, 3))


@program
def gathered_matmul(n: Any) -> Any:
    def body(a: Any, b: Any) -> Any:
        return n.lax.all_gather(a, "i", tiled=True) @ b

    return mapped(n, body, (n.P("i"), n.P(None, "i")), n.P(None, "i")), ((4, 3), (3, 8))


@program
def collective_matmul(n: Any) -> Any:
    """A gather that is overlapped with the products of its blocks."""

    def body(a: Any, b: Any) -> Any:
        size, index = n.lax.axis_size("i"), n.lax.axis_index("i")
        rows = a.shape[0]
        pairs = [(r, (r + 1) % size) for r in range(size)]
        out = n.lax.pcast(n.xp.zeros((rows * size, b.shape[1]), dtype=a.dtype), "i", to="varying")
        for k in range(size):
            at = (index - k) % size
            out = n.lax.dynamic_update_slice_in_dim(out, a @ b, at * rows, 0)
            a = n.lax.ppermute(a, "i", pairs)
        return out

    return mapped(n, body, (n.P("i"), n.P(None, "i")), n.P(None, "i")), ((8, 3), (3, 8))


@program
def ring_reduce_scatter(n: Any) -> Any:
    def body(a: Any, b: Any) -> Any:
        size, index = n.lax.axis_size("i"), n.lax.axis_index("i")
        rows = a.shape[0] // size
        pairs = [(r, (r - 1) % size) for r in range(size)]

        def block(k: Any) -> Any:
            at = (index + k) % size
            return n.lax.dynamic_slice_in_dim(a, at * rows, rows, 0) @ b

        total = block(1)
        for k in range(2, size + 1):
            total = n.lax.ppermute(total, "i", pairs) + block(k)
        return total

    return mapped(n, body, (n.P(None, "i"), n.P("i")), n.P("i")), ((8, 4), (4, 3))


def network(n: Any, parameters: Any, x: Any) -> Any:
    for w, b in parameters:
        x = n.xp.tanh(x @ w + b)
    return x


@program
def batch_parallel_loss(n: Any) -> Any:
    def body(w: Any, b: Any, x: Any, y: Any) -> Any:
        return n.lax.pmean(((network(n, [(w, b)], x) - y) ** 2).mean(), "i")

    f = mapped(n, body, (n.P(), n.P(), n.P("i"), n.P("i")), n.P())
    return f, ((3, 2), (2,), (8, 3), (8, 2))


@program
def fully_sharded_loss(n: Any) -> Any:
    def body(w: Any, v: Any, x: Any, y: Any) -> Any:
        w, v = (n.lax.all_gather(each, "i", tiled=True) for each in (w, v))
        return n.lax.pmean((((n.xp.tanh(x @ w) @ v) - y) ** 2).mean(), "i")

    f = mapped(n, body, (n.P("i"),) * 4, n.P())
    return f, ((4, 4), (4, 2), (8, 4), (8, 2))


@program
def fully_sharded_loss_with_checkpoint(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        def layer(w: Any, x: Any) -> Any:
            return n.xp.tanh(x @ n.lax.all_gather(w, "i", tiled=True))

        again = n.checkpoint(layer)
        return n.lax.psum(again(w, again(w, x)).sum(), "i")

    return mapped(n, body, (n.P("i"), n.P("i")), n.P()), ((4, 4), (8, 4))


@program
def tensor_parallel_layers(n: Any) -> Any:
    def body(x: Any, w: Any, v: Any) -> Any:
        hidden = n.xp.tanh(n.lax.psum(x @ w, "i"))
        index, width = n.lax.axis_index("i"), v.shape[0]
        own = n.lax.dynamic_slice_in_dim(hidden, index * width, width, 1)
        return n.lax.psum(own @ v, "i")

    f = mapped(n, body, (n.P(None, "i"), n.P("i"), n.P("i")), n.P())
    return f, ((2, 8), (8, 4), (4, 3))


@program
def tensor_parallel_with_scattered_features(n: Any) -> Any:
    def body(x: Any, w: Any, v: Any) -> Any:
        for each in (w, v):
            x = n.xp.tanh(n.lax.psum_scatter(x @ each, "i", scatter_dimension=1, tiled=True))
        return x

    f = mapped(n, body, (n.P(None, "i"), n.P("i"), n.P("i")), n.P(None, "i"))
    return f, ((2, 8), (8, 4), (4, 4))


@program
def fully_sharded_and_tensor_parallel(n: Any) -> Any:
    def body(w: Any, x: Any, y: Any) -> Any:
        w = n.lax.all_gather(w, "d", tiled=True, axis=1)
        out = n.lax.psum_scatter(x @ w, "t", scatter_dimension=1, tiled=True)
        error = n.lax.psum(((out - y) ** 2).sum(1), "t")
        return n.lax.pmean(error.mean(), "d")

    specs = (n.P("t", "d"), n.P("d", "t"), n.P("d", "t"))
    return mapped(n, body, specs, n.P(), (2, 2), "dt"), ((4, 4), (4, 4), (4, 4))


@program
def pipeline(n: Any) -> Any:
    """Microbatches through stages, each with its own layer; results rest on the last rank."""

    def body(w: Any, x: Any) -> Any:
        stages, stage = n.lax.axis_size("i"), n.lax.axis_index("i")
        count = x.shape[0]
        pairs = [(r, r + 1) for r in range(stages - 1)]
        x = n.lax.pcast(x, "i", to="varying")
        state, out = n.xp.zeros_like(x[0]), n.xp.zeros_like(x)
        for t in range(count + stages - 1):
            fresh = x[t] if t < count else n.xp.zeros_like(x[0])
            state = n.xp.tanh(n.xp.where(stage == 0, fresh, state) @ w[0])
            if t >= stages - 1:
                out = n.lax.dynamic_update_index_in_dim(out, state, t - stages + 1, 0)
            state = n.lax.ppermute(state, "i", pairs)
        return n.lax.psum(n.xp.where(stage == stages - 1, out, n.xp.zeros_like(out)), "i")

    return mapped(n, body, (n.P("i"), n.P()), n.P()), ((4, 3, 3), (5, 2, 3))


@step
def gradient_of_a_cast_parameter_in_the_body(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return n.lax.psum(n.xp.sin(x @ n.lax.pcast(w, "i", to="varying")).sum(), "i")

        value, gradient = n.value_and_grad(loss)(w)
        return value, w - 0.1 * gradient

    return mapped(n, body, (n.P(), n.P("i")), n.P()), ((3,), (8, 3))


@step
def gradient_of_each_rank_that_is_summed_in_the_body(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        own = n.lax.pcast(w, "i", to="varying")
        gradient = n.grad(lambda w: n.xp.sin(x @ w).sum())(own)
        return w - 0.1 * n.lax.psum(gradient, "i")

    return mapped(n, body, (n.P(), n.P("i")), n.P()), ((3,), (8, 3))


@step
def gradient_of_each_rank_that_is_averaged_in_the_body(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        own = n.lax.pcast(w, "i", to="varying")
        value, gradient = n.value_and_grad(lambda w: n.xp.sin(x @ w).mean())(own)
        return n.lax.pmean(value, "i"), w - 0.1 * n.lax.pmean(gradient, "i")

    return mapped(n, body, (n.P(), n.P("i")), n.P()), ((3,), (8, 3))


@step
def gradient_through_gathered_parameters_in_the_body(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return n.lax.psum(n.xp.sin(x @ n.lax.all_gather(w, "i", tiled=True)).sum(), "i")

        value, gradient = n.value_and_grad(loss)(w)
        return value, w - 0.1 * gradient

    return mapped(n, body, (n.P("i"), n.P("i")), (n.P(), n.P("i"))), ((4, 2), (8, 4))


@program
def closed_over_parameters(n: Any) -> Any:
    def f(w: Any, x: Any) -> Any:
        def body(x: Any) -> Any:
            return n.lax.psum(n.xp.sin(x @ w).sum(), "i")

        return mapped(n, body, n.P("i"), n.P())(x)

    return f, ((3,), (8, 3))


@program
def closed_over_parameters_in_a_nested_function(n: Any) -> Any:
    def f(w: Any, b: Any, x: Any) -> Any:
        def layer(x: Any) -> Any:
            return n.xp.tanh(x @ w) + b

        def body(x: Any) -> Any:
            return layer(layer(x))

        return mapped(n, body, n.P("i"), n.P("i"))(x)

    return f, ((3, 3), (3,), (8, 3))


@program
def ring_sum_in_a_loop(n: Any) -> Any:
    def body(x: Any) -> Any:
        size = n.lax.axis_size("i")
        pairs = [(r, (r + 1) % size) for r in range(size)]

        def once(k: Any, carry: Any) -> Any:
            total, moving = carry
            moving = n.lax.ppermute(moving, "i", pairs)
            return total + moving * (k + 1.0), moving

        return n.lax.fori_loop(0, size, once, (n.xp.zeros_like(x), x))[0]

    return mapped(n, body, n.P("i"), n.P("i")), ((8, 3),)


@program
def layers_by_scan(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            x = n.xp.tanh(n.lax.all_gather(x, "i", axis=1, tiled=True) @ w)
            return x, x.sum()

        x, sums = n.lax.scan(layer, x, w)
        return x, n.lax.psum(sums, "i")

    specs = (n.P(None, None, "i"), n.P(None, "i"))
    return mapped(n, body, specs, (n.P(None, "i"), n.P())), ((3, 8, 8), (2, 8))


@program
def scan_with_a_cast_carry(n: Any) -> Any:
    def body(x: Any) -> Any:
        start = n.lax.pcast(n.xp.zeros((3,), dtype=x.dtype), "i", to="varying")

        def once(carry: Any, row: Any) -> Any:
            carry = carry * 0.5 + row
            return carry, carry * carry

        return n.lax.scan(once, start, x, reverse=True)[1]

    return mapped(n, body, n.P("i"), n.P("i")), ((8, 3),)


@program
def branch_on_an_equal_value(n: Any) -> Any:
    def body(x: Any, flag: Any) -> Any:
        return n.lax.cond(
            flag.sum() > 0, lambda x: n.lax.psum(x, "i"), lambda x: n.lax.psum(x * x, "i"), x
        )

    return mapped(n, body, (n.P("i"), n.P()), n.P()), ((4, 3), (2,))


@program
def softmax_over_a_sharded_dim(n: Any) -> Any:
    def body(x: Any) -> Any:
        top = n.lax.pmax(n.lax.stop_gradient(n.max(x, 1)), "i")
        e = n.xp.exp(x - top[:, None])
        return e / n.lax.psum(e.sum(1), "i")[:, None]

    return mapped(n, body, n.P(None, "i"), n.P(None, "i")), ((3, 8),)


@program
def layer_norm_over_a_sharded_dim(n: Any) -> Any:
    def body(x: Any, scale: Any) -> Any:
        mean = n.lax.pmean(x.mean(1), "i")[:, None]
        variance = n.lax.pmean(((x - mean) ** 2).mean(1), "i")[:, None]
        return (x - mean) / n.xp.sqrt(variance + 1e-5) * scale

    return mapped(n, body, (n.P(None, "i"), n.P("i")), n.P(None, "i")), ((3, 8), (8,))


@program
def exchange_of_experts(n: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        x = n.lax.all_to_all(x, "i", 0, 0, tiled=True)
        x = n.xp.tanh(x @ w[0])
        return n.lax.all_to_all(x, "i", 0, 0, tiled=True)

    return mapped(n, body, (n.P("i"), n.P("i")), n.P("i")), ((16, 3), (4, 3, 3))


@program
def sharded_transpose(n: Any) -> Any:
    def body(x: Any) -> Any:
        return n.lax.all_to_all(x, "i", 1, 0, tiled=True).T

    return mapped(n, body, n.P("i"), n.P("i")), ((8, 12),)


@program
def sum_over_two_axes(n: Any) -> Any:
    def body(x: Any) -> Any:
        return n.lax.psum(n.xp.sin(x).sum(0), ("x", "y"))

    return mapped(n, body, n.P(("x", "y")), n.P(), (2, 2), "xy"), ((8, 3),)


@program
def sums_over_each_of_two_axes(n: Any) -> Any:
    def body(x: Any) -> Any:
        return n.lax.psum(x.sum(1), "y"), n.lax.pmean(x.mean(0), "x")

    specs = (n.P("x"), n.P("y"))
    return mapped(n, body, n.P("x", "y"), specs, (2, 2), "xy"), ((4, 6),)


@program
def halo_exchange(n: Any) -> Any:
    def body(x: Any) -> Any:
        size = n.lax.axis_size("i")
        left = n.lax.ppermute(x[-1:], "i", [(r, r + 1) for r in range(size - 1)])
        right = n.lax.ppermute(x[:1], "i", [(r + 1, r) for r in range(size - 1)])
        x = n.xp.concatenate([left, x, right])
        return x[:-2] - 2 * x[1:-1] + x[2:]

    return mapped(n, body, n.P("i"), n.P("i")), ((8, 3),)


@program
def running_sums_over_shards(n: Any) -> Any:
    def body(x: Any) -> Any:
        totals = n.lax.all_gather(x.sum(0), "i")
        size, index = n.lax.axis_size("i"), n.lax.axis_index("i")
        before = n.xp.where((n.xp.arange(size) < index)[:, None], totals, n.xp.zeros_like(totals))
        return n.xp.cumsum(x, 0) + before.sum(0)

    return mapped(n, body, n.P("i"), n.P("i")), ((8, 3),)


@program
def ring_attention(n: Any) -> Any:
    def body(q: Any, k: Any, v: Any) -> Any:
        size = n.lax.axis_size("i")
        pairs = [(r, (r + 1) % size) for r in range(size)]
        top = n.lax.stop_gradient(n.max(q @ k.T, 1))
        total, norm = n.xp.zeros_like(q), n.xp.zeros_like(top)
        for _ in range(size):
            scores = q @ k.T
            new = n.xp.maximum(top, n.lax.stop_gradient(n.max(scores, 1)))
            weights, old = n.xp.exp(scores - new[:, None]), n.xp.exp(top - new)
            total = total * old[:, None] + weights @ v
            norm, top = norm * old + weights.sum(1), new
            k, v = (n.lax.ppermute(each, "i", pairs) for each in (k, v))
        return total / norm[:, None]

    return mapped(n, body, (n.P("i"),) * 3, n.P("i")), ((8, 3),) * 3


@program
def power_iteration(n: Any) -> Any:
    def body(a: Any, x: Any) -> Any:
        def once(_: Any, x: Any) -> Any:
            y = n.lax.psum(a @ x, "i")
            y = y / n.xp.sqrt((y * y).sum())
            width = a.shape[1]
            return n.lax.dynamic_slice_in_dim(y, n.lax.axis_index("i") * width, width)

        return n.lax.fori_loop(0, 3, once, x)

    return mapped(n, body, (n.P(None, "i"), n.P("i")), n.P("i")), ((8, 8), (8,))


@program
def trees_of_specs(n: Any) -> Any:
    def body(p: Any, x: Any) -> Any:
        hidden = n.xp.tanh(x @ p["w"] + p["b"])
        return {"each": [hidden], "sum": n.lax.psum(hidden.sum(), "i")}

    f = mapped(
        n,
        body,
        ({"w": n.P(None, "i"), "b": n.P("i")}, n.P()),
        {"each": [n.P(None, "i")], "sum": n.P()},
    )
    return lambda w, b, x: f({"w": w, "b": b}, x), ((3, 8), (8,), (2, 3))


@program
def mapped_under_vmap(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return n.lax.psum(n.xp.sin(x * w).sum(), "i")

    f = mapped(n, body, (n.P(), n.P("i")), n.P())
    return n.vmap(f, (None, 0)), ((3,), (5, 8, 3))


@program
def vmap_with_a_collective_inside(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return n.vmap(lambda row: n.lax.psum(n.xp.sin(row @ w), "i"))(x)

    return mapped(n, body, (n.P("i"), n.P(None, "i")), n.P()), ((8,), (5, 8))


@program
def per_example_gradients_inside(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        own = n.lax.pcast(w, "i", to="varying")
        return n.vmap(n.grad(lambda w, row: n.xp.sin(row @ w)), (None, 0))(own, x)

    return mapped(n, body, (n.P(), n.P("i")), n.P("i")), ((3,), (8, 3))


@program
def tangents_through_a_map(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return n.lax.psum(n.xp.sin(x @ w), "i")

    f = mapped(n, body, (n.P("i"), n.P(None, "i")), n.P())
    return lambda w, x, s, t: n.jvp(f, (w, x), (s, t)), ((8,), (5, 8), (8,), (5, 8))


@program
def gradient_of_a_gradient(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return n.lax.psum(n.xp.sin(x @ w).sum(), "i")

    f = mapped(n, body, (n.P(), n.P("i")), n.P())
    return lambda w, x: n.grad(f)(w, x), ((3,), (8, 3))


@program
def invariant_gather_and_sizes(n: Any) -> Any:
    def body(x: Any) -> Any:
        every = n.lax.all_gather(x, "i", to="invarying", tiled=True)
        return (every * every).sum(0) / n.lax.psum(1, "i") + n.lax.axis_size("i")

    return mapped(n, body, n.P("i"), n.P()), ((8, 3),)


@program
def shuffled_and_swapped(n: Any) -> Any:
    def body(x: Any) -> Any:
        return n.lax.pshuffle(x, "i", [3, 1, 0, 2]) * n.lax.pswapaxes(x, "i", 0)

    return mapped(n, body, n.P(None, "i"), n.P(None, "i")), ((4, 4),)


@step
def loss_with_layers_that_normalize(n: Any) -> Any:
    """Sums that ranks use in different ways, in a gradient that is taken in the body."""

    def body(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            z = x @ n.lax.all_gather(w, "i", axis=1, tiled=True)
            z = n.lax.psum_scatter(z, "i", scatter_dimension=1, tiled=True)
            z = z - n.lax.pmean(z.mean(1), "i")[:, None]
            z = z / n.xp.sqrt(n.lax.pmean((z * z).mean(1), "i")[:, None] + 1e-5)
            return n.lax.psum(((z - y) ** 2).sum(), "i")

        value, gradient = n.value_and_grad(loss)(w)
        return value, w - 0.1 * gradient

    specs = (n.P(None, "i"),) * 3
    return mapped(n, body, specs, (n.P(), n.P(None, "i"))), ((3, 8), (5, 12), (5, 8))


@program
def a_sum_over_two_axes_that_meets_what_varies(n: Any) -> Any:
    def body(x: Any, s: Any) -> Any:
        total = n.lax.psum(n.xp.sin(x), ("x", "y"))
        return x * total + n.lax.psum(s * x, "y") * s

    specs = (n.P(("x", "y")), n.P("x"))
    return mapped(n, body, specs, n.P(("x", "y")), (2, 2), "xy"), ((8, 3), (4, 3))


@program
def a_gathered_invariant_that_meets_what_varies(n: Any) -> Any:
    def body(x: Any) -> Any:
        every = n.lax.all_gather(n.xp.sin(x), "i", to="invarying", tiled=True)
        return x * every.sum(0), every.sum()

    return mapped(n, body, n.P("i"), (n.P("i"), n.P())), ((8, 3),)


@program
def normalized_layers_in_a_scan(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            x = x - n.lax.pmean(x.mean(1), "i")[:, None]
            return n.xp.tanh(x * w), None

        return n.lax.scan(layer, x, w)[0]

    return mapped(n, body, (n.P(None, "i"), n.P(None, "i")), n.P(None, "i")), ((3, 8), (2, 8))


@program
def sum_of_an_equal_value(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return n.lax.psum(w, "i") * x + n.lax.pmean(w * w, "i")

    return mapped(n, body, (n.P(), n.P("i")), n.P("i")), ((3,), (8, 3))


@step
def a_loop_while_a_counter_is_small(n: Any) -> Any:
    def body(a: Any, x: Any) -> Any:
        def once(carry: Any) -> Any:
            k, x = carry
            return k + 1, n.xp.tanh(n.lax.psum_scatter(a @ x, "i", tiled=True)) + 0.1 * k

        return n.lax.while_loop(lambda carry: carry[0] < 3, once, (0, x))[1]

    return mapped(n, body, (n.P(None, "i"), n.P("i")), n.P("i")), ((8, 8), (8, 2))


@program
def rows_by_map(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        def row(x: Any) -> Any:
            return n.lax.psum(n.xp.sin(x * w).sum(), "i"), x * x

        return n.lax.map(row, x)

    specs = (n.P(), n.P(None, "i"))
    return mapped(n, body, (n.P("i"), n.P(None, "i")), specs), ((8,), (3, 8))


@program
def a_branch_of_three_that_all_ranks_take(n: Any) -> Any:
    def body(x: Any, k: Any) -> Any:
        branches = [
            lambda x: n.lax.psum(x, "i"),
            lambda x: n.lax.pmean(n.xp.sin(x), "i"),
            lambda x: n.lax.psum(x * x, "i"),
        ]
        return n.lax.switch((k.sum() > 0) * 5, branches, x)

    return mapped(n, body, (n.P("i"), n.P()), n.P()), ((4, 3), (2,))


@program
def a_branch_for_each_rank(n: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        w = n.lax.pcast(w, "i", to="varying")  # in a branch JAX's sum of its gradient would hang
        branches = [n.xp.sin, lambda x: x * x, lambda x: x @ w]
        return n.lax.switch(n.lax.axis_index("i"), branches, x)

    return mapped(n, body, (n.P("i"), n.P()), n.P("i")), ((4, 3), (3, 3))


@program
def a_first_and_a_last_rank(n: Any) -> Any:
    def body(x: Any) -> Any:
        first = n.lax.axis_index("i") == 0
        x = n.lax.cond(first, lambda x: 2 * x, lambda x: x, x)
        return n.lax.psum(n.lax.cond(x.sum() > 0, n.xp.sin, n.xp.cos, x), "i")

    return mapped(n, body, n.P("i"), n.P()), ((8, 3),)


@program
def boxes_at_each_ranks_place(n: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        at = n.lax.axis_index("i")
        own = n.lax.dynamic_slice(w, (at * 2, at, at * 0), (2, 3, 4))
        starts = (at * 2, at * 0 - 3, at * 0)
        placed = n.lax.dynamic_update_slice(n.xp.zeros_like(w), own * x, starts)
        return n.lax.psum(placed, "i")

    return mapped(n, body, (n.P(), n.P("i")), n.P()), ((8, 6, 4), (8, 3, 4))


@program
def a_recurrence_over_shards(n: Any) -> Any:
    """A linear recurrence by a scan in each shard, and one over the shards' last entries."""

    def body(a: Any, b: Any) -> Any:
        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        scales, values = n.lax.associative_scan(combine, (a, b))
        lasts = [n.lax.all_gather(x[-1], "i") for x in (scales, values)]
        _, ends = n.lax.associative_scan(combine, tuple(lasts))
        ends = n.xp.concatenate([n.xp.zeros_like(ends[:1]), ends[:-1]])
        before = n.lax.dynamic_index_in_dim(ends, n.lax.axis_index("i"), 0, keepdims=False)
        return scales * before + values

    return mapped(n, body, (n.P("i"), n.P("i")), n.P("i")), ((12, 3), (12, 3))


@program
def a_scan_from_the_last_entry(n: Any) -> Any:
    def body(x: Any) -> Any:
        sums = n.lax.associative_scan(lambda a, b: a + b, x, reverse=True, axis=1)
        return n.lax.psum(n.xp.sin(sums), "i")

    return mapped(n, body, n.P("i"), n.P()), ((4, 5, 2),)
