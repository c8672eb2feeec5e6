"""The page as static files: legroom runs in the visitor's browser. All it needs is among the files: Pyodide from its
npm package, whose version and digest `pyodide.json` pins, and legroom with PyYAML in a tar."""

import base64
import gzip
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
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.files import home
from legroom.records import dataclass
from legroom.version import __version__
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
        """The folder, the files' total bytes, and the bytes of each file."""
        return {"folder": str(self.folder), "total_bytes": self.total_bytes, "files": dict(self.sizes)}

    def text(self) -> str:
        """What `legroom ui --static` prints: the number of files, their size, and how to serve them."""
        return (
            f"{len(self.sizes)} files, {self.total_bytes / 1e6:.1f} MB, are in {self.folder}: put them on any host,\n"
            f"or look at them here: python -m http.server --directory {self.folder}\n"
        )


def write_static(folder: str | Path, runtime: str | None = None) -> StaticEdition:
    """Writes the page's files into a folder, which is created if missing; LegroomError where that fails. `runtime`:
    path of Pyodide's npm package; None: the cached one, else npm fetches it."""
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
    """{archive name: content} as node makes them with `compile.mjs`, which is among `files`; empty where node fails."""
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
    """The package itself, if its digest is the pinned one; else LegroomError, which calls it `name`."""
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
