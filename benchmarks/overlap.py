"""Measures how much communication the overlapped matmuls hide.

    .venv/bin/python -m benchmarks.overlap            # needs root, iproute2, 2 free cores

Two gloo ranks, one thread each, run in two network namespaces joined by a veth pair that `tc tbf`
limits to a rate at which communication takes about as long as computation. (On loopback there is
nothing to hide: the same cores that multiply would move the bytes.) In each round every variant
of an operation runs once, the plain matmul at both ends. Rounds are rejected in which other
processes used more than --max-load cores, or the plain matmul's speed changed by more than
--max-drift (a virtual machine's does). Figures are medians over rounds of the slower rank.

hidden = (T_comm + T_compute - T_overlap) / min(T_comm, T_compute), where T_comm is one plain
exchange of the same bytes and T_compute the unchunked matmuls. `unfused` is the best variant that
overlaps nothing. `virtual` is the same code on the alpha-beta clock, told the latency, the
bandwidth and the matmul rate of this run. Nothing outside the two namespaces is touched.
"""

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.link import CannotRunError, run_ranks, two_namespaces
from benchmarks.overlap_variants import COMM, COMPUTE, OPERATIONS, OVERLAP, UNFUSED, Setting
from benchmarks.quiet import Limits
from shardmap_torch.kernels.planner import Fabric
from tests.kernels.support.virtual_network import VirtualNetwork


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median seconds by variant."""
    return {
        name: statistics.median(each["seconds"][name] for each in rounds)
        for name in rounds[0]["seconds"]
    }


def fitted_fabric(
    setting: Setting, speeds: Mapping[str, float], compute: float, comm: float
) -> Fabric:
    """The virtual clock's view of this machine.

    `compute` and `comm` are medians of the rounds; of the speeds measured apart only a ratio is
    used, how much slower a chunk's rows are multiplied alone than in the whole matmul.
    """
    flops = 2.0 * setting.rows * setting.inner * setting.columns
    num_bytes = 4.0 * setting.rows * setting.inner / 2
    slower = speeds["chunk"] * 2 * setting.parts / speeds["whole"]
    return Fabric(
        latency=speeds["latency"],
        bandwidth=num_bytes / (comm - speeds["latency"]),
        flops=flops / compute,
        memory=1e10,
        launch=max(0.0, slower - 1) * compute / (2 * setting.parts),
    )


def virtual_seconds(setting: Setting, fabric: Fabric) -> dict[str, dict[str, float]]:
    """Runs the same kernels on the alpha-beta clock, without data."""
    predicted: dict[str, dict[str, float]] = {}
    for op, build in OPERATIONS.items():
        for name, variant in build(replace(setting, device="meta")).items():
            if not variant.real_only:
                network = VirtualNetwork(2, fabric)
                network.run(variant.kernel)
                predicted.setdefault(op, {})[name] = network.seconds
    return predicted


def hidden(seconds: Mapping[str, float], roles: Mapping[str, str], name: str) -> float:
    by_role = {role: seconds[each] for each, role in roles.items() if role in (COMPUTE, COMM)}
    total, shorter = sum(by_role.values()), min(by_role.values())
    return (total - seconds[name]) / shorter


def report(setting: Setting, result: Mapping[str, Any]) -> Iterator[str]:
    """The table, one line a variant."""
    measured = {op: medians(rounds) for op, rounds in result["rounds"].items() if rounds}
    gather = measured["all_gather_matmul"]
    fabric = fitted_fabric(setting, result["speeds"], gather["matmul"], gather["exchange"])
    virtual = virtual_seconds(setting, fabric)
    speed = result["fabric"]
    yield (
        f"`auto` measures {speed['bandwidth']:.2e} B/s, {speed['flops']:.2e} flop/s, "
        f"{speed['overlap']:.0%} of a transfer under a matmul"
    )
    for op, seconds in measured.items():
        table = OPERATIONS[op](replace(setting, device="meta"))
        roles = {name: variant.role for name, variant in table.items()}
        kept, rejected = result["rounds"][op], result["rejected"][op]
        yield f"{op}: {len(kept)} rounds, {rejected} rejected"
        yield f"  {'':45} measured  hidden  speed-up | virtual  hidden"
        best = min(seconds[name] for name, role in roles.items() if role == UNFUSED)
        for name, role in roles.items():
            line = f"  {role:8} {name:36} {seconds[name] * 1e3:7.1f} ms"
            is_whole = role not in (COMPUTE, COMM)
            line += f"  {hidden(seconds, roles, name):5.0%}" if is_whole else " " * 7
            line += f"  {best / seconds[name]:7.2f}x" if is_whole else " " * 10
            if name in virtual[op]:
                line += f" | {virtual[op][name] * 1e3:5.1f} ms"
                line += f"  {hidden(virtual[op], roles, name):5.0%}" if is_whole else ""
            yield line
        spread = sorted(hidden(each["seconds"], roles, _overlapped(roles)) for each in kept)
        quarter = len(spread) // 4
        yield (
            f"  hidden, round by round: median {statistics.median(spread):.0%}, "
            f"middle half {spread[quarter]:.0%} to {spread[-1 - quarter]:.0%}"
        )


def _overlapped(roles: Mapping[str, str]) -> str:
    return next(name for name, role in roles.items() if role == OVERLAP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="4096x1024x2048", help="rows x inner x columns")
    parser.add_argument("--parts", type=int, default=8, help="chunks per rank's block")
    parser.add_argument(
        "--backward-parts",
        type=int,
        default=2,
        help="the same for the backward, which computes twice as long and so needs fewer",
    )
    parser.add_argument("--rate", default="500mbit", help="tbf rate of the link")
    parser.add_argument("--burst", default="256kb", help="bucket of tbf; see docs/overlap.md")
    parser.add_argument("--json", type=Path, help="write every round here")
    Limits.add_to(parser, rounds=15, seconds=120.0)
    args = parser.parse_args()
    rows, inner, columns = map(int, args.shape.split("x"))
    setting = Setting(rows, inner, columns, args.parts, args.backward_parts)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Clean up when killed, too.
    options = {"setting": asdict(setting), **asdict(Limits.of(vars(args)))}
    try:
        with two_namespaces(args.rate, args.burst) as link:
            result = run_ranks(link, "benchmarks.overlap_rank", options, args.seconds)
    except CannotRunError as error:
        raise SystemExit(f"benchmarks/overlap.py cannot run here: {error}") from error
    if args.json:
        args.json.write_text(json.dumps(result))
    print(f"{args.shape} float32, link {args.rate}, {args.parts} parts", end="")
    print(f" ({args.backward_parts} in the backward)")
    if not all(result["rounds"].values()):
        raise SystemExit("no undisturbed round: run it on a quiet machine, or raise --max-load")
    print("\n".join(report(setting, result)))


if __name__ == "__main__":
    main()
