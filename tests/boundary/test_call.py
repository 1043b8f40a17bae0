"""The boundary: what each argument and result must be, and what is said when it is not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    ShapeDtype,
    ShardTypeError,
    SpecError,
    all_reduce,
    axis_index,
    make_mesh,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, SIMULATED, claimed, run_on, same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import random
from tests.support.golden import told
from tests.support.pool import Gloo

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
X = random((4, 6), 0)
DO_NOT_FIT = "the arguments do not match in_specs on the simulated mesh (dp=2, tp=2):"


@dataclass
class Batch:
    tokens: Tensor


def body(x: Any, y: Any = None, *more: Any, scale: Any = 1, **rest: Any) -> Any:
    return 0


def call(in_specs: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=None)(*args, **kwargs)


ARGUMENTS: list[tuple[Callable[[], Any], list[str]]] = [
    (call((P("pp"),), X), ["x: P('pp') names 'pp', but the axes here are dp, tp"]),
    (
        call((P("dp"), P(None, "tp")), torch.zeros(3), torch.zeros(2, 5)),
        [
            "x: dim 0 has size 3, which does not divide over 'dp' = 2 ranks (3 = 1*2 + 1)",
            "y: dim 1 has size 5, which does not divide over 'tp' = 2 ranks (5 = 2*2 + 1)",
        ],
    ),
    (
        call((P(("dp", "tp")),), {"w": [torch.zeros(6)]}),
        [
            "x['w'][0]: dim 0 has size 6, which does not divide over ('dp', 'tp') = 2*2 = 4 ranks "
            "(6 = 1*4 + 2)"
        ],
    ),
    (
        call((P(None, "tp"),), torch.zeros(2)),
        ["x: P(None, 'tp') has 2 entries, but the value has 1 dim"],
    ),
    (call((P("dp"),), 3), ["x: is a number, which P('dp') cannot shard"]),
    (call((P(partial="dp"),), 3.5), ["x: is a number, which P(partial={'dp'}) cannot shard"]),
    (
        call((P(),), "mode"),
        ["x: is a str, not a tensor; mark static arguments with None in in_specs"],
    ),
    (
        call((P(),), Batch(X)),
        [
            "x: is a Batch, not a tensor; pass its tensors as a dict, or register the class with "
            "optree, in the namespace 'shardmap_torch'; mark static arguments with None in in_specs"
        ],
    ),
    (call((P(),), X.numpy()), ["x: is a ndarray, not a tensor; pass torch.from_numpy(x)"]),
    (
        call((P(),), ShapeDtype((3,))),
        [
            "x: is a ShapeDtype, not a tensor; it stands for one in check_program and its "
            "like, and "
            "on abstract meshes"
        ],
    ),
    (call((P(),), X, X), ["in_specs: has 1 spec for 2 arguments"]),
    (call((), X), ["in_specs: has 0 specs for 1 argument"]),
    (call({"y": P()}, X), ["x: in_specs={'y': P()} has no spec for this argument"]),
    (call((P(),), X, scale=X), ["scale: in_specs=(P(),) has no spec for this argument"]),
    (call((P(),), X, other=X), ["other: in_specs=(P(),) has no spec for this argument"]),
    (call(({"a": P()},), X), ["x: the specs have a dict here, the value is a Tensor"]),
    (
        call(({"a": P(), "b": P()},), {"a": X, "c": X}),
        ["x: no spec for ['c']; specs for absent ['b']"],
    ),
    (call((P(), (P(), P())), X, (X,)), ["y: the specs have 2 items here, the value has 1: Tensor"]),
    (call(("dp",), (X,)), ["x: 'dp' is no spec; use P(...), or None for a static value"]),
    (
        call((P(), P(), P("dp"), P("dp")), X, X, torch.zeros(3), torch.zeros(5)),
        [
            "more[0]: dim 0 has size 3, which does not divide over 'dp' = 2 ranks (3 = 1*2 + 1)",
            "more[1]: dim 0 has size 5, which does not divide over 'dp' = 2 ranks (5 = 2*2 + 1)",
        ],
    ),
    (
        call({"x": P("dp"), "rest": P()}, torch.zeros(2), rest=torch.zeros(2, device="meta")),
        ["rest: is on meta, the mesh on cpu"],
    ),
]


@pytest.mark.parametrize(("make", "problems"), ARGUMENTS)
def test_every_argument_that_does_not_fit_is_named(
    make: Callable[[], Any], problems: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    text, _, fix = str(caught.value).partition("\nFix: ")
    assert text == "\n  ".join([f"body: {DO_NOT_FIT}", *problems])
    uneven = all("does not divide" in problem for problem in problems)
    assert ("drop_last=True" in fix) == uneven


def test_a_spec_without_its_argument_is_named() -> None:
    def two(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    with told(SpecError):
        shard_map(two, mesh=MESH, in_specs=(P(), P(), P()), out_specs=P())(X)


def test_inputs_that_can_receive_a_gradient_must_name_every_axis() -> None:
    x, w = X.clone().requires_grad_(), X.clone().requires_grad_()
    f = shard_map(body, mesh=MESH, in_specs=(P("dp"), P()), out_specs=None)
    text = (
        "body: these inputs can receive a gradient, so their specs must name every axis. "
        "replicate= if the ranks use the value differently (gradients are summed over the "
        "axis), invariant= if all repeat one computation (they are equal already):\n"
        "  x: P('dp') needs replicate={'tp'} or invariant={'tp'}"
    )
    both = text + "\n  y: P() needs replicate={'dp', 'tp'} or invariant={'dp', 'tp'}"
    with pytest.raises(SpecError) as by_autograd:
        f(x, w)
    assert str(by_autograd.value) == both
    with pytest.raises(SpecError) as by_functorch:
        torch.func.grad(lambda x: f(x, X))(X)
    assert str(by_functorch.value) == text
    with torch.no_grad():
        assert f(x, w) == 0


# ------------------------------------------------------------------------------------ results


def returning(value: Any, out_specs: Any) -> Callable[[Mesh], Any]:
    def make(mesh: Mesh) -> Any:
        def body(x: Tensor) -> Any:
            return value(x)

        return shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=out_specs)(X)

    return make


RESULTS: list[tuple[Callable[[Mesh], Any], list[str]]] = [
    (returning(lambda x: x, P("pp")), ["out: P('pp') names 'pp', but the axes here are dp, tp"]),
    (
        returning(lambda x: x, P("dp", None, None)),
        ["out: P('dp', None, None) has 3 entries, but the value has 2 dims"],
    ),
    (
        returning(lambda x: x.sum(), P("dp")),
        [
            "out: P('dp') has 1 entry, but the value has 0 dims; return x[None], so that it has a "
            "dim for the ranks"
        ],
    ),
    (
        returning(lambda x: (x, x), (P("dp"),)),
        ["out: the specs have 1 item here, the value has 2: Tensor, Tensor"],
    ),
    (
        returning(lambda x: {"a": x}, {"b": P("dp")}),
        ["out: no spec for ['a']; specs for absent ['b']"],
    ),
    (returning(lambda x: "done", P()), ["out: is a str, not a tensor, which P() cannot place"]),
    (
        returning(lambda x: [3], P("dp")),
        ["out[0]: is a int, not a tensor, which P('dp') cannot place"],
    ),
    (
        returning(lambda x: x, "dp"),
        ["out: 'dp' is no spec; use P(...), or None for a static value"],
    ),
    (
        returning(lambda x: x * 2, None),
        [
            "out: is a tensor, and its spec is None, which is for what is no tensor; write P(...)",
        ],
    ),
]


@SIMULATED
@pytest.mark.parametrize(("make", "problems"), RESULTS)
def test_every_result_that_does_not_fit_is_named(
    make: Callable[[Mesh], Any], problems: list[str], kind: Any
) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate=kind)
    with pytest.raises(SpecError) as caught:
        make(mesh)
    head = "body: the result does not match out_specs on the simulated mesh (dp=2, tp=2):"
    assert str(caught.value) == "\n  ".join([head, *problems])


def test_a_result_that_varies_where_its_spec_promises_one_value_is_an_error() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")

    def vary(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + axis_index("tp")

    with told(ShardTypeError):
        shard_map(vary, mesh=mesh, in_specs=P("dp"), out_specs=(P(), P("dp")))(X)


# ----------------------------------------------------------------------------- what does fit


def trees(mesh: Mesh) -> None:
    def model(
        params: Any, x: Tensor, *more: Tensor, scale: float, mode: str = "a", **rest: Any
    ) -> Any:
        assert mode == "b"
        y = x @ params["w"] * scale + params["layers"][0][0] + sum(m.sum() for m in more)
        return {"y": y, "mode": mode, "n": 3, "none": None, "rest": [rest["z"]]}

    specs = {"params": P(), "x": P("tp"), "scale": P(), "mode": None, "z": P(None, "tp")}
    out_specs = {"y": P("tp"), "mode": None, "n": P(), "none": P(), "rest": P(None, "tp")}
    f = shard_map(model, mesh=mesh, in_specs=specs, out_specs=out_specs)
    w = random((6, 2), 1)
    params = {"w": w, "layers": [(torch.tensor(1.0).double(), None)]}
    out = f(params, x=X, scale=2.0, mode="b", z=X)
    same(out["y"], X @ w * 2 + 1)
    same(out["rest"][0], X)
    assert (out["mode"], out["n"], out["none"]) == ("b", 3, None)


def variadic(mesh: Mesh) -> None:
    f = shard_map(
        lambda *xs: xs[::-1], mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P("tp")
    )
    same(f(X, X[:2])[1], X)
    one = shard_map(lambda *xs: sum(xs), mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    same(one(X, X, X), 3 * X)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
]


def dtypes(mesh: Mesh) -> None:
    for dtype in DTYPES:
        for shape in [(4, 6), (0, 6), (4, 0)]:
            x = (torch.ones(shape) * 3).to(dtype)
            for spec in (P("tp"), P(None, "tp"), P(), P(partial="tp")):
                f = shard_map(Tensor.clone, mesh=mesh, in_specs=spec, out_specs=spec, check=False)
                y = f(x)
                assert y.dtype == dtype
                assert y.shape == shape
                if dtype != torch.bool or not spec.partial:
                    same(y.to(torch.complex128), x.to(torch.complex128))


def scalars(mesh: Mesh) -> None:
    f = shard_map(
        lambda x, n: all_reduce(x * n, "tp", dst=I),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check=False,
    )
    same(f(torch.tensor(2.0), 3), torch.tensor(12.0))
    same(f(torch.tensor(2.0), True), torch.tensor(4.0))


def strided(mesh: Mesh) -> None:
    for x in (X.t(), X[:1].expand(4, 6), X[:, ::3], X.flip(0)[::2]):
        y = shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x)
        same(y, 2 * x)


def packed(mesh: Mesh, kind: str, body: Any) -> None:
    for spec in (P("tp"), P()):
        f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=spec)
        with pytest.raises(SpecError, match=f"out: is a {kind} tensor; only dense ones"):
            f(X)


def sparse(mesh: Mesh) -> None:
    packed(mesh, "sparse_coo", torch.Tensor.to_sparse)


def nested(mesh: Mesh) -> None:
    packed(mesh, "nested", lambda x: torch.nested.nested_tensor([x, x]))


@ON_EVERY_MESH
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_packed_results_of_unchecked_bodies_are_refused(kind: str, gloo: Gloo) -> None:
    if kind != "vmap":  # torch's has no rules for them, and says so
        run_on(kind, sparse, gloo)
        run_on(kind, nested, gloo)


def written(mesh: Mesh) -> None:
    for spec in (P("tp"), P(), P(replicate="tp")):
        x = X.clone()
        specs = {"in_specs": spec, "out_specs": P(*spec.entries)}
        f = shard_map(lambda x: x.mul_(2), mesh=mesh, check=False, **specs)
        with pytest.raises(ShardTypeError) as caught:
            f(x)
        assert str(caught.value) == (
            "<lambda>: the body wrote into its inputs, which are read-only; clone them:\n  x"
        )


test_on_every_mesh = claimed(
    {
        "pytrees prefixes keywords and static arguments": trees,
        "one spec or a tuple serves any number of arguments": variadic,
        "any dtype and empty tensors cross": dtypes,
        "scalars and numbers enter whole": scalars,
        "non contiguous and expanded inputs are cut by value": strided,
        "writing into an input is an error": written,
    },
)
