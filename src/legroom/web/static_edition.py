"""The page as static files: legroom runs in the visitor's browser, and all it needs is among the files."""

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
from legroom.files import home
from legroom.records import dataclass
from legroom.version import __version__
from legroom.web.browser_engine import browser_package, pinned_pyodide, runtime_files
from legroom.web.page_files import PAGE_FOLDER, page_names, with_edition

_SCRIPTS = Path(__file__).with_name("static_files")
_PACKED = {
    "pyodide.asm.wasm": "application/wasm",
    "python_stdlib.zip": "application/zip",
    "legroom.tar": "application/x-tar",
}
"""Files written with gzip and decompressed by the worker, because some hosts send files uncompressed."""
_COMPILED = ("python_stdlib.zip", "legroom.tar")
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self' https://huggingface.co https://*.hf.co; worker-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class StaticEdition:
    """The files that were written, with their sizes."""

    folder: Path
    sizes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    def as_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "total_bytes": self.total_bytes, "files": dict(self.sizes)}

    def text(self) -> str:
        """What `legroom ui --static` prints: the number of files, their size, and how to serve them."""
        return (
            f"{len(self.sizes)} files, {self.total_bytes / 1e6:.1f} MB, are in {self.folder}: put them on any host,\n"
            f"or look at them here: python -m http.server --directory {self.folder}\n"
        )


def write_static(folder: str | Path, runtime: str | None = None) -> StaticEdition:
    """Writes the page's files into a folder, which is created if missing; LegroomError where that fails.

    `runtime` is the path of Pyodide's npm package; None: the cached one, else npm fetches it.
    """
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


def static_files(runtime: str | None) -> dict[str, bytes]:
    """The content of every file of the static page, by name; `runtime`: path of Pyodide's npm package, or None."""
    python = with_bytecode({**runtime_files(runtime), "legroom.tar": browser_package()})
    lock_info = json.loads(python.pop("pyodide-lock.json"))["info"]
    page = {name: (PAGE_FOLDER / name).read_bytes() for name in page_names()}
    if "index.html" not in page:
        raise LegroomError("this install of legroom has no page", "install it again")
    texts = _read_scripts("head.html", "headers.txt", "readme.md")
    html = with_edition(page["index.html"], "static").replace(b"  </head>", texts["head.html"] + b"  </head>", 1)
    tag = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    page["index.html"] = html.replace(b"<head>", b"<head>\n" + tag.encode(), 1)
    engine = {f"engine/{name}": body for name, body in python.items() if name not in _PACKED}
    packed = {name: gzip.compress(body, 9, mtime=0) for name, body in python.items() if name in _PACKED}
    engine |= {f"engine/{name}.packed": body for name, body in packed.items()}
    loads = {name: {"bytes": len(body), "type": _PACKED[name]} for name, body in packed.items()}
    shell = ["./", *page, "worker.js", "link.js", *(name for name in engine if not name.endswith(".packed"))]
    scripts = _read_scripts("worker.js", "sw.js", "link.js", "preview.png")
    values = {
        "__VERSION__": _files_digest({**page, **engine, **scripts}),
        "__FILES__": json.dumps(loads),
        "__LOCK_INFO__": json.dumps(lock_info),
        "__SHELL__": json.dumps(shell),
    }
    for name in scripts:
        for placeholder, value in values.items():
            scripts[name] = scripts[name].replace(placeholder.encode(), value.encode())
    about = {"version": __version__, "pyodide": pinned_pyodide()["version"], "licence": pinned_pyodide()["license"]}
    readme = texts["readme.md"].decode().format(**about)
    hashed = (f"/{name}\n  Cache-Control: public, max-age=31536000, immutable\n" for name in page if "-" in name)
    headers = texts["headers.txt"] + "".join(hashed).encode()
    return {**page, **scripts, **engine, "README.md": readme.encode(), "_headers": headers}


def with_bytecode(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files by name, with bytecode of the modules that every visitor loads; unchanged where there is no node."""
    node = shutil.which("node")
    if node is None:
        return dict(files)
    scripts = _read_scripts("compile.mjs", "compile_engine.py")
    cached = home() / "cache" / f"engine-{_files_digest({**files, **scripts})}"
    if not all((cached / name).is_file() for name in _COMPILED):
        made = _compile_in_node(node, {**files, **scripts})
        if not made:
            return dict(files)
        with suppress(OSError):  # compiling takes most of a minute
            cached.mkdir(parents=True, exist_ok=True)
            for name, body in made.items():
                part = cached / f"{name}.part"
                part.write_bytes(body)
                part.replace(cached / name)
        return {**files, **made}
    return {**files, **{name: (cached / name).read_bytes() for name in _COMPILED}}


def _compile_in_node(node: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The archives, by name, that the script `compile.mjs` of these files makes; empty where node fails."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, body in files.items():
            (place / name).write_bytes(body)
        words = [node, str(place / "compile.mjs"), folder]
        try:
            done = subprocess.run(words, capture_output=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        return {name: (place / name).read_bytes() for name in _COMPILED} if done.returncode == 0 else {}


def _read_scripts(*names: str) -> dict[str, bytes]:
    """The content of these files of the folder `static_files`, by name."""
    return {name: (_SCRIPTS / name).read_bytes() for name in names}


def _files_digest(files: Mapping[str, bytes]) -> str:
    """A digest of all files; browsers cache them under it."""
    digest = hashlib.sha256()
    for name, body in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(body).digest())
    return digest.hexdigest()[:16]
