"""Makes jax_lax.json: what real JAX computes for the calls of tests/test_lax.py.

JAX is no dependency; this was run once, with jax 0.10.2 on four CPU devices:

    python -m venv /tmp/jax && /tmp/jax/bin/pip install jax==0.10.2
    /tmp/jax/bin/python tests/support/jax_lax.py

Each case is an expression, evaluated by JAX here and by shardmap_torch.lax in the test. `{src}` and
`{reduced}` say the type of an operand that does not vary: nothing where it is inferred, as JAX does
and our checker. `vary` casts an invariant result to a varying one, so that every rank's copy is
seen and weighs differently in the gradient.
"""

import json
import os
from pathlib import Path
from typing import Any

NUM_RANKS = 4

# (expression, shape of the operand on a rank, whether it varies, whether JAX has its gradient)
CASES: list[tuple[str, tuple[int, ...], bool, bool]] = [
    ("vary(lax.psum(x, 'i'))", (3,), True, True),
    ("vary(lax.psum(x, 'i'{src}))", (3,), False, True),
    ("vary(lax.psum({'a': x, 'b': 2 * x}, 'i')['b'])", (3,), True, True),
    ("vary(lax.psum(x > 0, 'i'))", (3,), True, False),
    ("x * lax.psum(1, 'i')", (3,), True, True),
    ("vary(lax.pmean(x, 'i'))", (3,), True, True),
    ("vary(lax.pmean(x, 'i'{src}))", (3,), False, True),
    ("vary(lax.pmax(x, 'i'))", (3,), True, False),
    ("vary(lax.pmin(x, 'i'))", (3,), True, False),
    ("lax.psum_scatter(x, 'i')", (4, 3), True, True),
    ("lax.psum_scatter(x, 'i'{src})", (4, 3), False, True),
    ("lax.psum_scatter(x, 'i', scatter_dimension=1, tiled=True)", (3, 8), True, True),
    ("lax.all_gather(x, 'i')", (3,), True, True),
    ("lax.all_gather(x, 'i'{src})", (3,), False, True),
    ("lax.all_gather(x, 'i', axis=1)", (3, 2), True, True),
    ("lax.all_gather(x, 'i', axis=-1, tiled=True)", (3, 2), True, True),
    ("vary(lax.all_gather(x, 'i', to='invarying'))", (3,), True, True),
    (
        "lax.pcast(lax.all_gather(x, 'i', to='reduced'), 'i', to='varying'{reduced})",
        (3,),
        True,
        True,
    ),
    # JAX 0.10.2 fails to transpose these: "Expected cotangent type float64[4,3,1]{V:i} but got".
    ("lax.all_to_all(x, 'i', 0, 1)", (4, 3), True, False),
    ("lax.all_to_all(x, 'i', 1, 0)", (3, 4), True, False),
    ("lax.all_to_all(x, 'i', 0, 2)", (4, 3, 2), True, False),
    ("lax.all_to_all(x, 'i', 1, 0, tiled=True)", (3, 8), True, True),
    ("lax.all_to_all(x, 'i', 1, 1, tiled=True)", (3, 8), True, True),
    ("lax.ppermute(x, 'i', [(0, 1), (1, 3)])", (3,), True, True),
    ("lax.pshuffle(x, 'i', [2, 0, 3, 1])", (3,), True, True),
    ("lax.pswapaxes(x, 'i', 1)", (3, 4), True, True),
    ("lax.pcast(x, 'i', to='varying'{src})", (3,), False, True),
]


def main() -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_RANKS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax  # type: ignore[import-not-found]
    import jax.numpy as jnp  # type: ignore[import-not-found]
    from jax import lax
    from jax.sharding import PartitionSpec as P  # type: ignore[import-not-found]

    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((NUM_RANKS,), ("i",))

    def run(
        expression: str, shape: tuple[int, ...], varies: bool, has_gradient: bool
    ) -> dict[str, object]:
        code = expression.replace("{src}", "").replace("{reduced}", "")
        # JAX does not type sums and extrema over groups.
        checked = not ("groups" in code and ("psum(" in code or "pmax(" in code))

        def body(x: Any) -> Any:
            x = x[0] if varies else x
            names = {"x": x, "lax": lax, "vary": lambda y: lax.pcast(y, "i", to="varying")}
            return eval(code, names)[None]

        specs = {"in_specs": P("i") if varies else P(), "out_specs": P("i")}
        f = jax.shard_map(body, mesh=mesh, check_vma=checked, **specs)
        whole = (NUM_RANKS, *shape) if varies else shape
        x = jnp.sin(1 + jnp.arange(jnp.prod(jnp.array(whole)), dtype=float)).reshape(whole)
        x = jax.device_put(x, jax.NamedSharding(mesh, specs["in_specs"]))
        y = jax.jit(f)(x)
        case = {"expression": expression, "varies": varies, "x": x.tolist(), "y": y.tolist()}
        if has_gradient:
            w = jnp.cos(jnp.arange(y.size, dtype=float)).reshape(y.shape)
            w = jax.device_put(w, jax.NamedSharding(mesh, P("i")))
            case["w"] = w.tolist()
            case["grad"] = jax.jit(jax.grad(lambda x: (f(x) * w).sum()))(x).tolist()
        return case

    lines = ",\n".join(json.dumps(run(*case)) for case in CASES)
    (Path(__file__).parents[1] / "golden" / "jax_lax.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
