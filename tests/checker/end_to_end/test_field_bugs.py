"""Silent bugs of parallel training that people have reported, each as a small program of our own.

`docs/field_bugs.md` says where. A wrong program computes other numbers than one device on ranks
that are threads, and `check="global"` refuses it at the line that is wrong; with that line mended
it is accepted, and equal to one device. The texts are in `tests/golden/field_bugs.txt`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    Function,
    I,
    P,
    R,
    ShardTypeError,
    V,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    convert,
    make_mesh,
    reduce_scatter,
    shard_map,
    value_and_grad,
)
from shardmap_torch.nn import vocab_parallel_cross_entropy
from tests.checker.support.rejections import numbers
from tests.support.golden import hold

pytestmark = pytest.mark.usefixtures("repairs")

AXES: Final = ("dp", "tp")
MESH = make_mesh((2, 2), AXES, kind="simulated", simulate="ranks")
ONE = make_mesh((1, 1), AXES, kind="simulated", simulate="ranks")

ROWS, COLUMNS, LAST = P("dp"), P(None, "tp"), P("tp")


@dataclass(frozen=True)
class Bug:
    """A reported bug.

    Attributes:
        program: makes the body, right or as it was reported; the wrong line has "# wrong".
        in_specs: of its arguments.
        out_specs: of its results.
        shapes: of its arguments; a negative one is for so many ids.
    """

    program: Callable[[bool], Callable[..., Any]]
    in_specs: Any
    out_specs: Any
    shapes: Sequence[Sequence[int]]

    @property
    def name(self) -> str:
        return self.program.__name__

    def args(self) -> tuple[Tensor, ...]:
        ids = torch.tensor([0, 7, 3, 5])
        return tuple(
            ids if len(shape) == 0 else numbers(*shape, grad=False, seed=at)
            for at, shape in enumerate(self.shapes)
        )

    def mapped(self, right: bool, mesh: Any, check: Any) -> Callable[..., Any]:
        return shard_map(
            self.program(right),
            mesh=mesh,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            check=check,
        )


BUGS: list[Bug] = []
IDS: Final = ()


def bug(
    in_specs: Any, out_specs: Any, *shapes: Sequence[int]
) -> Callable[[Callable[[bool], Any]], Callable[[bool], Any]]:
    def register(program: Callable[[bool], Any]) -> Callable[[bool], Any]:
        BUGS.append(Bug(program, in_specs, out_specs, shapes))
        return program

    return register


@bug((COLUMNS, P()), P(), (4, 8), IDS)
def label_smoothing_over_a_part_of_the_vocabulary(right: bool) -> Any:
    """Megatron-LM 737, 7452 (1)."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total = all_reduce(logits.exp().sum(-1), "tp", dst=I).log()
        nll = vocab_parallel_cross_entropy(logits, targets, "tp", reduction="none")
        mean = logits.mean(-1)  # wrong
        if right:
            mean = all_reduce(logits.mean(-1), "tp", dst=I, op="mean")
        return (0.9 * nll + 0.1 * (total - mean)).mean()

    return loss


@bug((P(), COLUMNS, P()), P(), (4, 6), (6, 8), IDS)
def gathered_logits_in_a_loss_for_shards(right: bool) -> Any:
    """Megatron-LM 7452 (2): the loss is too large by log(tp)."""

    def loss(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        logits = all_gather(x @ w, "tp", dim=1, dst=I)
        total = logits.exp().sum(-1)
        if not right:
            total = all_reduce(total, "tp", dst=I)  # wrong
        picked = logits.gather(1, targets[:, None])[:, 0]
        return (total.log() - picked).mean()

    return loss


@bug((ROWS, ROWS), P(), (8, 6), (8,))
def a_mean_over_each_rank_s_own_tokens(right: bool) -> Any:
    """Megatron-LM 7452 (3), 7213: tokens count more on ranks that have few."""

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        kept = (mask > 0).to(x.dtype)
        total, count = (x.square().sum(-1) * kept).sum(), kept.sum()
        if right:
            return all_reduce(total, "dp", dst=I) / all_reduce(count, "dp", dst=I)
        return all_reduce(total / count, "dp", dst=I, op="mean")  # wrong

    return loss


@bug((ROWS, P()), ROWS, (4, 8), (8, 6))
def activations_gathered_over_another_group(right: bool) -> Any:
    """Megatron-LM 7452 (4): saved in parts over one group, recomputed from another."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        part = convert(x, "tp", src=R, dst=V, dim=1)
        if right:
            return all_gather(part, "tp", dim=1, dst=I) @ w
        return all_gather(part, "dp", dim=1, dst=I)[:, : w.shape[0]] @ w  # wrong

    return forward


@bug((P(), P()), P(), (4, 6), (6,))
def embeddings_scattered_over_another_group(right: bool) -> Any:
    """Megatron-LM 7452 (7)."""

    def forward(x: Tensor, scale: Tensor) -> Tensor:
        if right:
            part = convert(x, "tp", src=R, dst=V, dim=0)
            return all_gather(part * scale, "tp", dim=0, dst=I)
        part = convert(x, "dp", src=R, dst=V, dim=0)
        return all_gather(part * scale, "tp", dim=0, dst=I)  # wrong

    return forward


@bug((P(), P()), P(), (4, 6), (4,))
def a_padding_mask_scattered_over_another_group(right: bool) -> Any:
    """Megatron-LM 7452 (5): beside hidden states that are scattered over the right one."""

    def forward(x: Tensor, mask: Tensor) -> Tensor:
        part = convert(x, "tp", src=R, dst=V, dim=0)
        own = convert(mask, "tp" if right else "dp", src=R, dst=V, dim=0)  # wrong
        return all_gather(part * own[:, None], "tp", dim=0, dst=I)

    return forward


@bug((P(), P(), P(), P()), P(), (4, 6), (5, 6), (6, 8), (8, 6))
def cross_attention_whose_projections_have_another_group(right: bool) -> Any:
    """Megatron-LM 7452 (6): its output is summed over the right one."""

    def forward(x: Tensor, memory: Tensor, up: Tensor, down: Tensor) -> Tensor:
        axis = "tp" if right else "dp"
        own = convert(up, axis, src=R, dst=V, dim=1)
        heads = (x @ own).tanh() * (memory @ own).mean(0)
        out = heads @ convert(down, axis, src=R, dst=V, dim=0)
        return all_reduce(out, "tp", dst=I)  # wrong

    return forward


@bug((COLUMNS, COLUMNS), COLUMNS, (3, 4), (3, 4))
def keys_gathered_over_the_group_of_another_batch(right: bool) -> Any:
    """Megatron-LM 7452 (13): an evaluation's own context group is forgotten after a batch."""

    def attend(queries: Tensor, keys: Tensor) -> Tensor:
        if right:
            every = all_gather(keys, "tp", dim=1, dst=R)
        else:
            every = all_gather(keys, "dp", dim=1, dst=R)  # wrong
        return (torch.softmax(queries.T @ every, -1) @ every.T).T

    return attend


@bug((LAST, LAST), P(), (4,), (8, 6))
def a_sharded_parameter_left_out_of_the_norm(right: bool) -> Any:
    """Megatron-LM 7452 (8), 5916: only the first rank's part counts."""

    def norm(sinks: Tensor, weight: Tensor) -> Tensor:
        extra = sinks.square().sum()
        if not right:
            extra = torch.where(axis_index("tp") == 0, extra, 0.0)  # wrong
        return all_reduce(weight.square().sum() + extra, "tp", dst=I).sqrt()

    return norm


@bug((P(), P(None, "tp"), P(None, "tp")), P(), (3,), (4, 6), (4, 6))
def a_norm_s_gradient_of_each_rank_s_heads(right: bool) -> Any:
    """Megatron-LM 7452 (11)."""

    def step(scale: Tensor, heads: Tensor, y: Tensor) -> Any:
        def loss(scale: Tensor) -> Tensor:
            normed = functional.rms_norm(heads.view(4, -1, 3), [3]) * scale
            return all_reduce((normed.flatten(1) * y).sum(), "tp", dst=I)

        _, gradient = value_and_grad(loss)(scale)
        if right:
            gradient = all_reduce(gradient, "tp", dst=I)
        return scale - 0.1 * gradient  # wrong

    return step


@bug((P(), LAST), P(), (6,), (8, 6))
def a_norm_s_gradient_of_each_rank_s_tokens(right: bool) -> Any:
    """Megatron-LM 1446, gpt-neox 1257: sequence parallelism."""

    def step(scale: Tensor, x: Tensor) -> Any:
        def loss(scale: Tensor) -> Tensor:
            normed = functional.layer_norm(x, [6], scale)
            return all_reduce(normed.pow(3).sum(), "tp", dst=I)

        _, gradient = value_and_grad(loss)(scale)
        if right:
            gradient = all_reduce(gradient, "tp", dst=I)
        return scale - 0.1 * gradient  # wrong

    return step


@bug((COLUMNS, LAST, P()), P(), (4, 8), (8, 6), (6,))
def a_bias_that_every_rank_adds(right: bool) -> Any:
    """torchtitan 4245, text-generation-inference 1036."""

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if right:
            return all_reduce(x @ w, "tp", dst=I) + b
        return all_reduce(x @ w + b, "tp", dst=I)  # wrong

    return forward


@bug((P(), COLUMNS, LAST), P(), (6,), (4, 8), (8, 6))
def a_divided_bias_s_gradient_of_one_rank(right: bool) -> Any:
    """torchtitan 4332: too small by the number of ranks."""

    def step(b: Tensor, x: Tensor, w: Tensor) -> Any:
        def loss(b: Tensor) -> Tensor:
            return all_reduce(x @ w + b / axis_size("tp"), "tp", dst=I).square().sum()

        _, gradient = value_and_grad(loss)(b)
        if right:
            gradient = all_reduce(gradient, "tp", dst=I)
        return b - 0.1 * gradient  # wrong

    return step


@bug((P(), P(), P("tp", None, None)), P(), (6, 2), (4, 6), (2, 6, 4))
def a_router_s_gradient_of_each_rank_s_experts(right: bool) -> Any:
    """torchtitan 2387."""

    def step(gate: Tensor, x: Tensor, experts: Tensor) -> Any:
        def loss(gate: Tensor) -> Tensor:
            scores = convert(torch.softmax(x @ gate, -1), "tp", src=R, dst=V, dim=1)
            out = torch.einsum("te,ti,eio->to", scores, x, experts)
            return all_reduce(out, "tp", dst=I).square().sum()

        _, gradient = value_and_grad(loss)(gate)
        if right:
            gradient = all_reduce(gradient, "tp", dst=I)
        return gate - 0.1 * gradient  # wrong

    return step


class Experts(Function):
    """Experts whose gradient of the input is that of this rank's part alone."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


class SummedExperts(Experts):
    """The same, whose backward sums the parts."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return all_reduce(grad @ w.T, "tp", dst=I), x.T @ grad


@bug((P(), P(), COLUMNS, LAST), P(), (6, 6), (4, 6), (6, 8), (8, 6))
def experts_whose_input_s_gradient_is_not_summed(right: bool) -> Any:
    """torchtitan 4054, 1805: what is below the experts learns from one rank's share."""

    def step(gate: Tensor, x: Tensor, up: Tensor, down: Tensor) -> Any:
        def loss(gate: Tensor) -> Tensor:
            apply = SummedExperts.apply if right else Experts.apply
            hidden: Tensor = apply(torch.tanh(x @ gate), up)
            out: Tensor = all_reduce(hidden.relu() @ down, "tp", dst=I)
            return out.square().sum()

        return gate - 0.1 * value_and_grad(loss)(gate)[1]  # wrong

    return step


class ToLocal(Function):
    """Hands over a pending sum as it is, and sums its gradient, which is one value, again."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad, "tp", dst=R)


@bug((COLUMNS, LAST), LAST, (4, 8), (8, 6))
def a_pending_sum_whose_gradient_is_summed_again(right: bool) -> Any:
    """pytorch 172932, 160285: to_local() of a Partial and back."""

    def step(x: Tensor, w: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            product = x @ w
            if not right:
                product = ToLocal.apply(product)  # wrong
            return all_reduce(product, "tp", dst=I).square().sum()

        return w - 0.1 * value_and_grad(loss)(w)[1]

    return step


@bug((P(None, "dp"), P("dp"), ROWS), (P(None, "dp"), P("dp")), (6, 8), (8, 6), (4, 6))
def experts_that_learn_from_the_sum_of_local_means(right: bool) -> Any:
    """pytorch 160285: what is replicated gets the mean over ranks, experts the sum."""

    def step(up: Tensor, down: Tensor, x: Tensor) -> Any:
        def loss(experts: tuple[Tensor, Tensor]) -> Tensor:
            tokens = all_gather(x, "dp", dim=0, dst=R)
            hidden = (tokens @ experts[0]).relu() @ experts[1]
            own = reduce_scatter(hidden, "dp", dim=0)
            mean = (own - x).square().mean()
            return all_reduce(mean, "dp", dst=I, op="mean") if right else mean

        _, grads = value_and_grad(loss)((up, down))
        return up - 0.1 * grads[0], down - 0.1 * grads[1]  # wrong

    return step


@bug((LAST, P(), LAST), P(), (8, 6), (6, 4), (8,))
def a_local_count_that_the_sum_overwrites(right: bool) -> Any:
    """Megatron-LM 7452 (10): a router's loss counts all tokens once on every rank."""

    def loss(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        kept = (mask > 0).to(x.dtype)
        own = kept.sum()
        total = all_reduce(own, "tp", dst=R)
        if not right:
            own = total
        w = convert(w, "tp", src=I, dst=R)
        chances = ((x @ w).softmax(-1) * kept[:, None]).sum(0)
        balance = all_reduce(chances, "tp", dst=R).square().sum()
        return all_reduce(balance * own, "tp", dst=I)  # wrong

    return loss


@bug((P(), ROWS, ROWS), P(), (6,), (8, 6), (8,))
def a_gradient_averaged_over_ranks_of_their_own_counts(right: bool) -> Any:
    """Megatron-LM 7452 (9), 7513: a masked sequence that is split over ranks."""

    def step(w: Tensor, x: Tensor, mask: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            kept = (mask > 0).to(x.dtype)
            total, count = ((x @ w).square() * kept).sum(), kept.sum()
            if right:
                count = all_reduce(count, "dp", dst=R) / axis_size("dp")
            return total / count  # wrong

        _, gradient = value_and_grad(loss)(w)
        return w - 0.1 * all_reduce(gradient, "dp", dst=I, op="mean")

    return step


@bug((P(), ROWS, ROWS), P(), (6,), (8, 6), (8,))
def a_gradient_averaged_after_its_loss_is_divided_by_all_tokens(right: bool) -> Any:
    """torchtitan 2323: too small by the number of ranks."""

    def step(w: Tensor, x: Tensor, mask: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            kept = (mask > 0).to(x.dtype)
            return ((x @ w).square() * kept).sum() / all_reduce(kept.sum(), "dp", dst=R)

        _, gradient = value_and_grad(loss)(w)
        if right:
            return w - 0.1 * all_reduce(gradient, "dp", dst=I)
        return w - 0.1 * all_reduce(gradient, "dp", dst=I, op="mean")  # wrong

    return step


@bug((P(), P(), COLUMNS), P(), (6, 3), (4, 6), (6, 12))
def a_part_of_the_keys_that_sharded_heads_share(right: bool) -> Any:
    """torchtitan 1373: a rank's gradient is that of its own heads."""

    def step(w: Tensor, x: Tensor, queries: Tensor) -> Any:
        def loss(w: Tensor) -> Tensor:
            heads, key = (x @ queries).view(4, -1, 3), x @ w
            scores = torch.softmax(torch.einsum("thd,sd->hts", heads, key), -1)
            return all_reduce(scores.square().sum(), "tp", dst=I)

        _, gradient = value_and_grad(loss)(w)
        if right:
            gradient = all_reduce(gradient, "tp", dst=I)
        return w - 0.1 * gradient  # wrong

    return step


def wrong_line(program: Callable[..., Any]) -> str:
    """Returns the line that is wrong, in a backward too."""
    lines, _ = inspect.getsourcelines(program)
    (wrong,) = [line.strip() for line in lines if "# wrong" in line]
    return wrong if "ToLocal" not in wrong else 'return all_reduce(grad, "tp", dst=R)'


def computed(f: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    """Returns the results, and of what is no step a gradient with respect to the first argument."""
    takes_gradient = f.__name__ != "step" and args[0].is_floating_point()
    leaf = args[0].clone().requires_grad_(takes_gradient)
    out = f(leaf, *args[1:])
    outs = list(out) if isinstance(out, tuple) else [out]
    if not takes_gradient:
        return outs
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaf)]


def assert_close_to(out: Any, expected: Sequence[Tensor]) -> None:
    outs = list(out) if isinstance(out, tuple) else [out]
    torch.testing.assert_close(outs, list(expected[: len(outs)]))


@pytest.mark.parametrize("each", BUGS, ids=lambda each: each.name)
def test_a_reported_bug_is_refused_at_its_line_and_mended_there(each: Bug) -> None:
    args = each.args()
    texts = []
    for check in (True, "global"):
        try:
            check_program(each.mapped(False, MESH, check), *args)
            texts.append("accepted")
        except ShardTypeError as error:
            texts.append(str(error))
    hold("field_bugs.txt", each.name, f"check=True: {texts[0]}\n\ncheck='global': {texts[1]}")
    assert wrong_line(each.program) in texts[1]
    assert "\nTried, and accepted also by check='global': " in texts[1]
    check_program(each.mapped(True, MESH, "global"), *args)
    expected = computed(each.mapped(True, ONE, True), args)
    torch.testing.assert_close(computed(each.mapped(True, MESH, "global"), args), expected)
    with pytest.raises((AssertionError, ShardTypeError)):  # other numbers, or of each rank its own
        assert_close_to(each.mapped(False, MESH, False)(*args), expected)
