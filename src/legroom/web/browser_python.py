"""Python for browsers: the files of Pyodide's npm package, one version, by its digest. Data: `pyodide.json`."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from legroom.errors import UNREACHABLE, LegroomError
from legroom.home import home

RUNTIME_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
_NPM_S = 300


@cache
def pinned() -> Mapping[str, str]:
    """Which package: its version, digest and licence."""
    document: Mapping[str, str] = json.loads(Path(__file__).with_name("pyodide.json").read_text("utf-8"))
    return document


def runtime_files(given: str | None = None) -> dict[str, bytes]:
    """The runtime's files by name: from the package that was given or kept, else fetched by npm and kept."""
    if given is not None:
        return _members(_checked(_read(Path(given)), given))
    kept = home() / "cache" / f"{pinned()['package']}-{pinned()['version']}.tgz"
    if kept.is_file():
        try:
            return _members(_checked(kept.read_bytes(), str(kept)))
        except (LegroomError, OSError):
            kept.unlink(missing_ok=True)  # half written, or of another time
    package = _checked(_fetch(), "what npm fetched")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(package)
    except OSError:
        pass  # fetched again the next time
    return _members(package)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LegroomError(
            f"cannot read {path}: {error.strerror}", f"it should be {_package()} as npm packs it"
        ) from None


def _fetch() -> bytes:
    hint = f"fetch the npm package {_package()} where there is a network (npm pack), and name its file by --runtime"
    npm = shutil.which("npm")
    if npm is None:
        raise LegroomError(
            "a static page needs Python for browsers, and there is no npm to fetch it", hint, UNREACHABLE
        )
    with tempfile.TemporaryDirectory() as folder:
        words = [npm, "pack", "--silent", _package()]
        try:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=_NPM_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            raise LegroomError(f"npm could not fetch {_package()}", hint, UNREACHABLE) from None
        files = list(Path(folder).glob("*.tgz"))
        if done.returncode or not files:
            raise LegroomError(f"npm could not fetch {_package()}", hint, UNREACHABLE)
        return files[0].read_bytes()


def _package() -> str:
    return f"{pinned()['package']}@{pinned()['version']}"


def _checked(package: bytes, name: str) -> bytes:
    """Only the very bytes that were tried: they will run in visitors' browsers."""
    digest = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
    if digest != pinned()["integrity"]:
        raise LegroomError(
            f"{name} is not {_package()}, or was changed", f"its digest should be {pinned()['integrity']}"
        )
    return package


def _members(package: bytes) -> dict[str, bytes]:
    import io

    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name in RUNTIME_FILES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None
            files[name] = member.read()
    return files
