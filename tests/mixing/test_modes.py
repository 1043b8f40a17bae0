"""Plain operands, draws, numbers and operations without a rule are those of the global value."""

import re
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, Mesh, P, ShardMapError, V, convert, device_put, full, shard_map
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.support.pool import Gloo

SHAPE, AXES = (2, 2), ("dp", "tp")
TABLE, Y = random((8,), 5), random((4, 3, 8), 6)
Body = Callable[[Tensor], Tensor]


def varying(x: Tensor) -> Tensor:
    return convert(x, "tp", src=I, dst=V, dim=2)


def forward_over_reverse(x: Tensor) -> Tensor:
    grad = torch.func.grad(lambda y: (y.sin() @ y.mT).square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, once a process
        tangent: Tensor = torch.func.jvp(grad, (x,), (Y,))[1]
    return tangent


def written_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y += x.flip(0)
    torch.ops.aten.add_.Tensor(y, x)
    return torch.relu_(y.clamp_(-1, 1).mul_(Y))


def vector_times_matrix(x: Tensor) -> Tensor:
    row = TABLE @ x.flatten(0, 1).mT  # [12]
    assert row.shape == (12,)
    return x * row[:8]


def last_of_each(x: Tensor) -> Tensor:
    halves = x.unflatten(-1, (2, 4)).unbind(-2)
    return torch.stack(halves, -2).flatten(-2) * x.select(-2, 1).unsqueeze(1) + x.narrow(-1, 0, 1)


BODIES: dict[str, Body] = {
    "plain operand": lambda x: x * TABLE + torch.arange(3.0).unsqueeze(1),
    "number": lambda x: x * x.sum().item() + x.max().item(),
    "mean as a number": lambda x: x * x.mean().item(),
    "branch": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "comparison": lambda x: x * 2 if torch.equal(x[:2], x[2:]) else x * 3,
    "no rule": lambda x: x.cumsum(0).roll(1, 0).flip(0),
    "order": lambda x: x.sort(0).values + x.argmax(0),
    "parts": lambda x: torch.cat([x.chunk(4)[3], x.narrow(0, 1, 2), x[torch.tensor([3, 0])]]),
    "items": lambda x: torch.stack([row.sum() for row in x]),
    "norms": lambda x: torch.linalg.vector_norm(x) + x.std() + x.logsumexp((0, 1, 2)),
    "losses": lambda x: functional.cross_entropy(x.flatten(0, 1), torch.arange(12) % 8),
    "written in place": written_in_place,
    "own memory": lambda x: x.new_zeros(4, 3, 8).add_(x),
    "vmap": lambda x: torch.func.vmap(lambda row: row.sin() * row.sum())(x),
    "gradient": lambda x: torch.func.grad(lambda y: y.sin().square().sum())(x),
    "second": lambda x: torch.func.grad(
        lambda y: torch.func.grad(lambda z: z.sin().square().sum())(y).square().sum()
    )(x),
    "forward over reverse": forward_over_reverse,
}
DRAWS: dict[str, Body] = {
    "dropout": lambda x: functional.dropout(varying(x), 0.5),
    "like": lambda x: varying(x) * torch.rand_like(varying(x)),
    "from the value": lambda x: torch.bernoulli(torch.sigmoid(varying(x))),
    "plain": lambda x: varying(x) * torch.rand(4),
}


def are_global(mesh: Mesh) -> None:
    """Compares with the same call on a plain value, which is global over the automatic axis."""
    x = random((4, 3, 8), 9)
    for spec, bodies in ((P(), BODIES), (P(None, None, "tp"), DRAWS)):
        for name, body in bodies.items():
            f = shard_map(body, mesh=mesh, in_specs=P(), out_specs=spec, axis_names={"tp"})
            torch.manual_seed(0)
            expected = full(f(x.clone()))
            torch.manual_seed(0)
            found = full(f(device_put(x, mesh, P("dp"))))
            note = partial("{}: {}".format, name)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=note)


def attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


WITHOUT_RIGHT_RULES: dict[str, Body] = {
    "mean of a loss": lambda x: functional.mse_loss(x, torch.ones_like(x)),
    "mean of another": lambda x: functional.huber_loss(x, torch.zeros_like(x)),
    "determinant": lambda x: torch.linalg.det(x.flatten(1)[:, :4]),
    "any": lambda x: (x > 1).any().double() + x.sum(),
    "extrema": lambda x: x.amin() + x.amax((0, 1)).sum(),
    "attention": attention,
    "group norm": lambda x: functional.group_norm(x.transpose(1, 2), 2),
    "product": lambda x: x.prod(0),
    "some parts": lambda x: torch.cat([x.chunk(4)[3], x.split([1, 3])[1], x.unbind(0)[0][None]]),
    "embedding": lambda x: functional.embedding((x[..., 0] > 0).long(), x.flatten(1)),
    "normalized": lambda x: functional.normalize(x, dim=0),
    "listed entries": lambda x: x[[3, 1, 1]] * x[:, [True, False, True]][1:, :1, [1]],
    "vector times matrix": vector_times_matrix,
    "negative dims": last_of_each,
    "norm of the last dim": lambda x: functional.rms_norm(x, (8,), TABLE),
    "embedding, then a norm": lambda x: functional.layer_norm(
        functional.embedding(torch.tensor([1, 0]), x.flatten(1)), (24,)
    ),
}
"""Bodies for which torch's rules are missing or wrong, in the forward or in the backward."""


def have_the_gradients_of_global_values(mesh: Mesh) -> None:
    src = P(invariant={"tp"})
    for name, body in WITHOUT_RIGHT_RULES.items():
        f = shard_map(body, mesh=mesh, in_specs=src, out_specs=P(), axis_names={"tp"}, check=False)
        expected: list[Tensor] = []
        for spec in (None, P("dp"), P(None, None, "dp")):
            x = random((4, 3, 8), 9)
            x = (x if spec is None else device_put(x, mesh, spec)).requires_grad_()
            y = full(f(x))
            (y * random(tuple(y.shape), 3)).sum().backward()
            assert x.grad is not None
            found = [y.detach(), full(x.grad)]
            expected = expected or found
            note = partial("{}, {}: {}".format, name, spec)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=note)


def test_functions_without_a_right_rule_have_right_gradients(gloo: Gloo) -> None:
    run_on("gloo", have_the_gradients_of_global_values, gloo, SHAPE, AXES)


def test_what_propagation_cannot_do_is_done_on_global_values(gloo: Gloo) -> None:
    run_on("gloo", are_global, gloo, SHAPE, AXES)


def write_into_plain(x: Tensor) -> Tensor:
    return torch.zeros(4, 3, 8, dtype=x.dtype).add_(x)


def write_into_view(x: Tensor) -> Tensor:
    y = x * 1
    y[0].fill_(7.0)
    return y


def write_entries(x: Tensor) -> Tensor:
    y = x * 1
    y[..., 1] = 0.5
    return y


def write_by_unknown(x: Tensor) -> Tensor:
    return (x * 1).index_put_((torch.tensor([0]),), x.new_ones(1))


def write_unseen(x: Tensor) -> Tensor:
    y = x * 1
    functional.leaky_relu(y, inplace=True)
    return y


def write_out(x: Tensor) -> Tensor:
    return torch.sin(x, out=x * 1)


def write_after_view(x: Tensor) -> Tensor:
    y = x * 1
    row = y[0]
    y *= 2
    return y + row


def write_after_view_of_view(x: Tensor) -> Tensor:
    y = x * 1
    entry = y[0][1]
    y *= 2
    return y + entry


COPIED = (
    "a view had to be redistributed and is a copy, so that the value and the view could differ "
    "after a write. Use the operation that returns a new value, as torch.where or torch.cat."
)
REFUSED_WRITE = (
    "it cannot run on shards. Use an operation that returns a new value, as torch.where or "
    "torch.cat."
)
REFUSED: dict[str, tuple[Body, str]] = {
    "plain": (
        write_into_plain,
        "add_ writes a value that is a sharded DTensor into a plain tensor, at SITE "
        "return torch.zeros(4, 3, 8, dtype=x.dtype).add_(x). Make the tensor from the value, as by "
        "x.new_zeros(...), or return a new one instead of writing.",
    ),
    "view": (
        write_into_view,
        "fill_ writes into a view of a value that is a sharded DTensor, at SITE "
        "y[0].fill_(7.0); " + REFUSED_WRITE,
    ),
    "entries": (
        write_entries,
        "__setitem__ writes into a value that is a sharded DTensor, at SITE "
        "y[..., 1] = 0.5; " + REFUSED_WRITE,
    ),
    "no rule": (
        write_by_unknown,
        "index_put_ writes into a value that is a sharded DTensor, at SITE "
        "return (x * 1).index_put_((torch.tensor([0]),), x.new_ones(1)); " + REFUSED_WRITE,
    ),
    "not by its name": (
        write_unseen,
        "leaky_relu writes into a value that is a sharded DTensor, at SITE "
        "functional.leaky_relu(y, inplace=True); " + REFUSED_WRITE,
    ),
    "out": (
        write_out,
        "sin writes into a value that is a sharded DTensor, at SITE "
        "return torch.sin(x, out=x * 1); " + REFUSED_WRITE,
    ),
    "value of a copied view": (
        write_after_view,
        "aten.mul_.Tensor writes into a sharded DTensor, at SITE y *= 2.\n"
        "Before, aten.select.int at SITE row = y[0], " + COPIED,
    ),
    "value of a view of a copied view": (
        write_after_view_of_view,
        "aten.mul_.Tensor writes into a sharded DTensor, at SITE y *= 2.\n"
        "Before, aten.select.int at SITE entry = y[0][1], " + COPIED,
    ),
}


def are_refused(mesh: Mesh) -> None:
    x = device_put(random((4, 3, 8), 9), mesh, P("dp"))
    for body, text in REFUSED.values():
        f = shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"tp"})
        with pytest.raises(ShardMapError) as caught:
            f(x)
        assert _without_lines(str(caught.value)) == text


def _without_lines(text: str) -> str:
    return re.sub(r"test_modes\.py:\d+:", "SITE", text)


def test_writes_that_would_reach_a_copy_are_refused_with_their_line(gloo: Gloo) -> None:
    run_on("gloo", are_refused, gloo, SHAPE, AXES)
