"""Images, audio and video in a request: their number, bytes, and pixels when decoded."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from legroom.records import dataclass

_MODALITIES = ("image", "audio", "video")
_TYPES = ("{0}_url", "input_{0}", "{0}", "{0}_embeds")
KINDS: Mapping[str, str] = {form.format(kind): kind for kind in _MODALITIES for form in _TYPES} | {"image_pil": "image"}
_NAMES = frozenset(KINDS)
_EMBEDS = frozenset(key for key in KINDS if key.endswith("_embeds"))
_JPEG = b"\xff\xd8"


@dataclass(frozen=True, slots=True)
class Media:
    kind: str
    sent_bytes: int
    """0 for a remote URL."""
    pixels: int | None
    remote: bool


def media_of(part: Mapping[str, Any]) -> Media | None:
    """The image, audio or video that a content part holds, with its bytes and pixels; None where it holds none."""
    named_type = part.get("type")
    kind = KINDS.get(named_type) if isinstance(named_type, str) else None
    # In the short form the key alone says the kind; beside a `uuid` the type is ignored (0.32).
    short = kind is None and (named_type is None or part.get("uuid") is not None) and not _NAMES.isdisjoint(part)
    if kind is None and not short:
        return None
    text = _url_or_data(part)
    if kind is None:
        if text is None:
            return None
        kind = next(KINDS[key] for key in KINDS if key in part)
    if text is None:
        return Media(kind, 0, None, remote=False)
    if text[:5].lower() == "data:":
        head, _, data = text.partition(",")
        size = len(data) * 3 // 4 if ";base64" in head else len(data)
        pixels = _base64_image_pixels(data) if kind == "image" and ";base64" in head else None
        return Media(kind, size, pixels, remote=False)
    if "://" in text[:12]:
        return Media(kind, 0, None, remote=True)
    return Media(kind, len(text) * 3 // 4, _base64_image_pixels(text) if kind == "image" else None, remote=False)


def values_beside_media(part: Mapping[str, Any]) -> list[Any]:
    """The values of a content part with media except the media's own data or URL, such as its text."""
    address = _url_or_data(part)
    rest: list[Any] = []
    for key, value in part.items():
        if key in _EMBEDS or value is address:
            continue
        inner = value.values() if isinstance(value, dict) else (value,)
        rest += [item for item in inner if item is not address]
    return rest


def _url_or_data(part: Mapping[str, Any]) -> str | None:
    """The URL or base64 data of a content part with media; None where it has neither."""
    for key in (*KINDS, "source"):
        value = part.get(key)
        if isinstance(value, dict):
            value = value.get("url") or value.get("data")
        if isinstance(value, str):
            return value
    return None


def _base64_image_pixels(data: str) -> int | None:
    """Width times height of an image in base64, from its header; None where that cannot be read."""
    for size in (64 << 10, 1 << 20, None):  # metadata may come before the size
        start = data if size is None else data[: size * 4 // 3 // 4 * 4]
        try:
            head = base64.b64decode(start + "=" * (-len(start) % 4), validate=False)
        except (binascii.Error, ValueError):
            return None
        pixels = image_pixels(head)
        if pixels is not None or head[:2] != _JPEG or size is None or len(data) < size:
            return pixels
    return None


def image_pixels(head: bytes) -> int | None:
    """Width x height from the first bytes of a PNG, GIF, WebP, BMP or JPEG; None for other formats."""
    if head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) >= 24:
        return int.from_bytes(head[16:20]) * int.from_bytes(head[20:24])
    if head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        return int.from_bytes(head[6:8], "little") * int.from_bytes(head[8:10], "little")
    if head[:2] == b"BM" and len(head) >= 26:
        width, height = (int.from_bytes(head[at : at + 4], "little", signed=True) for at in (18, 22))
        return abs(width * height)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) >= 30:
        chunk = head[12:16]
        if chunk == b"VP8X":
            return (int.from_bytes(head[24:27], "little") + 1) * (int.from_bytes(head[27:30], "little") + 1)
        if chunk == b"VP8L":
            bits = int.from_bytes(head[21:25], "little")
            return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
        if chunk == b"VP8 ":
            return (int.from_bytes(head[26:28], "little") & 0x3FFF) * (int.from_bytes(head[28:30], "little") & 0x3FFF)
        return None
    return _jpeg_pixels(head) if head[:2] == _JPEG else None


def _jpeg_pixels(head: bytes) -> int | None:
    """Width x height from the first frame header; None where `head` ends before it, 65,535^2 after 4,096 segments."""
    at = 2
    for _ in range(4096):  # a camera writes a few dozen segments
        at = head.find(b"\xff", at)
        if at < 0 or at + 9 > len(head):
            return None
        marker = head[at + 1]
        if marker in (0x00, 0xFF):
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(head[at + 5 : at + 7]) * int.from_bytes(head[at + 7 : at + 9])
        elif 0xD0 <= marker <= 0xD9:
            at += 2
        else:
            at += 2 + int.from_bytes(head[at + 2 : at + 4])
    return 65_535**2
