"""legroom for browsers: the installed package less what needs a machine, with PyYAML's Python beside it, in a tar."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from legroom.errors import UNREACHABLE, LegroomError
from legroom.version import __version__

_PACKAGE = Path(__file__).parents[1]
_ROOMS = (
    "catalog",
    "deployments",
    "diagnosis",
    "drawing",
    "explain",
    "facts",
    "memory",
    "planning",
    "render",
    "simulation",
    "sweeps",
    "vllm",
)
"""What the endpoints use, besides the modules at the top."""
_WEB_FILES = ("__init__.py", "schemas.py", "schemas.json", "endpoints")


def browser_package() -> bytes:
    """A tar of it: packed as a whole it is smaller than a wheel, and quicker to unpack. The same files give the same
    bytes."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, body in sorted([*_own_files(), *_yaml_files(), *_metadata()]):
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
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
        import yaml
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
