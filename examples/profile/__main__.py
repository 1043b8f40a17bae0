"""`python -m examples.profile`: see `examples/gpt/profile.py`.

A folder without `__init__.py`, so that scripts beside it find Python's own `profile` module.
"""

import torch

from examples.gpt.profile import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
