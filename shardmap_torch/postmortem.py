"""Compares the flight recorders of all ranks: `python -m shardmap_torch postmortem DIR`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardmap_torch.control.messages import by_ranks, ranks_text
from shardmap_torch.control.recorder import Dump, Entry, dump_folder, read_dump, usable_folder
from shardmap_torch.errors import PostmortemError


def compare(dumps: Sequence[Dump]) -> str:
    """Compares the dumps of the ranks, and reports the first collective in which they differ.

    Returns:
        A report of a few lines: the last collective that all ranks have in common, the first
        difference with the line of each rank, and the error of each rank.

    Example:
        >>> from shardmap_torch.control.recorder import Dump, Entry
        >>> def entry(operation, line):
        ...     return Entry(1, 1, "f", operation, "tp", "float32[4]", line, "begun")
        >>> first = Dump(0, "timed out", [entry("all_reduce('tp', Partial -> I)", "a.py:3")])
        >>> second = Dump(1, "timed out", [entry("all_gather('tp', V -> I)", "a.py:7")])
        >>> print(compare([first, second]))
        ranks 0, 1: 1 collectives
        first difference, at #1:
          rank 0: #1 call 1 of f: all_reduce('tp', Partial -> I) of float32[4] at a.py:3, begun
          rank 1: #1 call 1 of f: all_gather('tp', V -> I) of float32[4] at a.py:7, begun
        reasons:
          ranks 0, 1: timed out
    """
    by_rank = {dump.rank: {entry.seq: entry for entry in dump.entries} for dump in dumps}
    last = max((seq for entries in by_rank.values() for seq in entries), default=0)
    lines = [f"{ranks_text(list(by_rank))}: {last} collectives"]
    # Ranks may have dropped different numbers of old entries.
    first = max((min(entries, default=0) for entries in by_rank.values()), default=0)
    for seq in range(first, last + 1):
        at = {rank: entries.get(seq) for rank, entries in by_rank.items()}
        if len({None if entry is None else entry.what for entry in at.values()}) > 1:
            lines += [f"first difference, at #{seq}:", *_lines(_described(at, by_rank))]
            break
    else:
        begun = {rank: entries.get(last) for rank, entries in by_rank.items()}
        lines += ["no difference; the last collective:", *_lines(_described(begun, by_rank))]
    reasons = {dump.rank: dump.reason.splitlines()[0] for dump in dumps if dump.reason}
    return "\n".join([*lines, *(["reasons:", *_lines(reasons)] if reasons else [])])


def _described(
    at: Mapping[int, Entry | None], by_rank: Mapping[int, Mapping[int, Entry]]
) -> dict[int, str]:
    def text(rank: int, entry: Entry | None) -> str:
        if entry is not None:
            return str(entry)
        newest = max(by_rank[rank], default=None)
        return f"nothing after {by_rank[rank][newest]}" if newest is not None else "nothing"

    return {rank: text(rank, entry) for rank, entry in at.items()}


def _lines(texts: Mapping[int, str]) -> list[str]:
    return [f"  {line}" for line in by_ranks(texts, ": ")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report on a folder of dumps, by default that of this user's newest run.

    Exits with 2, and one line about why, where there is none.
    """
    parser = argparse.ArgumentParser(
        prog="python -m shardmap_torch postmortem", description=__doc__
    )
    parser.add_argument("folder", type=Path, nargs="?", default=usable_folder())
    try:
        text = compare(_read_dumps(parser.parse_args(arguments).folder))
    except PostmortemError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    # A file may hold what a terminal would obey.
    print("".join(c if c.isprintable() or c in "\t\n" else "?" for c in text))


def _read_dumps(folder: Path | None) -> Sequence[Dump]:
    if folder is None:
        raise PostmortemError(f"{dump_folder()} is not this user's alone: others may write there.")
    if not folder.is_dir():
        raise PostmortemError(f"There is no folder {folder}.")
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise PostmortemError(f"There are no dumps rank-*.json in {folder}.")
    return [read_dump(path) for path in paths]


if __name__ == "__main__":
    main()
