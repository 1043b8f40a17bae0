"""The page of an estimate: both lanes and the memory over time, and what each line costs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from shardmap_torch.planning.schedule import COMPUTE, MESSAGES, Span
from shardmap_torch.report.page import Entry, Line
from shardmap_torch.report.units import show_bytes, show_seconds

WIDTH, LANE, AREA = 960, 36, 120
"""Sizes of the picture, in pixels."""

_LANES: Final = (COMPUTE, MESSAGES)


def timeline(spans: Sequence[Span], live: Sequence[int]) -> str:
    """Draws both lanes, a stroke where one is busy, and the memory below, as SVG."""
    seconds = max((span.end for span in spans), default=0.0) or 1.0
    parts = [
        f'<text x="0" y="{LANE * at + 14}">{lane}</text>'
        f'<path class="{lane}" stroke-width="12" d="{_strokes(spans, lane, seconds)}" '
        f'transform="translate(0 {LANE * at + 26})"/>'
        for at, lane in enumerate(_LANES)
    ]
    top, peak = LANE * len(_LANES) + 20, max(live) or 1
    parts += [
        f'<text x="0" y="{top}">memory, at most {show_bytes(peak)}</text>',
        f'<path class="area" d="{_area(spans, live, seconds, peak)}" '
        f'transform="translate(0 {top + 8})"/>',
        f'<text x="{WIDTH}" y="{top + AREA + 24}" text-anchor="end">{show_seconds(seconds)}</text>',
    ]
    label = f"Timeline of {show_seconds(seconds)}: {' and '.join(_LANES)}, and the memory below"
    height = top + AREA + 30
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _strokes(spans: Sequence[Span], lane: str, seconds: float) -> str:
    """Draws the times at which a lane is busy, of which those within a pixel are one."""
    strokes: list[list[float]] = []
    for span in spans:
        if span.lane != lane or span.step.waits:
            continue
        start, end = (WIDTH * at / seconds for at in (span.start, span.end))
        if strokes and start - strokes[-1][1] < 1:
            strokes[-1][1] = end
        else:
            strokes.append([start, end])
    return "".join(f"M{start:.1f} 0H{end:.1f}" for start, end in strokes)


def _area(spans: Sequence[Span], live: Sequence[int], seconds: float, peak: int) -> str:
    """Draws the memory: of each pixel the largest."""
    heights: dict[int, int] = {0: live[0]}
    for span, alive in zip(spans, live[1:], strict=True):
        x = round(WIDTH * span.end / seconds)
        heights[x] = max(alive, heights.get(x, 0))
    line = "".join(f"L{x} {AREA - AREA * y / peak:.1f}" for x, y in sorted(heights.items()))
    return f"M0 {AREA}{line}V{AREA}Z"


def entries(spans: Sequence[Span], peak: Line | None) -> Mapping[Line, Sequence[Entry]]:
    """Says beside each line what its operators and messages take, forward and backward."""
    kinds: defaultdict[Line, defaultdict[tuple[bool, bool], list[Span]]]
    kinds = defaultdict(lambda: defaultdict(list))
    for span in spans:
        step = span.step
        if step.site is not None:
            kinds[step.site.file, step.site.line][bool(step.axes), step.backward].append(span)
    found = {line: [*_of_line(each)] for line, each in kinds.items()}
    if peak in found:
        found[peak].append(Entry("Here most memory is alive."))
    return found


def _of_line(kinds: Mapping[tuple[bool, bool], Sequence[Span]]) -> Iterator[Entry]:
    for (is_message, backward), spans in sorted(kinds.items()):
        seconds = sum(span.end - span.start for span in spans)
        flops, sent = sum(span.step.flops for span in spans), sum(span.step.sent for span in spans)
        what = ("message" if is_message else "operator") + "s" * (len(spans) > 1)
        words = [f"{flops:.3g} FLOP"] * bool(flops) + [f"sends {show_bytes(sent)}"] * bool(sent)
        yield Entry(
            f"{show_seconds(seconds)} of {len(spans)} {what}" + ", backward" * backward,
            "collective" if is_message else "value",
            more=", ".join(words),
        )
