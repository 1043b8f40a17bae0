"""Units: numbers of bytes and times as people write them."""

from collections.abc import Iterable


def show_bytes(count: float) -> str:
    """Formats a number of bytes.

    Example:
        >>> show_bytes(80e9), show_bytes(1234)
        ('80 GB', '1.23 KB')
    """
    return _scaled(count, 1e3, ("B", "KB", "MB", "GB", "TB", "PB"))


def show_seconds(seconds: float) -> str:
    """Formats a time.

    Example:
        >>> show_seconds(0.0123)
        '12.3 ms'
    """
    return _scaled(seconds * 1e6, 1e3, ("us", "ms", "s"))


def _scaled(value: float, base: float, units: Iterable[str]) -> str:
    *smaller, largest = units
    for unit in smaller:
        if value < base:
            return f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {largest}"
