"""Records jax_random.json: the numbers that JAX draws in the calls of tests/random/test_draws.py.

JAX is no dependency; this was run once, with jax 0.10.2 on the CPU:

    python -m venv /tmp/jax && /tmp/jax/bin/pip install jax==0.10.2
    /tmp/jax/bin/python tests/random/support/record_jax.py
"""

import json
import os
from pathlib import Path
from typing import Any

SEEDS = [0, 1, 42, 2**31, 2**40 + 17, 2**63 - 1]


def main() -> None:
    os.environ["JAX_ENABLE_X64"] = "1"
    import jax  # type: ignore[import-not-found]
    import numpy as np

    def words(keys: Any) -> Any:
        return jax.random.key_data(keys).tolist()

    cases = []
    for seed in SEEDS:
        key = jax.random.key(seed)
        cases.append(
            {
                "seed": seed,
                "key": words(key),
                "split": words(jax.random.split(key, 3)),
                "fold_in": words(jax.random.fold_in(key, 7)),
                "bits": [str(b) for b in jax.random.bits(key, (2, 3), "uint64").ravel().tolist()],
                "uniform float32": jax.random.uniform(key, (2, 3), "float32").tolist(),
                "uniform float64": jax.random.uniform(key, (2, 3), "float64").tolist(),
                "normal float32": jax.random.normal(key, (2, 3), "float32").tolist(),
                "normal float64": jax.random.normal(key, (2, 3), "float64").tolist(),
                "bernoulli": jax.random.bernoulli(key, np.float32(0.25), (2, 16)).tolist(),
                "between": jax.random.uniform(
                    key, (2, 3), "float32", minval=-1.5, maxval=2.5
                ).tolist(),
            }
        )
    path = Path(__file__).parents[2] / "golden/jax_random.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()
