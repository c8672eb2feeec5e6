"""Parsing and formatting of sizes, counts, lengths, speeds and times."""

import math
import re

from legroom.errors import LegroomError

KIB, MIB, GIB = 2**10, 2**20, 2**30

_SUFFIXES = {"": 1000, "b": 1000, "i": 1024, "ib": 1024}
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power for power, prefix in enumerate("kmgt", 1) for suffix, base in _SUFFIXES.items()
}
_NUMBER = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_TIME = re.compile(rf"\s*([0-9.e+-]+?)\s*({'|'.join(_SECONDS)})\s*")


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up to a whole number, as vLLM's `cdiv`."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `a`, as vLLM's `round_up`."""
    return cdiv(a, multiple) * multiple


def parse_bytes(text: str, what: str = "size") -> int:
    """Bytes of `79.10GiB`, `24 GB`, `16M` or a plain number of at least a MiB; else LegroomError naming `what`."""
    found = _NUMBER.fullmatch(text)
    unit = found.group(2).lower() if found else ""
    if not found or unit not in _BYTES:
        raise LegroomError(f"{what} {text!r} is not a size", "write it like 24GiB, 79.1GiB or 85899345920")
    size = int(float(found.group(1)) * _BYTES[unit])
    if not unit and 0 < size < MIB:
        raise LegroomError(f"{what} {text} lacks its unit", f"write it with its unit, like {text.strip()}GiB")
    return size


def parse_count(text: str, what: str = "number") -> int:
    """A whole number: `4096`, `32k` (32,000), `32K` (32,768), as vLLM parses them; else LegroomError naming `what`."""
    found = _NUMBER.fullmatch(text)
    scale = {"": 1, "k": 10**3, "K": KIB, "m": 10**6, "M": MIB, "g": 10**9, "G": GIB, "t": 10**12, "T": 2**40}
    if not found or found.group(2) not in scale:
        raise LegroomError(f"{what} {text!r} is not a number", "write it like 4096, 32k (32,000) or 32K (32,768)")
    return int(float(found.group(1)) * scale[found.group(2)])


def parse_whole(text: str, option: str, least: int, most: int) -> int:
    """The number given to an option in plain digits; LegroomError outside `least` to `most` or otherwise written."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise LegroomError(f"{option} {text!r} is not a number from {least} to {most:,}", f"write it like {option} 4")
    return int(text)


def parse_length(text: str, what: str = "length") -> int:
    """Tokens of a context length; `32k` is 32,768, though vLLM's flags read 32,000. LegroomError otherwise."""
    found = _NUMBER.fullmatch(text)
    scale = {"": 1, "k": KIB, "m": MIB}.get(found.group(2).lower(), 0) if found else 0
    if not found or (scale == 1 and "." in text) or not (tokens := int(float(found.group(1)) * scale)):
        raise LegroomError(f"{what} {text!r} is not a length of at least 1 token", "write it like 4096 or 32k (32,768)")
    return tokens


def parse_speed(text: str | None, what: str, default: float) -> float:
    """Bytes per second of `2GB/s`; `default` for None; LegroomError, naming `what`, for others or below 100 kB/s."""
    if text is None:
        return default
    speed = parse_bytes(text.removesuffix("/s"), what)
    if speed < 10**5:
        raise LegroomError(f"{what} {text} is too slow to be one", f"write it like {what} 2GB/s")
    return float(speed)


def seconds_in(text: str) -> float:
    """Seconds of `2s`, `150ms`, `90min`, `12h`, `2d`, `1w` or a plain number; NaN for other text."""
    found = _TIME.fullmatch(text.lower())
    try:
        return float(found[1]) * _SECONDS[found[2]] if found else math.nan
    except ValueError:
        return math.nan


def parse_seconds(text: str | None, what: str) -> float | None:
    """Seconds of `2s`, `150ms` or `0.2`; None for None; LegroomError unless above 0 and below a day."""
    if text is None:
        return None
    seconds = seconds_in(text)
    if not 0 < seconds < 86400:
        raise LegroomError(f"{what} {text!r} is not a time", f"write it like {what} 2s or {what} 150ms")
    return seconds


def gib(bytes_: float, digits: int = 2) -> str:
    """Bytes as text, `12.34 GiB`; with two digits, `1.2 MiB` below 0.005 GiB."""
    if 0 < bytes_ < GIB / 200 and digits == 2:
        return f"{bytes_ / MIB:.1f} MiB"  # not 0.00 GiB
    return f"{bytes_ / GIB:.{digits}f} GiB"


def human_bytes(bytes_: float) -> str:
    """Bytes as text: `12.34 GiB`, or `56.7 MiB` below 0.1 GiB."""
    return gib(bytes_) if abs(bytes_) >= GIB / 10 else f"{bytes_ / MIB:.1f} MiB"
