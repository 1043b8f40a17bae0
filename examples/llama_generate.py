"""Asks SmolLM2-135M something, tensor-parallel over 3 ranks, and streams its answer.

    make generate                                              # installs the model, runs this
    python examples/llama_generate.py "Why is the sky blue?"   # 3 simulated ranks
    torchrun --nproc-per-node 3 examples/llama_generate.py     # the same on three processes
    python examples/llama_generate.py --compare                # and beside the unsharded model

The model is `examples/llama/model.py`; it is checked with check="global".
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from examples.llama import model
from examples.llama.generate import greedy, greedy_on_one_device
from examples.llama.pretrained import MissingModelError, find_weights, load
from shardmap_torch import SpecError, device_put, make_mesh


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is a tensor, in two sentences?")
    parser.add_argument("--tokens", type=int, default=50, help="at most so many")
    parser.add_argument("--tp", type=int, default=3, help="ranks; 9 heads and 3 key heads allow 3")
    parser.add_argument("--compare", action="store_true", help="run the unsharded model as well")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> tuple[list[int], list[int]]:
    """Prints the answer; returns its tokens; on rank 0 the unsharded model's too, if asked for."""
    options = parse(arguments)
    config, params, tokenizer = load(find_weights(), options.tp)
    mesh = make_mesh((options.tp,), ("tp",))
    shown = mesh.rank == 0
    prompt = tokenizer.chat(options.question)
    sharded = device_put(params, mesh, model.specs(config))
    if shown:
        print(f"{mesh}, {config}\n\n{options.question}")
    tokens: list[int] = []
    began = time.perf_counter()

    def counted(each: int) -> int:
        nonlocal began
        if len(tokens) < 2:  # the prompt and the first decoding are checked before they run
            began = time.perf_counter()
        tokens.append(each)
        return each

    stream = greedy(mesh, sharded, config, prompt, options.tokens)
    for text in tokenizer.stream(map(counted, stream)):
        print(text if shown else "", end="", flush=True)
    seconds = time.perf_counter() - began
    expected: list[int] = []
    if options.compare and shown:
        began = time.perf_counter()
        expected = list(greedy_on_one_device(params, config, prompt, len(tokens)))
        unsharded = time.perf_counter() - began
    if shown:
        print(f"\n\n{(len(tokens) - 2) / max(seconds, 1e-9):.1f} tokens/s", end="")
        if options.compare:
            same = sum(a == b for a, b in zip(tokens, expected, strict=True))
            print(
                f"; unsharded {len(tokens) / unsharded:.1f}; {same} of {len(tokens)} equal", end=""
            )
        print()
    return tokens, expected


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except (MissingModelError, SpecError) as error:
        sys.exit(str(error))
