"""legroom for browsers: a wheel of the installed package, less what needs a machine, with PyYAML's Python beside it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from legroom.errors import UNREACHABLE, LegroomError
from legroom.version import __version__

_PACKAGE = Path(__file__).parents[1]
_ROOMS = (
    "calls.py", "catalog", "deployments", "diagnosis", "drawing", "explain", "facts", "memory", "planning", "render",
    "simulation", "vllm",
)  # fmt: skip
"""What the endpoints use, besides the modules at the top."""
_WEB_FILES = ("__init__.py", "schemas.py", "schemas.json", "endpoints")
_WHEN = (2020, 1, 1, 0, 0, 0)
"""The same files give the same bytes."""


def browser_wheel() -> bytes:
    """The wheel's bytes."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, body in sorted([*_own_files(), *_yaml_files(), *_metadata()]):
            wheel.writestr(zipfile.ZipInfo(name, _WHEN), body, zipfile.ZIP_DEFLATED, 9)
    return target.getvalue()


def _own_files() -> Iterator[tuple[str, bytes]]:
    top = [file.name for file in _PACKAGE.glob("*.py")]
    for start in (*top, *_ROOMS, *(f"web/{name}" for name in _WEB_FILES)):
        place = _PACKAGE / start
        for file in [place] if place.is_file() else sorted(place.rglob("*")):
            if file.is_file() and file.suffix in (".py", ".json"):
                yield f"legroom/{file.relative_to(_PACKAGE).as_posix()}", file.read_bytes()


def _yaml_files() -> Iterator[tuple[str, bytes]]:
    try:
        import yaml  # noqa: PLC0415
    except ImportError:
        raise LegroomError("a static page needs PyYAML", "pip install legroom", UNREACHABLE) from None
    folder = Path(yaml.__file__).parent
    for file in sorted(folder.glob("*.py")):
        yield f"yaml/{file.name}", file.read_bytes()
    for licence in sorted(folder.parent.glob("[Pp]y[Yy][Aa][Mm][Ll]-*.dist-info/**/LICENSE*")):
        yield "yaml/LICENSE", licence.read_bytes()
        break


def _metadata() -> Iterator[tuple[str, bytes]]:
    folder = f"legroom-{__version__}.dist-info"
    yield f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: legroom\nVersion: {__version__}\n".encode()
    yield f"{folder}/WHEEL", b"Wheel-Version: 1.0\nGenerator: legroom\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
