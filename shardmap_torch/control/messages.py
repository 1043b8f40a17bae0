"""Texts of errors about ranks, and of the first difference between their programs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_tb
from typing import Final

from torch import Tensor
from torch.nn import Parameter

from shardmap_torch.control.board import PATIENCE, Report, Status, Value
from shardmap_torch.control.parting import Parting, find_parting
from shardmap_torch.core.source_location import error_site
from shardmap_torch.errors import listing


def describe_error(error: BaseException) -> str:
    """Formats it as `raised ValueError: too long at model.py:12`."""
    site = error_site(error)
    text = shorten(str(error).splitlines()[0] if str(error) else "")
    return f"raised {type(error).__name__}: {text}" + (f" at {site.place}" if site else "")


def shorten(text: str) -> str:
    """Truncates long texts of other libraries to 300 characters."""
    return text if len(text) <= 300 else f"{text[:300]}..."


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats it as `ranks 0, 2`; lists at most 16."""
    shown = ", ".join(map(str, sorted(ranks)[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + shown + more


def by_ranks(texts: Mapping[int, str], between: str = " ") -> Iterator[str]:
    """Yields a line for each different text, as in `ranks 0, 2 in all_reduce(...)`."""
    for text in dict.fromkeys(texts.values()):
        ranks = [rank for rank, other in texts.items() if other == text]
        yield f"{ranks_text(ranks)}{between}{text}"


def describe_ranks(
    size: int,
    statuses: Mapping[int, Status],
    missing: Sequence[int],
    silences: Mapping[int, float],
    failure: str,
) -> list[str]:
    """Formats the progress of each rank, in lines; ranks that do the same share one.

    Args:
        size: the number of ranks.
        statuses: the newest post of each, where one is known.
        missing: those that another waits for.
        silences: the seconds since each of the others posted.
        failure: of the store; empty if it answers.
    """
    lines = [f"  missing: {ranks_text(missing)}"] if missing else []
    texts: dict[int, str] = {}
    for rank in range(size):
        known = statuses.get(rank)
        texts[rank] = known.what if known is not None else "has never been heard of"
        silence = silences.get(rank, 0.0)
        if silence > _SILENT:
            texts[rank] += f"; not heard of for {silence:.0f} s: frozen, dead or unreachable"
    shown = [f"  {_PLURAL.sub(_plural, line)}" for line in by_ranks(texts)]
    lines += shown[:16]
    if len(shown) > 16:
        lines.append(f"  and {len(shown) - 16} more")
    if failure:
        lines.append(f"  the store does not answer: {failure}")
    return lines


_PLURAL: Final = re.compile(r"^(ranks .*?\d) (waits|runs|has)\b")
_VERBS: Final = {"waits": "wait", "runs": "run", "has": "have"}


def _plural(found: re.Match[str]) -> str:
    return f"{found[1]} {_VERBS[found[2]]}"


OF_TORCH: Final = (
    "Fix: all ranks must come to a collective of torch's own, in the same order, as they do with "
    "full_tensor(), get_state_dict(), clip_grad_norm_ and norms of DTensors: not under `if "
    "mesh.rank == 0:`, which is for what is done with its result."
)

_OF_DTENSORS: Final = (
    "Fix: a DTensor is moved by full(x), x.full_tensor() and x.redistribute(). After backward() "
    "the gradients of a parallelized module are those of the whole batch: leave out what adds "
    "them up, or divides them, once more."
)


_OF_MIXED: Final = (
    "  at {}\n{} a plain tensor, of one device, beside a DTensor: on processes the parameters of a "
    "parallelized module, their gradients and states of optimizers are DTensors.\nFix: make copies "
    "after parallelize, as by copy.deepcopy(module) or torch.zeros_like(parameter); save "
    "full(module.state_dict()), which all ranks call, and load that anywhere (what one rank saves "
    "without it has its shards alone); elsewhere full(x) is a plain tensor, and torch's "
    "distribute_tensor(x, p.device_mesh, p.placements) a DTensor like a parameter p."
)


def note_of_mixed(error: BaseException) -> str:
    """Returns what torch's refusal of a plain tensor beside a DTensor means; empty of others."""
    site = error_site(error)
    if site is None or "got mixed torch.Tensor and DTensor" not in f"{error}":
        return ""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    values = [x.f_locals for x in frames if x.f_code.co_filename == site.file][-1]
    words = dict.fromkeys(re.findall(r"[^\W\d]\w*", site.source))
    plain = [x for x in words if type(values.get(x)) in (Tensor, Parameter)]
    return _OF_MIXED.format(site, f"{' and '.join(plain)} is" if plain else "There is")


def fix_of_torchs(error: BaseException) -> str:
    """Returns advice for what a collective of torch's own has raised."""
    return _OF_DTENSORS if "Operator c10d." in f"{error}" else OF_TORCH


_SILENT: Final = 3 * PATIENCE.total_seconds()
"""Seconds without a post after which a rank is called silent; see `PATIENCE`."""


def without_sites(text: str) -> str:
    """Removes the source location from each line."""
    return "\n".join(line.split("  # ")[0] for line in text.splitlines())


def are_alike(reports: Mapping[int, Report]) -> bool:
    """Returns whether all ranks are about to do the same, source locations apart."""
    return len({without_sites(report.text) for report in reports.values()}) == 1


def difference(name: str, reports: Mapping[int, Report]) -> str:
    """Explains the first lines that differ between ranks, source locations apart.

    Args:
        name: of the function.
        reports: what each rank is about to do.
    """
    texts = {rank: report.text for rank, report in reports.items()}
    head, parting = f"{name}: processes run different programs", parting_of(reports)
    sites = {rank: report.site or "an unknown line" for rank, report in sorted(reports.items())}
    places, default = " " + "; ".join(by_ranks(sites, " at ")), _CODE
    if parting is not None:
        places, default = _listed(parting), parting.fix
    plain = {rank: without_sites(text) for rank, text in texts.items()}
    first = min(texts)
    others = [rank for rank in texts if plain[rank] != plain[first]]
    mine, other = _first_difference(texts[first], texts[others[0]]) if others else ("", "")
    is_other = bool(_CALL.search(mine) and _CALL.search(other))
    if parting is not None and (parting.are_others or is_other):
        return f"{head}. {_head(parting)}:{places}\n{default}"
    if not others:
        return (
            f"{head}: they have done different things before this call, which is the same on all "
            f"of them:\n  {texts[first].splitlines()[0]}\n"
            f"where:{places}\n"
            "Fix: call the same functions, and take the same gradients, in the same order on "
            "every process."
        )
    alike = [rank for rank in texts if plain[rank] == plain[first]]
    unlike = [rank for rank in others if plain[rank] == plain[others[0]]]
    lines = f"  {ranks_text(alike)}: {mine.strip()}\n  {ranks_text(unlike)}: {other.strip()}"
    data = _fix_of_data(mine, other)
    if parting is not None:  # the lines of the user tell more, and all of it where data differ
        head = f"{head}. They have come to it at different lines:{places}"
        head += "" if data else f"\nThe first difference:\n{lines}"
        return f"{head}\n{default}{_ROWS * _are_batches(mine, other)}"
    fix = data or default + _ROWS * _are_batches(mine, other)
    head = f"{name}: processes pass other data" if data else head
    return f"{head}. The first difference:\n{lines}\nwhere:{places}\n{fix}"


_CALL: Final = re.compile(r": a DTensor, (argument|result) \d+ of call \d+$")
"""Ends what is another DTensor, as the batch of another turn of a loop is."""


def _head(parting: Parting) -> str:
    if not parting.alone:
        return "They have come to different calls"
    place = parting.texts()[parting.alone[0]].partition(": ")[0]
    runs = "runs" if len(parting.alone) == 1 else "run"
    return f"Only {ranks_text(parting.alone)} {runs} {place}"


def _listed(parting: Parting) -> str:
    return "".join(f"\n  {line}" for line in by_ranks(parting.texts(), ": "))


def parting_of(reports: Mapping[int, Report]) -> Parting | None:
    """Finds where ranks part, by the lines of their last steps."""
    return find_parting({rank: report.trail for rank, report in reports.items()})


def _fix_of_data(one: str, other: str) -> str:
    """Says what to do about two lines that differ in values or dtypes; empty if in others too."""
    if _HASH.search(one) and _HASH.sub("", one) == _HASH.sub("", other):
        return (
            "Fix: pass the same global values on every process, drawn from one seed or read alike; "
            "rows that each process has of its own become global by from_local(rows, mesh, spec)."
        )
    if _DTYPE.search(one) and _DTYPE.sub("[", one) == _DTYPE.sub("[", other):
        return "Fix: pass tensors of one dtype on every process."
    return ""


_CODE: Final = (
    "Fix: run the same code with the same Python values and modes (train() and eval() too) on "
    "every process, and pass the same DTensors: a clone, or a new one of equal values, is another. "
    "What depends on the rank inside of a body is the tensor axis_index(axis)."
)
_HASH: Final = re.compile(r", hash \w+")
_DTYPE: Final = re.compile(r"\b(float|int|uint|bfloat|complex|bool)\d*\[")


def _are_batches(one: str, other: str) -> bool:
    """Returns whether two lines are of one argument in two sizes, split in the same way."""
    found = [_ARGUMENT.fullmatch(line) for line in (one, other)]
    parts = [() if each is None else each.groups() for each in found]
    return all(parts) and parts[0][::2] == parts[1][::2] and parts[0] != parts[1]


_ARGUMENT: Final = re.compile(r"\s*([^%\s]\S*): (\w+\[.*\]), (P\('.*)")

_ROWS: Final = (
    " A batch has as many rows on every process: drop the last one of a loader (drop_last=True), "
    "or pad it."
)


def unequal_values(name: str, reports: Mapping[int, Report]) -> str:
    """Explains which values differ between ranks that must share them; empty if none does."""
    copies: dict[tuple[str, str], dict[int, Value]] = {}
    for rank, report in sorted(reports.items()):
        for value in report.values:
            copies.setdefault((value.path, value.shard), {})[rank] = value
    problems, repairs, site, plain = [], set(), "", False
    for (path, shard), of_rank in copies.items():
        first = min(of_rank)
        other = [rank for rank, value in of_rank.items() if value.bits != of_rank[first].bits]
        if other:
            value = of_rank[first]
            of = f"{shard}, " * bool(shard)
            problems.append(
                f"{path}: {value.what}, {of}has other values on {ranks_text(other)} than on rank "
                f"{first}"
            )
            repairs.add(value.repair)
            site, plain = value.site, plain or value.is_plain
    if not problems:
        return ""
    kind = "a plain tensor is a global value, equal on all processes" if plain else _COPIES
    head = f"{name}: {kind}, and these are not{site}:"
    return "\n".join([listing(head, problems), *(f"Fix: {fix}" for fix in sorted(repairs))])


_COPIES: Final = "a DTensor is one value, equal on all ranks that have a copy of it"


_REFUSAL: Final = re.compile(r"\S.* (is rejected|raises \w+): ")


def _first_difference(one: str, two: str) -> tuple[str, str]:
    ours, theirs = one.splitlines(), two.splitlines()
    for mine, other in zip(ours, theirs, strict=False):
        if without_sites(mine) != without_sites(other):
            # A refusal, which follows the arguments, is shown beside the call of the other.
            if _REFUSAL.match(mine) or _REFUSAL.match(other):
                pairs = (mine, ours[0]), (other, theirs[0])
                mine, other = (x if _REFUSAL.match(x) else head for x, head in pairs)
            return mine, other
    shorter = min(len(ours), len(theirs))
    mine, other = ("".join(lines[shorter:][:1]) or "  its end" for lines in (ours, theirs))
    return mine, other
