"""A GPT as pure functions, sharded by shard_map; `examples/train_gpt.py` trains it."""
