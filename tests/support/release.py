"""The release of torch that is pinned, with which stored lists of its operators are made."""

from pathlib import Path
from typing import Final

import torch

_PINS: Final = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
IS_PINNED: Final = f"torch=={torch.__version__.partition('+')[0]}" in _PINS
