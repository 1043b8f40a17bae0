"""Makes jax_programs.json: what real JAX computes for the programs of `jax_programs`.

JAX is no dependency; this was run once, with jax 0.10.2 on four CPU devices:

    python -m venv /tmp/jax && /tmp/jax/bin/pip install jax==0.10.2
    /tmp/jax/bin/python tests/lax/support/make_jax_programs.py
"""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
from jax_programs import PROGRAMS, STEPS  # type: ignore[import-not-found]  # beside this file

GOLDEN = Path(__file__).parents[2] / "golden" / "jax_programs.json"


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


NAMESPACE = SimpleNamespace(
    shard_map=jax.shard_map,
    P=jax.sharding.PartitionSpec,
    lax=jax.lax,
    grad=jax.grad,
    value_and_grad=jax.value_and_grad,
    vmap=jax.vmap,
    jvp=jax.jvp,
    checkpoint=jax.checkpoint,
    xp=jnp,
    max=jnp.max,
    mesh=mesh,
)


def sine(shape: tuple[int, ...], start: int) -> Any:
    return jnp.sin(start + jnp.arange(float(math.prod(shape)))).reshape(shape)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    found = {}
    for name, made in PROGRAMS.items():
        f, shapes = made(NAMESPACE)
        args = [sine(shape, 1 + k) for k, shape in enumerate(shapes)]
        found[name] = {"y": [y.tolist() for y in jax.tree.leaves(jax.jit(f)(*args))]}
        if name not in STEPS:

            def loss(*args: Any, f: Any = f) -> Any:
                leaves = jax.tree.leaves(f(*args))
                return sum((y * sine(y.shape, 2)).sum() for y in leaves)

            gradients = jax.jit(jax.grad(loss, tuple(range(len(args)))))(*args)
            found[name]["gradients"] = [g.tolist() for g in gradients]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
