"""JAX's shard_map on as many host devices, eager and jitted; needs an environment with JAX."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.peers.problem import FORWARD, GRADIENTS, LEAVES, NUM_RANKS, call_of, leaf, mlp
from benchmarks.peers.serving import Contestant, serve

# Before JAX is imported: one thread, as the others have, and devices to shard over.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={NUM_RANKS} "
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # type: ignore[import-not-found]
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding  # type: ignore[import-not-found]
from jax.sharding import PartitionSpec as P

Cases = dict[tuple[str, str], Contestant]


def total(values: Any) -> float:
    """Adds up the magnitudes of results."""
    return sum(float(np.abs(np.asarray(x, np.float64)).sum()) for x in jax.tree.leaves(values))


def ready(function: Callable[..., Any], *args: Any) -> Any:
    """Calls and waits: JAX computes asynchronously."""
    return jax.block_until_ready(function(*args))


def calls() -> Cases:
    """Identities on one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    x = jax.device_put(leaf(), NamedSharding(mesh, P("tp")))
    cases: Cases = {}
    for count in LEAVES:
        specs = (P("tp"),) * count
        eager = jax.shard_map(lambda *xs: xs, mesh=mesh, in_specs=specs, out_specs=specs)
        for name, each in {"JAX, eager": eager, "JAX, jitted": jax.jit(eager)}.items():
            cases[call_of(count), name] = Contestant(partial(ready, each, *[x] * count), total)
    return cases


def plain(x: Any, w1: Any, w2: Any) -> Any:
    """Computes the MLP on one device."""
    return jnp.maximum(x @ w1, 0) @ w2


def mlps() -> Cases:
    """The MLP unsharded, and over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    specs = (P(), P(None, "tp"), P("tp"))
    mapped = jax.shard_map(
        lambda x, w1, w2: jax.lax.psum(plain(x, w1, w2), "tp"),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
    )
    arrays = list(mlp())
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    one = [jax.device_put(each, jax.devices()[0]) for each in arrays]
    cases: Cases = {}
    ways = {
        "JAX, unsharded, jitted": (plain, one, jax.jit),
        "JAX, eager": (mapped, placed, lambda f: f),
        "JAX, jitted": (mapped, placed, jax.jit),
    }
    for name, (function, operands, compiled) in ways.items():
        differentiated = jax.grad(lambda x, w1, w2, f=function: f(x, w1, w2).sum(), (0, 1, 2))
        for case, each in ((FORWARD, function), (GRADIENTS, differentiated)):
            call = partial(ready, compiled(each), *operands)
            cases[case, name] = Contestant(call, total)
    return cases


if __name__ == "__main__":
    serve(f"JAX {jax.__version__}", {**calls(), **mlps()})
