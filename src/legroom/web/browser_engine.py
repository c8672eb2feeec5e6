"""What the static edition runs in a browser: Pyodide from its npm package, and legroom with PyYAML in a tar.

`pyodide.json` pins the version and digest of the npm package.
"""

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from legroom.errors import UNREACHABLE, LegroomError
from legroom.files import home
from legroom.version import __version__

RUNTIME_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
_PACKAGE = Path(__file__).parents[1]
_ROOMS = (
    *("api", "catalog", "deployments", "diagnosis", "drawing", "explain", "facts", "fragments", "memory", "planning"),
    *("render", "simulation", "sweeps", "vllm", "vllm_logs"),
    *("exports/__init__.py", "exports/export_request.py", "exports/deploy", "exports/prometheus", "guard/__init__.py"),
    *("live/__init__.py", "live/thresholds.py"),
    *("guard/policy.py", "guard/request", "sidecar/__init__.py", "worker/__init__.py", "worker/plugin.py"),
)
"""The packages and files that the endpoints import."""
_WEB_FILES = ("__init__.py", "schemas.py", "endpoints")


@cache
def pinned_pyodide() -> Mapping[str, str]:
    """`version`, `integrity` (digest), `license` ... of the pinned npm package, from `pyodide.json`."""
    return json.loads(Path(__file__).with_name("pyodide.json").read_text("utf-8"))  # type: ignore[no-any-return]


def runtime_files(given: str | None = None) -> dict[str, bytes]:
    """Pyodide's files by name, from the npm package at the path `given`; None: the cached one, else npm fetches it."""
    if given is not None:
        try:
            return _unpacked_files(_with_pinned_digest(Path(given).read_bytes(), given))
        except OSError as error:
            hint = f"it should be {_package_spec()} as npm packs it"
            raise LegroomError(f"cannot read {given}: {error.strerror}", hint) from None
    cached = home() / "cache" / f"{pinned_pyodide()['package']}-{pinned_pyodide()['version']}.tgz"
    if cached.is_file():
        try:
            return _unpacked_files(_with_pinned_digest(cached.read_bytes(), str(cached)))
        except (LegroomError, OSError):
            cached.unlink(missing_ok=True)  # incomplete or outdated
    package = _with_pinned_digest(_fetch_by_npm(), "what npm fetched")
    with suppress(OSError):  # fetched again the next time
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(package)
    return _unpacked_files(package)


def _fetch_by_npm() -> bytes:
    """The tarball of Pyodide's npm package, downloaded with `npm pack`; LegroomError where that fails."""
    hint = f"fetch the npm package {_package_spec()} on a network (npm pack), and name its file by --runtime"
    if (npm := shutil.which("npm")) is None:
        why = "a static page needs Python for browsers, and there is no npm to fetch it"
        raise LegroomError(why, hint, UNREACHABLE)
    with tempfile.TemporaryDirectory() as folder:
        words = [npm, "pack", "--silent", _package_spec()]
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(words, cwd=folder, capture_output=True, timeout=300, check=False)
        if not (files := list(Path(folder).glob("*.tgz"))):
            raise LegroomError(f"npm could not fetch {_package_spec()}", hint, UNREACHABLE)
        return files[0].read_bytes()


def _package_spec() -> str:
    """The pinned Pyodide package as npm writes it: NAME@VERSION."""
    return f"{pinned_pyodide()['package']}@{pinned_pyodide()['version']}"


def _with_pinned_digest(package: bytes, name: str) -> bytes:
    """The package, as visitors' browsers run it; LegroomError, calling it `name`, unless its digest is as pinned."""
    digest = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
    if digest != pinned_pyodide()["integrity"]:
        hint = f"its digest should be {pinned_pyodide()['integrity']}"
        raise LegroomError(f"{name} is not {_package_spec()}, or was changed", hint)
    return package


def _unpacked_files(package: bytes) -> dict[str, bytes]:
    """File name -> content of the runtime files in Pyodide's npm tarball."""
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name in RUNTIME_FILES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None
            files[name] = member.read()
    return files


def browser_package() -> bytes:
    """The tar of legroom and PyYAML that the browser unpacks; the same files give the same bytes."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        metadata = f"Metadata-Version: 2.1\nName: legroom\nVersion: {__version__}\n".encode()
        dist_info = (f"legroom-{__version__}.dist-info/METADATA", metadata)
        for name, body in sorted([*_legroom_files(), *_yaml_files(), dist_info]):
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return target.getvalue()


def _legroom_files() -> Iterator[tuple[str, bytes]]:
    """(archive path, content) of each file of legroom that the browser needs."""
    top = [file.name for file in _PACKAGE.glob("*.py")]
    for start in (*top, *_ROOMS, *(f"web/{name}" for name in _WEB_FILES)):
        path = _PACKAGE / start
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and file.suffix in (".py", ".json", ".packed"):
                yield f"legroom/{file.relative_to(_PACKAGE).as_posix()}", file.read_bytes()


def _yaml_files() -> Iterator[tuple[str, bytes]]:
    """(archive path, content) of PyYAML's Python files and licence; LegroomError where PyYAML is not installed."""
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
