"""A GPT in Megatron's style, written per rank with calls of torch.distributed alone."""
