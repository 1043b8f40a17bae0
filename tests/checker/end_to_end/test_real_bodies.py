"""Bodies that users write, accepted as they are, and equal to one device on ranks.

What is refused though it is right stands at the end, with the way to write it that is accepted.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    check_program,
    checkpoint,
    convert,
    make_mesh,
    ppermute,
    reduce_scatter,
    shard_map,
    shift,
)

LINE = make_mesh((4,), ("tp",), kind="simulated", simulate="ranks")
GRID = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks")


def numbers(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def several(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)


def assert_right(
    body: Callable[..., Any],
    one_device: Callable[..., Any],
    *args: Tensor,
    in_specs: Any,
    out_specs: Any,
    mesh: Any = LINE,
) -> None:
    """Accepted, and equal to one device, with the gradients of every argument that has one."""
    mapped = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    check_program(mapped, *args)
    actual, expected = several(mapped(*args)), several(one_device(*args))
    torch.testing.assert_close(actual, expected)
    leaves = [x for x in args if x.requires_grad]
    smooth = [y for y in expected if y.requires_grad]
    if not smooth:
        return
    weights = [torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape) for y in smooth]
    torch.testing.assert_close(
        torch.autograd.grad([y for y in actual if y.requires_grad], leaves, weights),
        torch.autograd.grad(smooth, leaves, weights),
    )


# -------------------------------------------------------------------------------- experts


def test_experts_with_an_all_to_all_each_way_are_right() -> None:
    """Each token goes to the rank of its expert and back, weighed by its gate."""

    def one(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for part in range(4):  # each rank fills its own slots
            rows = slice(2 * part, 2 * part + 2)
            out[rows] = routed(x[rows], gate, lambda e, sent: torch.tanh(sent @ w[e]))
        return out

    def routed(x: Tensor, gate: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
        scores = torch.softmax(x @ gate, -1)
        top, which = scores.max(-1)
        place = functional.one_hot(which, 4).to(x.dtype)
        sent = torch.einsum("te,td->etd", place, x)
        done = torch.stack([expert(e, sent[e]) for e in range(4)])
        return torch.einsum("te,etd->td", place * top[:, None], done)

    def body(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        scores = torch.softmax(x @ gate, -1)
        top, which = scores.max(-1)
        place = functional.one_hot(which, 4).to(x.dtype)
        sent = torch.einsum("te,td->etd", place, x)
        here = all_to_all(sent, "tp", split_dim=0, concat_dim=1)
        done = torch.tanh(here @ w)
        back = all_to_all(done, "tp", split_dim=1, concat_dim=0)
        return torch.einsum("te,etd->td", place * top[:, None], back)

    x, gate, w = numbers(8, 5), numbers(5, 4), numbers(4, 5, 5)
    assert_right(body, one, x, gate, w, in_specs=(P("tp"), P(), P("tp")), out_specs=P("tp"))


def test_a_load_balancing_loss_over_all_tokens_is_right() -> None:
    """The share of tokens is counted without a gradient, the mean probability with one."""

    def loss(x: Tensor, gate: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        scores = torch.softmax(x @ gate, -1)
        counts = functional.one_hot(scores.argmax(-1), 4).to(x.dtype)
        return 4 * (mean(counts.mean(0)) * mean(scores.mean(0))).sum()

    def body(x: Tensor, gate: Tensor) -> Tensor:
        return loss(x, gate, lambda m: all_reduce(m, "tp", dst=I, op="mean"))

    def one(x: Tensor, gate: Tensor) -> Tensor:
        return loss(x, gate, lambda m: m)

    assert_right(body, one, numbers(8, 5), numbers(5, 4), in_specs=(P("tp"), P()), out_specs=P())


# ------------------------------------------------------------------------------- attention


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def test_ring_attention_with_a_running_softmax_is_right() -> None:
    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = axis_size("tp")
        top = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
        total, out = torch.zeros(q.shape[:-1], dtype=q.dtype), torch.zeros_like(q)
        for _ in range(n):
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            new = torch.maximum(top, scores.amax(-1).detach())
            weights, old = (scores - new[:, None]).exp(), (top - new).exp()
            total, out = total * old + weights.sum(-1), out * old[:, None] + weights @ v
            top = new
            k, v = (ppermute(x, "tp", [(r, (r + 1) % n) for r in range(n)]) for x in (k, v))
        return out / total[:, None]

    args = numbers(8, 5), numbers(8, 5, seed=1), numbers(8, 5, seed=2)
    assert_right(body, attention, *args, in_specs=(P("tp"),) * 3, out_specs=P("tp"))


def test_causal_ring_attention_masks_by_the_place_in_the_whole_sequence() -> None:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        return torch.softmax((q @ k.mT).masked_fill(~mask, -math.inf), -1) @ v

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, n = axis_index("tp"), axis_size("tp")
        rows = rank * 2 + torch.arange(2)
        blocks, values = [], []
        for step in range(n):
            columns = (rank - step).remainder(n) * 2 + torch.arange(2)
            blocks.append((q @ k.mT).masked_fill(rows[:, None] < columns, -math.inf))
            values.append(v)
            k, v = shift((k, v), "tp", 1)
        return torch.softmax(torch.cat(blocks, 1), -1) @ torch.cat(values)

    args = numbers(8, 5), numbers(8, 5, seed=1), numbers(8, 5, seed=2)
    assert_right(body, one, *args, in_specs=(P("tp"),) * 3, out_specs=P("tp"))


def test_sequence_to_heads_by_all_to_all_is_right() -> None:
    """Ulysses: tokens are sharded outside of attention, heads inside."""

    def heads(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(0)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def body(qkv: Tensor) -> Tensor:
        inside = all_to_all(qkv, "tp", split_dim=1, concat_dim=2)
        return all_to_all(heads(inside), "tp", split_dim=1, concat_dim=0)

    spec, out = P(None, None, "tp"), P(None, "tp")
    assert_right(body, heads, numbers(3, 4, 8, 5), in_specs=(spec,), out_specs=out)


def test_attention_with_heads_cut_and_a_row_parallel_projection_is_right() -> None:
    def split(x: Tensor, w: Tensor) -> Tensor:
        rows: Tensor = (x @ w).unflatten(-1, (-1, 3))
        return rows.transpose(0, 1)

    def one(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(split(x, wq), split(x, wk), split(x, wv))
        return x + y.transpose(0, 1).flatten(1) @ wo

    def body(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
        h = convert(x, "tp", src=I, dst=R)
        y = functional.scaled_dot_product_attention(split(h, wq), split(h, wk), split(h, wv))
        return x + all_reduce(y.transpose(0, 1).flatten(1) @ wo, "tp", dst=I)

    args = numbers(6, 5), *(numbers(5, 12, seed=s) for s in range(3)), numbers(12, 5)
    column = P(None, "tp")
    specs = (P(), column, column, column, P("tp"))
    assert_right(body, one, *args, in_specs=specs, out_specs=P())


# -------------------------------------------------------------------------------- pipeline


def test_a_pipeline_whose_stages_are_recomputed_is_right() -> None:
    def one(x: Tensor, w: Tensor) -> Tensor:
        for layer in w:
            x = torch.tanh(x @ layer)
        return x

    def body(x: Tensor, w: Tensor) -> Tensor:
        n, stage = axis_size("tp"), axis_index("tp")
        state, done = torch.zeros_like(x[0]), []
        for tick in range(x.shape[0] + n - 1):
            fed = torch.where(stage == 0, x[min(tick, x.shape[0] - 1)], state)
            out = checkpoint(lambda h: torch.tanh(h @ w[0]), fed)
            done.append(out)
            state = shift(out, "tp", 1, wrap=False)
        return broadcast(torch.stack(done[n - 1 :]), "tp", n - 1, dst=I)

    assert_right(
        body, one, numbers(3, 2, 4), numbers(4, 4, 4), in_specs=(P(), P("tp")), out_specs=P()
    )


def test_a_pipeline_s_loss_on_its_last_stage_is_right() -> None:
    """Every stage computes the loss, and all but the last are masked before the sum."""

    def one(x: Tensor, w: Tensor) -> Tensor:
        for layer in w:
            x = torch.tanh(x @ layer)
        return x.square().mean()

    def body(x: Tensor, w: Tensor) -> Tensor:
        n, stage = axis_size("tp"), axis_index("tp")
        state = x
        for tick in range(n):
            state = torch.tanh(torch.where((stage == 0) & (tick == 0), x, state) @ w[0])
            if tick < n - 1:
                state = shift(state, "tp", 1, wrap=False)
        loss = torch.where(stage == n - 1, state.square().mean(), 0.0)
        return all_reduce(loss, "tp", dst=I)

    assert_right(body, one, numbers(3, 4), numbers(4, 4, 4), in_specs=(P(), P("tp")), out_specs=P())


# ------------------------------------------------------------------------------ vocabulary


def vocabulary_parallel(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of logits whose last dim is sharded, as Megatron-LM computes it."""
    width = logits.shape[-1]
    top = all_reduce(logits.amax(-1).detach(), "tp", dst=I, op="max")
    logits = logits - top[:, None]
    total = all_reduce(logits.exp().sum(-1), "tp", dst=I)
    own = targets - axis_index("tp") * width
    inside = (own >= 0) & (own < width)
    picked = logits.gather(1, own.clamp(0, width - 1)[:, None])[:, 0]
    chosen = all_reduce(torch.where(inside, picked, 0.0), "tp", dst=I)
    mean = all_reduce(logits.sum(-1), "tp", dst=I) / (width * axis_size("tp"))
    return total.log() - (1 - smoothing) * chosen - smoothing * mean


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocabulary_parallel_cross_entropy_is_right(smoothing: float) -> None:
    targets = torch.tensor([0, 3, 7, 11, 5])

    def one(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(x @ w, targets, reduction="none", label_smoothing=smoothing)

    def body(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return vocabulary_parallel(convert(x, "tp", src=I, dst=R) @ w, targets, smoothing)

    specs = (P(), P(None, "tp"), P())
    assert_right(body, one, numbers(5, 4), numbers(4, 12), targets, in_specs=specs, out_specs=P())


def test_a_vocabulary_parallel_embedding_with_a_tied_head_is_right() -> None:
    tokens = torch.tensor([0, 3, 7, 11, 5])

    def one(table: Tensor, tokens: Tensor) -> Tensor:
        return torch.tanh(table[tokens]) @ table.mT

    def body(table: Tensor, tokens: Tensor) -> Tensor:
        own = tokens - axis_index("tp") * table.shape[0]
        inside = (own >= 0) & (own < table.shape[0])
        rows = functional.embedding(own.clamp(0, table.shape[0] - 1), table)
        x = all_reduce(torch.where(inside[:, None], rows, 0.0), "tp", dst=R)
        return torch.tanh(x) @ table.mT

    assert_right(
        body, one, numbers(12, 4), tokens, in_specs=(P("tp"), P()), out_specs=P(None, "tp")
    )


def test_greedy_choice_over_a_cut_vocabulary_is_right() -> None:
    """No gradients: the largest logit, and the smallest of the tokens that have it."""

    def one(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).argmax(-1)

    def body(x: Tensor, w: Tensor) -> Tensor:
        best, at = (x @ w).max(-1)
        top = all_reduce(best, "tp", dst=I, op="max")
        token = torch.where(best == top, at + axis_index("tp") * w.shape[1], 1 << 30)
        return all_reduce(token, "tp", dst=I, op="min")

    args = numbers(5, 4, grad=False), numbers(4, 12, grad=False)
    assert_right(body, one, *args, in_specs=(P(), P(None, "tp")), out_specs=P())


def test_top_k_over_a_cut_vocabulary_is_right() -> None:
    def one(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = (x @ w).topk(2)
        return values, tokens

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = (x @ w).topk(2)
        tokens = tokens + axis_index("tp") * w.shape[1]
        values, tokens = all_gather((values, tokens), "tp", dim=1, dst=I)
        values, at = values.topk(2)
        return values, tokens.gather(1, at)

    args = numbers(5, 4, grad=False), numbers(4, 12, grad=False)
    assert_right(body, one, *args, in_specs=(P(), P(None, "tp")), out_specs=(P(), P()))


def test_sampling_with_noise_that_all_ranks_share_is_right() -> None:
    def one(x: Tensor, noise: Tensor) -> Tensor:
        return (torch.log_softmax(x, -1) - noise.log().neg().log()).argmax(-1)

    def body(x: Tensor, noise: Tensor) -> Tensor:
        return one(all_gather(x, "tp", dim=1, dst=I), noise)

    noise = torch.rand(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    args = numbers(5, 12, grad=False), noise
    assert_right(body, one, *args, in_specs=(P(None, "tp"), P()), out_specs=P())


# ----------------------------------------------------------------- sharded state, optimisers


def test_gathered_parameters_with_scattered_gradients_are_right() -> None:
    """FSDP: weights are gathered when they are used, and again in backward."""

    def one(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return (torch.relu(x @ w) @ u).square().mean()

    def body(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        def layer(x: Tensor, w: Tensor) -> Tensor:
            return x @ all_gather(w, "tp", dst=R)

        h = torch.relu(checkpoint(layer, x, w))
        return all_reduce(checkpoint(layer, h, u).square().mean(), "tp", dst=I, op="mean")

    args = numbers(8, 4), numbers(4, 8), numbers(8, 4)
    assert_right(body, one, *args, in_specs=(P("tp"), P("tp"), P("tp")), out_specs=P())


def squared(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).square().sum()


def slope(w: Tensor, x: Tensor) -> Tensor:
    """The gradient of `squared` by the weights."""
    found: Tensor = torch.func.grad(squared)(w, x)
    return found


def test_an_optimiser_whose_state_is_cut_is_right() -> None:
    """ZeRO: gradients are scattered, each rank updates its part, weights are gathered."""

    def adam(w: Tensor, m: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad * grad
        return w - 0.1 * m / (v.sqrt() + 1e-8), m, v

    def one(w: Tensor, m: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return adam(w, m, v, slope(w, x))

    def body(w: Tensor, m: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad = reduce_scatter(slope(w, x), "tp")
        own, m, v = adam(convert(w, "tp", src=I, dst=V, dim=0), m, v, grad)
        return all_gather(own, "tp", dst=I), m, v

    args = [numbers(4, 3, seed=s, grad=False) for s in range(2)]
    args += [args[0].square(), numbers(8, 4, grad=False)]
    specs = (P(), P("tp"), P("tp"), P("tp"))
    assert_right(body, one, *args, in_specs=specs, out_specs=(P(), P("tp"), P("tp")))


def test_clipping_by_the_norm_of_cut_and_whole_gradients_is_right() -> None:
    """The square of a shard is summed over its ranks, that of an unsharded value is not."""

    def loss(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ w + b).square().sum()

    def one(w: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        gw, gb = torch.func.grad(loss, argnums=(0, 1))(w, b, x)
        scale = (1 / (gw.square().sum() + gb.square().sum()).sqrt()).clamp(max=1.0)
        return w - gw * scale, b - gb * scale

    def body(w: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def total(w: Tensor, b: Tensor) -> Tensor:
            h = x @ all_gather(w, "tp", dim=1, dst=I) + b
            return torch.tanh(h).square().sum()

        gw, gb = torch.func.grad(total, argnums=(0, 1))(w, b)
        squares = all_reduce(gw.square().sum(), "tp", dst=I) + gb.square().sum()
        scale = (1 / squares.sqrt()).clamp(max=1.0)
        return w - gw * scale, b - gb * scale

    args = numbers(4, 8, grad=False), numbers(8, grad=False), numbers(6, 4, grad=False)
    specs = (P(None, "tp"), P(), P())
    assert_right(body, one, *args, in_specs=specs, out_specs=(P(None, "tp"), P()))


def test_a_moving_average_of_weights_is_right() -> None:
    def body(w: Tensor, average: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grad = all_reduce(slope(w, x), "tp", dst=I)
        w = w - 0.01 * grad
        return w, torch.lerp(average, w, 0.1)

    def one(w: Tensor, average: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        w = w - 0.01 * slope(w, x)
        return w, torch.lerp(average, w, 0.1)

    args = [numbers(4, 3, grad=False), numbers(4, 3, seed=1, grad=False), numbers(8, 4, grad=False)]
    assert_right(body, one, *args, in_specs=(P(), P(), P("tp")), out_specs=(P(), P()))


def test_gradients_accumulated_before_one_reduction_are_right() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros_like(w)
        for part in x.chunk(2):
            total += slope(w, part)
        return w - 0.1 * all_reduce(total, "tp", dst=I)

    def one(w: Tensor, x: Tensor) -> Tensor:
        return w - 0.1 * slope(w, x)

    args = numbers(4, 3, grad=False), numbers(8, 4, grad=False)
    assert_right(body, one, *args, in_specs=(P(), P("tp")), out_specs=P())


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_torch_s_own_adam_on_reduced_gradients_is_right(how: str) -> None:
    def step(w: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        parameter = w.detach().clone().requires_grad_()
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **{how: True})  # type: ignore[arg-type]
        for _ in range(2):
            parameter.grad = gradient(parameter.detach())
            optimizer.step()
        return parameter.detach()

    def body(w: Tensor, x: Tensor) -> Tensor:
        return step(w, lambda p: all_reduce(slope(p, x), "tp", dst=I))

    def one(w: Tensor, x: Tensor) -> Tensor:
        return step(w, lambda p: slope(p, x))

    args = numbers(4, 3, grad=False), numbers(8, 4, grad=False)
    assert_right(body, one, *args, in_specs=(P(), P("tp")), out_specs=P())


# ---------------------------------------------------------------------- norms and statistics


def test_norms_between_a_gather_and_a_scatter_of_the_sequence_are_right() -> None:
    def one(x: Tensor, scale: Tensor, w: Tensor, u: Tensor) -> Tensor:
        h = functional.rms_norm(x, (4,), scale)
        return x + functional.silu(h @ w) @ u

    def body(x: Tensor, scale: Tensor, w: Tensor, u: Tensor) -> Tensor:
        h = all_gather(functional.rms_norm(x, (4,), scale), "tp", dst=R)
        return x + reduce_scatter(functional.silu(h @ w) @ u, "tp")

    args = numbers(8, 4), numbers(4), numbers(4, 12), numbers(12, 4)
    specs = (P("tp"), P(), P(None, "tp"), P("tp"))
    assert_right(body, one, *args, in_specs=specs, out_specs=P("tp"))


def test_batch_norm_over_all_ranks_is_right() -> None:
    def one(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift, mean

    def body(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        moments = torch.stack([x.mean(0), x.square().mean(0)])
        mean, square = all_reduce(moments, "tp", dst=R, op="mean").unbind(0)
        var = square - mean.square()
        out = (x - mean) / (var + 1e-5).sqrt() * scale + shift
        return out, convert(mean, "tp", src=R, dst=I)

    args = numbers(8, 5), numbers(5), numbers(5, seed=1)
    assert_right(body, one, *args, in_specs=(P("tp"), P(), P()), out_specs=(P("tp"), P()))


def test_a_norm_over_a_dim_that_is_cut_is_right() -> None:
    def one(x: Tensor, scale: Tensor) -> Tensor:
        return functional.rms_norm(x, (8,), scale, eps=1e-6)

    def body(x: Tensor, scale: Tensor) -> Tensor:
        mean = all_reduce(x.square().mean(-1, keepdim=True), "tp", dst=R, op="mean")
        return x * torch.rsqrt(mean + 1e-6) * scale

    spec = P(None, "tp")
    args = numbers(6, 8), numbers(8)
    assert_right(body, one, *args, in_specs=(spec, P("tp")), out_specs=spec)


# --------------------------------------------------------------------------- other models


def test_low_rank_adapters_beside_frozen_weights_are_right() -> None:
    """The inner factor is whole, so its gradient is summed; the frozen weight has none."""

    def one(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x @ w + x @ a @ b

    def body(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        low = convert(x @ a, "tp", src=I, dst=R)
        return x @ w + low @ b

    args = numbers(6, 4, grad=False), numbers(4, 8, grad=False), numbers(4, 2), numbers(2, 8)
    column = P(None, "tp")
    assert_right(body, one, *args, in_specs=(P(), column, P(), column), out_specs=column)


def test_a_contrastive_loss_over_all_ranks_pairs_is_right() -> None:
    def loss(x: Tensor, y: Tensor, all_y: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(x @ all_y.mT, targets, reduction="sum")

    def one(x: Tensor, y: Tensor) -> Tensor:
        x, y = functional.normalize(x, dim=-1), functional.normalize(y, dim=-1)
        n = torch.arange(8)
        return (loss(x, y, y, n) + loss(y, x, x, n)) / 16

    def body(x: Tensor, y: Tensor) -> Tensor:
        x, y = functional.normalize(x, dim=-1), functional.normalize(y, dim=-1)
        n = torch.arange(2) + 2 * axis_index("tp")
        all_x, all_y = all_gather((x, y), "tp", dst=R)
        return all_reduce(loss(x, y, all_y, n) + loss(y, x, all_x, n), "tp", dst=I) / 16

    args = numbers(8, 5), numbers(8, 5, seed=1)
    assert_right(body, one, *args, in_specs=(P("tp"), P("tp")), out_specs=P())


def test_a_masked_mean_over_all_tokens_is_right() -> None:
    """The number of tokens differs between ranks: sums are divided, not means averaged."""
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0], dtype=torch.float64)

    def one(x: Tensor, mask: Tensor) -> Tensor:
        return (x.square().sum(-1) * mask).sum() / mask.sum()

    def body(x: Tensor, mask: Tensor) -> Tensor:
        total = all_reduce((x.square().sum(-1) * mask).sum(), "tp", dst=I)
        return total / all_reduce(mask.sum(), "tp", dst=I)

    assert_right(body, one, numbers(8, 5), mask, in_specs=(P("tp"), P("tp")), out_specs=P())


def test_a_halo_exchange_before_a_convolution_is_right() -> None:
    def one(x: Tensor, w: Tensor) -> Tensor:
        return functional.conv1d(x, w, padding=1)

    def body(x: Tensor, w: Tensor) -> Tensor:
        left = shift(x[..., -1:], "tp", 1, wrap=False)
        right = shift(x[..., :1], "tp", -1, wrap=False)
        return functional.conv1d(torch.cat([left, x, right], -1), w)

    spec = P(None, None, "tp")
    args = numbers(2, 3, 8), numbers(4, 3, 3)
    assert_right(body, one, *args, in_specs=(spec, P()), out_specs=spec)


def test_a_scan_over_a_cut_sequence_is_right() -> None:
    """Each rank scans its own part, and adds what comes before it."""

    def body(x: Tensor) -> Tensor:
        totals = all_gather(x.sum(0), "tp", dst=R, tiled=False)
        before = torch.arange(axis_size("tp")) < axis_index("tp")
        return x.cumsum(0) + (totals * before[:, None]).sum(0)

    assert_right(body, lambda x: x.cumsum(0), numbers(8, 3), in_specs=P("tp"), out_specs=P("tp"))


def test_a_gradient_penalty_taken_inside_is_right() -> None:
    """Second order: the penalty on the input's gradient is differentiated by the weight."""

    def penalty(w: Tensor, x: Tensor) -> Tensor:
        g: Tensor = torch.func.grad(lambda x: torch.tanh(x @ w).square().sum())(x)
        return g.square().sum()

    def body(w: Tensor, x: Tensor) -> Tensor:
        return all_reduce(penalty(w, x), "tp", dst=I)

    args = numbers(4, 3), numbers(8, 4, grad=False)
    assert_right(body, penalty, *args, in_specs=(P(), P("tp")), out_specs=P())


def test_data_and_tensor_parallel_training_with_two_axes_is_right() -> None:
    def loss(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return (torch.relu(x @ w) @ u).square().sum()

    def one(w: Tensor, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        gw, gu = torch.func.grad(lambda w, u: loss(x, w, u), argnums=(0, 1))(w, u)
        return w - 0.1 * gw, u - 0.1 * gu

    def body(w: Tensor, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def local(w: Tensor, u: Tensor) -> Tensor:
            h = torch.relu(convert(x, "tp", src=I, dst=R) @ w)
            return all_reduce(h @ u, "tp", dst=I).square().sum()

        gw, gu = torch.func.grad(local, argnums=(0, 1))(w, u)
        gw, gu = all_reduce((gw, gu), "dp", dst=I)
        return w - 0.1 * gw, u - 0.1 * gu

    args = numbers(4, 6, grad=False), numbers(6, 3, grad=False), numbers(8, 4, grad=False)
    specs = (P(None, "tp"), P("tp"), P("dp"))
    outs = (P(None, "tp"), P("tp"))
    assert_right(body, one, *args, in_specs=specs, out_specs=outs, mesh=GRID)
