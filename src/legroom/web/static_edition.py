"""The page as plain files: the engine runs in the visitor's browser, and everything it needs lies beside the page."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.home import home
from legroom.records import dataclass
from legroom.web.browser_package import browser_package
from legroom.web.browser_python import pinned, runtime_files
from legroom.web.page_files import PAGE_FOLDER, as_edition, page_names

_SCRIPTS = Path(__file__).with_name("static_files")
_PACKED = {
    "pyodide.asm.wasm": "application/wasm",
    "python_stdlib.zip": "application/zip",
    "legroom.tar": "application/x-tar",
}
"""Written packed and unpacked by the worker: hosts that do not pack what they send would double the download."""
_COMPILED, _COMPILE_S = ("python_stdlib.zip", "legroom.tar"), 300
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self' https://huggingface.co https://*.hf.co; worker-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'"
)
_README = """\
The page of legroom {version} for any static web host; it works offline after the first visit. Served over https (or
from localhost), because browsers keep files for offline use there alone. Nothing is fetched from other hosts, unless a
visitor asks for a model of the Hugging Face Hub.

engine/ holds Pyodide {pyodide} ({licence}; unchanged files of its npm package, three of them packed with gzip) and
legroom with PyYAML (MIT) in legroom.tar; where node was there, Python files that every visitor
loads are compiled. To try it here: python -m http.server --directory THIS_FOLDER
"""


@dataclass(frozen=True, slots=True)
class StaticEdition:
    """What was written."""

    folder: Path
    sizes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    def as_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "total_bytes": self.total_bytes, "files": dict(self.sizes)}

    def text(self) -> str:
        return (
            f"{len(self.sizes)} files, {self.total_bytes / 1e6:.1f} MB, are in {self.folder}: put them on any host,\n"
            f"or look at them here: python -m http.server --directory {self.folder}\n"
        )


def write_static(folder: str | Path, runtime: str | None = None) -> StaticEdition:
    """Write every file into a folder, which is made where it is not there."""
    files = static_files(runtime)
    place = Path(folder)
    try:
        for name, body in files.items():
            file = place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(body)
    except OSError as error:
        raise LegroomError(f"cannot write to {place}: {error.strerror}", "name a folder that can be written") from None
    return StaticEdition(place, {name: len(body) for name, body in files.items()})


def static_files(runtime: str | None = None) -> dict[str, bytes]:
    """Every file by its name."""
    python = compiled({**runtime_files(runtime), "legroom.tar": browser_package()})
    lock_info = json.loads(python.pop("pyodide-lock.json"))["info"]
    page = {name: (PAGE_FOLDER / name).read_bytes() for name in page_names()}
    if "index.html" not in page:
        raise LegroomError("this install of legroom has no page", "install it again")
    page["index.html"] = with_policy(as_edition(page["index.html"], "static"))
    engine = {f"engine/{name}": body for name, body in python.items() if name not in _PACKED}
    packed = {name: _packed(body) for name, body in python.items() if name in _PACKED}
    engine |= {f"engine/{name}.packed": body for name, body in packed.items()}
    loads = {name: {"bytes": len(body), "type": _PACKED[name]} for name, body in packed.items()}
    shell = ["./", *page, "worker.js", *(name for name in engine if not name.endswith(".packed"))]
    scripts = _scripts("worker.js", "sw.js")
    values = {
        "__VERSION__": _version({**page, **engine, **scripts}),
        "__FILES__": json.dumps(loads),
        "__LOCK_INFO__": json.dumps(lock_info),
        "__SHELL__": json.dumps(shell),
    }
    for name, body in scripts.items():
        scripts[name] = _filled(body.decode(), values).encode()
    return {**page, **scripts, **engine, "README.txt": _readme().encode()}


def compiled(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """With bytecode of what every visitor loads, by the browsers' own Python, where node can run it; else as it is, and
    a first visit takes some seconds longer."""
    node = shutil.which("node")
    if node is None:
        return dict(files)
    scripts = _scripts("compile.mjs", "compile_engine.py")
    kept = home() / "cache" / f"engine-{_version({**files, **scripts})}"
    if not all((kept / name).is_file() for name in _COMPILED):
        made = _compiled_by(node, {**files, **scripts})
        if not made:
            return dict(files)
        _keep(kept, made)
        return {**files, **made}
    return {**files, **{name: (kept / name).read_bytes() for name in _COMPILED}}


def _compiled_by(node: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Empty where it could not be done."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, body in files.items():
            (place / name).write_bytes(body)
        words = [node, str(place / "compile.mjs"), folder]
        try:
            done = subprocess.run(words, capture_output=True, timeout=_COMPILE_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        return {name: (place / name).read_bytes() for name in _COMPILED} if done.returncode == 0 else {}


def _keep(folder: Path, files: Mapping[str, bytes]) -> None:
    """For the next time; compiling takes most of a minute."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for name, body in files.items():
            part = folder / f"{name}.part"
            part.write_bytes(body)
            part.replace(folder / name)


def _scripts(*names: str) -> dict[str, bytes]:
    return {name: (_SCRIPTS / name).read_bytes() for name in names}


def with_policy(html: bytes) -> bytes:
    """A static host sends no headers of ours: the policy stands in the page."""
    tag = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    return html.replace(b"<head>", b"<head>\n" + tag.encode(), 1)


def _packed(body: bytes) -> bytes:
    return gzip.compress(body, 9, mtime=0)


def _version(files: Mapping[str, bytes]) -> str:
    """Of all that is written: a change of any file makes a new cache in every browser."""
    digest = hashlib.sha256()
    for name, body in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(body).digest())
    return digest.hexdigest()[:16]


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def _readme() -> str:
    from legroom.version import __version__

    return _README.format(version=__version__, pyodide=pinned()["version"], licence=pinned()["license"])
