"""AdamW as the example uses it: warm-up and cosine decay, matrices decayed, gradients clipped."""

import optree

from examples.gpt import model
from examples.gpt.model import Config
from shardmap_torch.optim import Optimizer, adamw, warmup_cosine, zero

PEAK = 4e-3
MAX_NORM = 1.0


def make_optimizer(
    config: Config, steps: int, warmup: int = 20, max_norm: float = MAX_NORM
) -> Optimizer:
    """Takes pending gradients; sums and clips them, and steps where the moments lie."""
    rate = warmup_cosine(PEAK, steps=steps, warmup=warmup, final=PEAK / 10)
    specs, moments = model.specs(config), model.moment_specs(config)
    decays = optree.tree_map_with_path(lambda path, _: not path[-1].endswith("norm"), specs)
    plain = adamw(rate, betas=(0.9, 0.98), weight_decay=0.1, decays=decays)
    return zero(plain, specs, moments, config.parallel.pending, max_norm=max_norm)
