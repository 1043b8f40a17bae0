"""shardmap_torch.lax against real JAX, against the definitions in JAX's docs, and its errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from shardmap_torch import CollectiveError, P, ShardTypeError, lax, make_mesh, shard_map
from shardmap_torch.mesh import Mesh
from tests.support.golden import told
from tests.support.pool import Gloo

Strategy = Literal["vmap", "ranks"]

NUM_RANKS = 4
GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden/jax_lax.json").read_text()
)


def make(strategy: Strategy) -> Mesh:
    return make_mesh((NUM_RANKS,), ("i",), kind="simulated", simulate=strategy)


def evaluate(expression: str, x: Tensor, says_types: bool = False) -> Tensor:
    """Evaluates it as JAX does, or with the types said that only a checker could find."""
    said = {"{src}": ", src='invarying'", "{reduced}": ", src='reduced'"}
    for word, text in said.items():
        expression = expression.replace(word, text if says_types else "")
    names = {"x": x, "lax": lax, "vary": lambda y: lax.pcast(y, "i", to="varying")}
    result: Tensor = eval(expression, names)
    return result


def whole(x: Any) -> Tensor:
    """A plain tensor, whatever the mesh gave."""
    tensor: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return tensor


def check_golden(mesh: Mesh, case: dict[str, Any], check: bool) -> None:
    x = torch.tensor(case["x"], dtype=torch.float64, requires_grad="grad" in case)
    equal = P() if check else P(invariant="i")

    @shard_map(
        mesh=mesh, in_specs=P("i") if case["varies"] else equal, out_specs=P("i"), check=check
    )
    def f(x: Tensor) -> Tensor:
        return evaluate(case["expression"], x[0] if case["varies"] else x, not check)[None]

    y = whole(f(x))
    note = case["expression"]
    torch.testing.assert_close(
        y.double(),
        torch.tensor(case["y"], dtype=torch.float64),
        rtol=0,
        atol=1e-10,
        msg=lambda m: f"{note} {m}",
    )
    if "grad" in case:
        w = torch.tensor(case["w"], dtype=torch.float64)
        (grad,) = torch.autograd.grad((y * w).sum(), x)
        wanted = torch.tensor(case["grad"], dtype=torch.float64)
        torch.testing.assert_close(
            grad, wanted, rtol=0, atol=1e-10, msg=lambda m: f"{note} grad {m}"
        )


@pytest.mark.sample(54)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["expression"])
def test_value_and_gradient_are_those_of_jax(
    case: dict[str, Any], strategy: Strategy, check: bool
) -> None:
    check_golden(make(strategy), case, check)


def golden_on_rank() -> None:
    mesh = make_mesh((NUM_RANKS,), ("i",))
    for case in GOLDEN:
        for check in (True, False):
            check_golden(mesh, case, check)


def test_value_and_gradient_are_those_of_jax_on_processes(gloo: Gloo) -> None:
    gloo(NUM_RANKS).run(golden_on_rank, timeout=120)


def per_rank(body: Callable[[Tensor], Tensor], x: Tensor, strategy: Strategy) -> Tensor:
    """The results of all ranks, stacked; rank r gets `x[r]`."""
    f = shard_map(
        lambda x: body(x[0])[None], mesh=make(strategy), in_specs=P("i"), out_specs=P("i")
    )
    y: Tensor = f(x)
    return y


def test_psum_of_a_number_is_a_number_times_the_axis_size() -> None:
    seen: list[Any] = []

    def body(x: Tensor) -> Tensor:
        seen.append(lax.psum({"a": 1, "b": (2.5, True)}, "i"))
        seen.append(lax.pmean(3, "i"))
        seen.append(lax.pmax(3, "i"))
        return x

    per_rank(body, torch.zeros(4, 1), "vmap")
    assert seen[-3:] == [{"a": 4, "b": (10.0, 4)}, 3.0, 3]
    assert isinstance(seen[-3]["a"], int)


SPECS = {"invarying": P(invariant="i"), "reduced": P(replicate="i"), "either": P()}


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
@pytest.mark.parametrize(
    ("kind", "check"),
    [(kind, check) for kind in SPECS for check in (True, False) if check or kind != "either"],
)
@pytest.mark.parametrize("name", ["pmax", "pmin", "psum", "pmean"])
def test_reductions_of_equal_values_scale_their_gradient_as_the_value(
    name: str, kind: str, check: bool, strategy: Strategy
) -> None:
    said = {} if check else {"src": kind}
    f = shard_map(
        lambda x: getattr(lax, name)(x, "i", **said),
        mesh=make(strategy),
        in_specs=SPECS[kind],
        out_specs=P(),
        check=check,
    )
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    factor = NUM_RANKS if name == "psum" else 1
    y = f(x)
    torch.testing.assert_close(y, factor * x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, factor))


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "all_gather", "ppermute"])
def test_a_value_that_varies_over_one_of_two_axes_is_cast_over_the_other(
    name: str, strategy: Strategy
) -> None:
    """The value and the gradient are those of an operand that has been cast by hand."""
    mesh = make_mesh((2, 3), ("a", "b"), kind="simulated", simulate=strategy)
    rest = [[(i, (i + 1) % 6) for i in range(6)]] if name == "ppermute" else []
    weights = torch.linspace(1, 2, 24, dtype=torch.float64)

    def both(cast: bool) -> tuple[Tensor, Tensor]:
        def body(w: Tensor, x: Tensor) -> Any:
            y = w * x
            y = lax.pcast(y, "b", to="varying") if cast else y
            y = getattr(lax, name)(y, ("a", "b"), *rest)
            if name in ("psum", "pmean", "pmax"):
                y = lax.pcast(y, ("a", "b"), to="varying")
            return y.flatten()[:4]

        x = torch.linspace(-1, 1, 8, dtype=torch.float64)
        w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        y = shard_map(body, mesh=mesh, in_specs=(P(), P("a")), out_specs=P(("a", "b")))(w, x)
        return y.detach(), torch.autograd.grad((y * weights).sum(), w)[0]

    for found, wanted in zip(both(False), both(True), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_psum_of_unreduced_is_the_sum_of_the_addends(strategy: Strategy) -> None:
    f = shard_map(
        lambda x: lax.psum(lax.pcast(x[0], "i", to="unreduced"), "i"),
        mesh=make(strategy),
        in_specs=P("i"),
        out_specs=P(),
    )
    x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    y = f(x)
    assert y.item() == 6.0
    assert torch.autograd.grad(y, x)[0].tolist() == [1.0] * 4


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_pmax_gives_its_gradient_to_the_ranks_that_hold_it(strategy: Strategy) -> None:
    f = shard_map(
        lambda x: lax.pmax(x[0], "i"), mesh=make(strategy), in_specs=P("i"), out_specs=P()
    )
    x = torch.tensor([1.0, 3.0, 3.0, 2.0], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(2 * f(x), x)
    assert grad.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("strategy", ["vmap", "ranks"])
def test_pbroadcast_is_the_psum_of_the_masked_value(strategy: Strategy) -> None:
    """JAX's definition; it has no lowering for the CPU, hence no golden value."""

    def masked(x: Tensor) -> Tensor:
        is_source = lax.axis_index("i") == 2
        return lax.pvary(lax.psum(torch.where(is_source, x, torch.zeros_like(x)), "i"), "i")

    def gradient(body: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.manual_seed(0))
        x.requires_grad_()
        y = per_rank(body, x, strategy)
        assert torch.equal(y, x[2].expand(4, 3))
        weights = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
        return torch.autograd.grad((y * weights).sum(), x)[0]

    torch.testing.assert_close(gradient(lambda x: lax.pbroadcast(x, "i", 2)), gradient(masked))


ERRORS = [
    "lax.psum(x, 'j')",
    "lax.psum(x, 'i', src='equal')",
    "lax.pmax(x, 'i', src='unreduced')",
    "lax.psum(x, 'i', axis_index_groups=[[0, 1], [2, 3]])",
    "lax.all_gather(x, 'i', to='unreduced')",
    "lax.psum_scatter(x, 'i')",
    "lax.all_to_all(x, 'i', 0, 0)",
    "lax.pswapaxes(x, 'i', 1)",
    "lax.pshuffle(x, 'i', [0, 1, 1, 2])",
    "lax.pcast(x, 'i', to='invarying')",
    "lax.pcast(x, 'i', to='reduced', src='varying')",
    "lax.psum('x', 'i')",
]


@pytest.mark.parametrize("expression", ERRORS)
def test_misuse_is_told_in_full(expression: str) -> None:
    with told(CollectiveError):
        per_rank(lambda x: evaluate(expression, x), torch.zeros(4, 3), "vmap")


@pytest.mark.parametrize("name", ["psum", "pmax"])
def test_a_type_that_src_claims_is_compared_with_the_one_found(name: str) -> None:
    with pytest.raises(ShardTypeError, match="convert from I over 'i', but the value is V"):
        per_rank(lambda x: getattr(lax, name)(x, "i", src="invarying"), torch.zeros(4, 3), "vmap")


def test_jax_names_of_arguments_are_taken() -> None:
    mesh = make_mesh((2,), ("i",), kind="simulated")

    def body(x: Tensor) -> Tensor:
        return x + lax.axis_index(axis_name="i") * lax.axis_size(axis_name="i")

    f = shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    assert f(torch.zeros(4)).tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("start", [-1, torch.tensor(-1)])
def test_negative_starts_count_from_the_end_unless_told(start: Any) -> None:
    x, one = torch.arange(4.0), torch.full((1,), 9.0)
    plain: Any = {"allow_negative_indices": False}
    for options, at in (({}, 3), (plain, 0)):
        written = x.clone()
        written[at] = 9.0
        assert lax.dynamic_slice_in_dim(x, start, 1, **options).equal(x[at : at + 1])
        assert lax.dynamic_index_in_dim(x, start, **options).equal(x[at : at + 1])
        assert lax.dynamic_update_slice_in_dim(x, one, start, 0, **options).equal(written)
        assert lax.dynamic_update_index_in_dim(x, one, start, 0, **options).equal(written)
        assert lax.dynamic_update_slice(x, one, (start,), **options).equal(written)
    y = x.view(2, 2)
    found = lax.dynamic_slice(y, (start, start), (1, 1), allow_negative_indices=(True, False))
    assert found.tolist() == [[2.0]]
