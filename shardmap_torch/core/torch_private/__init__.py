"""Private names of torch: the one package that imports them, and probes if a release has them.

torch promises nothing about names that begin with an underscore. `names` lists them, with the
releases that are known to have them and what their lack costs. Every module of the product takes
them from `engine`, `dtensor` or `dynamo`; `tests/core/test_torch_private.py` holds that.
"""

from shardmap_torch.core.torch_private.names import ENGINE, demand

demand(ENGINE)  # before `engine` imports them one by one, which would name only the first
