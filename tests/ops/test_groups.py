"""Code that calls torch.distributed on the group of an axis is typed, and runs, on every mesh."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Function

import shardmap_torch as sm
from shardmap_torch import CollectiveError, Mesh, MeshError, P, ShardTypeError, full, make_mesh
from tests.support.golden import unplaced
from tests.support.pool import Gloo

# torch 2.13 renames some of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

KINDS: Final = ("vmap", "ranks", "abstract")
X: Final = torch.arange(32.0, dtype=torch.float64).sin().reshape(4, 8)
W: Final = torch.arange(128.0, dtype=torch.float64).cos().reshape(8, 16)
MLP: Final = (X, W, W.mT.contiguous())
SPECS: Final = (P(), P(None, "tp"), P("tp"))


def mesh_of(kind: str) -> Mesh:
    if kind == "abstract":
        return make_mesh((2,), ("tp",), kind="abstract")
    simulate: Any = "ranks" if kind == "ranks" else "auto"
    return make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)


class Body:
    """Programs over the group of "tp"."""

    def __init__(self, mesh: Mesh) -> None:
        group: Any = sm.axis_group(mesh, "tp")
        self.group = group

        class Enter(sm.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Tensor:
                total: Tensor = grads[0].clone()
                dist.all_reduce(total, group=group)
                return total

        class Leave(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                x = x.clone()
                dist.all_reduce(x, group=group)
                return x

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                return grads[0]

        self.enter: Any = Enter.apply
        self.leave: Any = Leave.apply

    def mlp(self, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """Megatron's layer."""
        out: Tensor = self.leave(torch.relu(self.enter(x) @ w1) @ w2)
        return out

    def forgetful(self, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """The same without the sum of the gradient of x."""
        out: Tensor = self.leave(torch.relu(x @ w1) @ w2)
        return out

    def step(self, w: Tensor, x: Tensor) -> Tensor:
        """Averages gradients in place, as data parallelism does."""
        grad: Tensor = torch.func.grad(lambda w: (x @ w).square().mean())(w)
        dist.all_reduce(grad, group=self.group)
        return w - 0.1 * grad / dist.get_world_size(self.group)

    def gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * sm.axis_size("tp"), x.shape[1])
        work = dist.all_gather_into_tensor(out, x.contiguous(), group=self.group, async_op=True)
        work.wait()
        return out * 2

    def scattered(self, x: Tensor) -> Tensor:
        y = x @ x.mT
        out = y.new_empty(y.shape[0] // sm.axis_size("tp"), y.shape[1])
        dist.reduce_scatter_tensor(out, y, group=self.group)
        return out

    def exchanged(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=self.group)
        return out

    def exchanged_by_sizes(self, x: Tensor) -> Tensor:
        out, sizes = torch.empty_like(x), [x.shape[0] // sm.axis_size("tp")] * sm.axis_size("tp")
        dist.all_to_all_single(out, x.contiguous(), sizes, sizes, group=self.group)
        return self.exchanged(out.sin())

    def exchanged_back(self, x: Tensor) -> Tensor:
        return self.exchanged(self.exchanged(x).sin())

    def largest(self, x: Tensor) -> Tensor:
        found = x.max()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return found

    def twice(self, x: Tensor) -> Tensor:
        """Sums what is summed."""
        total = x.sum()
        dist.all_reduce(total, group=self.group)
        dist.all_reduce(total, group=self.group)
        return total

    def early(self, x: Tensor) -> Tensor:
        """Reads what is summed before it has come."""
        total = x.sum()
        work = dist.all_reduce(total, group=self.group, async_op=True)
        read = total * 2
        work.wait()
        return read

    def never(self, x: Tensor) -> Tensor:
        """Returns what has never been waited for."""
        total = x.sum()
        dist.all_reduce(total, group=self.group, async_op=True)
        return total

    def overwritten(self, x: Tensor) -> Tensor:
        """Writes an operand of two calls after the first."""
        own, count = x * 2, sm.axis_size("tp")
        outs = [x.new_empty(x.shape[0] * count, x.shape[1]) for _ in range(2)]
        works = [dist.all_gather_into_tensor(y, own, self.group, async_op=True) for y in outs]
        works[0].wait()
        own[0].zero_()
        works[1].wait()
        return outs[1]

    def functional_overwritten(self, x: Tensor) -> Tensor:
        """Writes into what has been gathered: the result is there when the call returns."""
        own = x * 2
        found: Tensor = functional.all_gather_tensor(own, 0, self.group)
        own.zero_()
        return found * 2

    def functional_reused(self, x: Tensor) -> Tensor:
        """Writes into what has been summed."""
        own = x.sum()
        found: Tensor = functional.all_reduce(own, "sum", self.group)
        own.zero_()
        return found * 2

    def in_parts(self, x: Tensor) -> Tensor:
        """Gathers columns into one buffer, and uses it and the operands when all have come."""
        count = sm.axis_size("tp")
        buffer = x.new_empty(2, x.shape[0] * count, 1)
        own = [column.contiguous() for column in (x * 2).split(x.shape[1] // 2, 1)]
        works = [
            dist.all_gather_into_tensor(y, x, self.group, async_op=True)
            for y, x in zip(buffer, own, strict=True)
        ]
        for work in works:
            work.wait()
        own[0].zero_()
        return torch.cat([*buffer], 1)

    def awaited(self, x: Tensor) -> Tensor:
        total = x.sum()
        work = dist.all_reduce(total, group=self.group, async_op=True)
        while not work.is_completed():
            pass
        work.wait()
        return total * 2

    def differentiated(self, x: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            total = x.square().sum()
            dist.all_reduce(total, group=self.group)
            return total

        found: Tensor = torch.func.grad(loss)(x)
        return found

    def functional_result(self, x: Tensor) -> Tensor:
        total: Tensor = functional.all_reduce(x.sum(), "sum", self.group)
        return total

    def functional_sum(self, x: Tensor) -> Tensor:
        total: Tensor = functional.all_reduce(x.sum(), "sum", self.group)
        return total * 2

    def functional_step(self, w: Tensor, x: Tensor) -> Tensor:
        grad: Tensor = torch.func.grad(lambda w: (x @ w).square().mean())(w)
        mean: Tensor = functional.all_reduce(grad, "avg", self.group)
        return w - 0.1 * mean

    def functional_gather(self, x: Tensor) -> Tensor:
        found: Tensor = functional.all_gather_tensor(x, 0, self.group)
        return found * 2

    def functional_scatter(self, x: Tensor) -> Tensor:
        found: Tensor = functional.reduce_scatter_tensor(x @ x.mT, "sum", 0, self.group)
        return found * 2

    def functional_exchange(self, x: Tensor) -> Tensor:
        found: Tensor = functional.all_to_all_single(x, None, None, self.group)
        return found * 2


def gradients(f: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def taken(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in args]
        return torch.autograd.grad(f(*leaves).square().sum(), leaves)

    return taken


def one_step(w: Tensor, x: Tensor) -> Tensor:
    grad: Tensor = torch.func.grad(lambda w: (x @ w).square().mean())(w)
    return w - 0.1 * grad


def dense(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.relu(x @ w1) @ w2


def double(x: Tensor) -> Tensor:
    return x * 4


Program = tuple[Callable[[Body], Any], tuple[Tensor, ...], Any, Any, Callable[..., Any], Any]
SWAPPED: Final = [0, 2, 1, 3]
PROGRAMS: Final[dict[str, Program]] = {
    "mlp": (lambda b: b.mlp, MLP, SPECS, P(), dense, "global"),
    "gradients": (lambda b: gradients(b.mlp), MLP, SPECS, SPECS, gradients(dense), "global"),
    "step": (lambda b: b.step, (W[:, 0], X), (P(), P("tp")), P(), one_step, True),
    "gather": (lambda b: b.gathered, (X,), P("tp"), P(), lambda x: x * 2, "global"),
    "scatter": (lambda b: b.scattered, (X,), P(None, "tp"), P("tp"), lambda x: x @ x.mT, True),
    "exchange": (lambda b: b.exchanged, (X,), P("tp"), P("tp"), lambda x: x[SWAPPED], True),
    "exchange back": (lambda b: b.exchanged_back, (X,), P("tp"), P("tp"), Tensor.sin, "global"),
    "sizes": (lambda b: b.exchanged_by_sizes, (X,), P("tp"), P("tp"), Tensor.sin, "global"),
    "parts": (lambda b: b.in_parts, (X[:, :2],), P("tp"), P(), lambda x: x * 2, "global"),
    "wait": (lambda b: b.awaited, (X,), P("tp"), P(), lambda x: x.sum() * 2, "global"),
    "max": (lambda b: b.largest, (X,), P("tp"), P(), Tensor.max, "global"),
}
FUNCTIONAL: Final[dict[str, Program]] = {
    "sum": (lambda b: b.functional_sum, (X,), P("tp"), P(), lambda x: x.sum() * 2, "global"),
    "result": (lambda b: b.functional_result, (X,), P("tp"), P(), lambda x: x.sum(), "global"),
    "overwritten": (lambda b: b.functional_overwritten, (X,), P("tp"), P(), double, "global"),
    "reused": (lambda b: b.functional_reused, (X,), P("tp"), P(), lambda x: x.sum() * 2, "global"),
    "gather": (lambda b: b.functional_gather, (X,), P("tp"), P(), lambda x: x * 2, "global"),
    "scatter": (
        lambda b: b.functional_scatter,
        (X,),
        P(None, "tp"),
        P("tp"),
        lambda x: x @ x.mT * 2,
        "global",
    ),
    "exchange": (
        lambda b: b.functional_exchange,
        (X,),
        P("tp"),
        P("tp"),
        lambda x: x[SWAPPED] * 2,
        True,
    ),
    "step": (lambda b: b.functional_step, (W[:, 0], X), (P(), P("tp")), P(), one_step, True),
}
SEEN_ONCE: Final = (
    "all_reduce of torch.distributed is called on a tensor that needs a gradient, and autograd "
    "does not see the call. Use shardmap_torch.all_reduce, or detach it."
)
EARLY: Final = (
    "read = total * 2 uses what a call of torch.distributed writes, which has not been waited for."
    "\nFix: call wait() first on what async_op=True returns; use what a function of "
    "torch.distributed.nn.functional returns, and not its output argument."
)
LENT: Final = "zero_ writes into a tensor that a call of torch.distributed may still read, at "
WRONG: Final[dict[str, tuple[Callable[[Body], Any], tuple[Tensor, ...], Any, str]]] = {
    "no sum": (lambda b: gradients(b.forgetful), MLP, SPECS, "is a pending sum over 'tp'"),
    "twice": (lambda b: b.twice, (X,), P("tp"), "but its operand is K (equal on all ranks)"),
    "early": (lambda b: b.early, (X,), P("tp"), EARLY),
    "never": (lambda b: b.never, (X,), P("tp"), "uses what a call of torch.distributed writes"),
    "overwritten": (lambda b: b.overwritten, (X,), P("tp"), LENT),
    "differentiated": (
        lambda b: b.differentiated,
        (X,),
        P("tp"),
        SEEN_ONCE,
    ),
}


def assert_right(body: Body, mesh: Mesh, program: Program) -> None:
    make, args, ins, outs, reference, check = program
    mapped = sm.shard_map(make(body), mesh=mesh, in_specs=ins, out_specs=outs, check=check)
    if mesh.kind == "abstract":
        sm.check_program(mapped, *args)
        return
    result = mapped(*args)
    assert not isinstance(result, functional.AsyncCollectiveTensor)
    torch.testing.assert_close(full(result), reference(*args))


def assert_refused(body: Body, mesh: Mesh, name: str) -> None:
    make, args, ins, text = WRONG[name]
    outs = ins if len(args) > 1 else P()
    mapped: Any = sm.shard_map(make(body), mesh=mesh, in_specs=ins, out_specs=outs)
    with pytest.raises((ShardTypeError, CollectiveError)) as caught:
        mapped(*args)
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_the_group_of_an_axis_equal_one_device(name: str, kind: str) -> None:
    mesh = mesh_of(kind)
    assert_right(Body(mesh), mesh, PROGRAMS[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_on_the_group_of_an_axis_are_refused(name: str, kind: str) -> None:
    mesh = mesh_of(kind)
    assert_refused(Body(mesh), mesh, name)


def _on_processes(rank: int) -> None:
    mesh = make_mesh((2,), ("tp",))
    body = Body(mesh)
    assert body.group is mesh.group("tp")
    for program in (*PROGRAMS.values(), *FUNCTIONAL.values()):
        assert_right(body, mesh, program)
    for name in WRONG:
        assert_refused(body, mesh, name)
    assert_differentiated_once(body, mesh)
    assert_a_form_for_transforms_is_refused(body, mesh)


class Summing(sm.Function):
    """The identity; in the backward, the sum over the ranks of the group that it is given."""

    @staticmethod
    def forward(x: Tensor, group: Any) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def assert_differentiated_once(body: Body, mesh: Mesh) -> None:
    """Autograd would not see the sum in the backward of a second derivative."""

    def entered(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = Summing.apply(x, body.group)
        return sm.all_reduce((y @ w).square().sum(), "tp", dst=sm.I)

    plain = sm.shard_map(body.mlp, mesh=mesh, in_specs=SPECS, out_specs=P())
    own = sm.shard_map(entered, mesh=mesh, in_specs=SPECS[:2], out_specs=P())
    x = X.clone().requires_grad_()

    def loss(x: Tensor) -> Any:
        return full(own(x, MLP[1]))

    def slope(x: Tensor) -> Any:
        return torch.func.grad(loss)(x).square().sum()

    for again in (
        lambda: torch.autograd.grad(full(plain(x, *MLP[1:])).square().sum(), x, create_graph=True),
        lambda: torch.autograd.grad(loss(x), x, create_graph=True),
        lambda: torch.func.grad(slope)(X),
    ):
        with pytest.raises(CollectiveError) as caught:
            again()
        assert str(caught.value).splitlines()[0] == SEEN_ONCE


def assert_a_form_for_transforms_is_refused(body: Body, mesh: Mesh) -> None:
    """Under torch.func it would run without a scope, and a second derivative would be wrong."""

    class Entering(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Saves nothing."""

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            total = grads[0].clone()
            dist.all_reduce(total, group=body.group)
            return total

    def enter(x: Tensor, w: Tensor) -> Tensor:
        entered: Tensor = Entering.apply(x)  # type: ignore[no-untyped-call]
        return sm.all_reduce((entered @ w).square().sum(), "tp", dst=sm.I)

    mapped = sm.shard_map(enter, mesh=mesh, in_specs=SPECS[:2], out_specs=P())
    with pytest.raises(CollectiveError, match="Derive the Function from shardmap_torch"):
        mapped(X.clone().requires_grad_(), W)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_the_same_programs_run_on_the_groups_of_processes(gloo: Gloo) -> None:
    gloo(2).run(_on_processes, "rank")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives_on_the_group_of_an_axis_equal_one_device(
    name: str, kind: str
) -> None:
    mesh = mesh_of(kind)
    assert_right(Body(mesh), mesh, FUNCTIONAL[name])


def test_what_is_not_typed_says_so() -> None:
    mesh = mesh_of("ranks")
    group: Any = sm.axis_group(mesh, "tp")

    def product(x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, op=dist.ReduceOp.PRODUCT, group=group)
        return y

    def uneven(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, [2, 0], [1, 1], group=group)
        return y

    def narrow(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        dist.all_gather_into_tensor(y, x, group=group)
        return y

    texts = {
        product: "all_reduce of torch.distributed: only SUM, AVG, MAX, MIN are typed.",
        uneven: "all_to_all_single of torch.distributed is called in the body with split sizes "
        "[2, 0] and [1, 1], and only equal shares of all rows, 1 each, are typed. Use "
        "shardmap_torch.ragged_all_to_all.",
        narrow: "all_gather of torch.distributed gives [4, 8] over ('tp',), and its output has "
        "[2, 8].",
    }
    for body, text in texts.items():
        with pytest.raises(CollectiveError) as caught:
            sm.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(X)
        assert unplaced(caught.value) == text


def test_a_group_of_no_axis_is_an_error() -> None:
    with pytest.raises(MeshError) as caught:
        sm.axis_group(mesh_of("ranks"), "dp")
    assert str(caught.value) == "No axes 'dp' in the simulated mesh (tp=2)."
