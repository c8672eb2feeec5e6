"""Runs inside Pyodide: adds bytecode of the modules that a visitor's first requests import."""

import importlib._bootstrap_external as bootstrap
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

STDLIB, OWN, SITE = "/build/python_stdlib.zip", "/build/legroom.tar", "/build/site/"
FIRST_CALLS = [
    ("plan", {"model": "llama-3.1-8b", "gpu": "h100"}),
    ("plan", {"model": "llama-3.1-70b", "gpu": "l4"}),
    ("math", {"model": "llama-3.1-8b", "gpu": "h100"}),
    *((name, {}) for name in ("models", "gpus", "releases", "flags", "catalog")),
]
WHEN = (2020, 1, 1, 0, 0, 0)


def bytecode(source: bytes, name: str) -> bytes:
    """A .pyc that Python does not check against its source; `name` is the path in tracebacks."""
    code = compile(source, name, "exec", dont_inherit=True)
    return bytes(bootstrap._code_to_hash_pyc(code, bytes(8), False))  # type: ignore[attr-defined]


def loaded_module_paths() -> set[str]:
    """The source or bytecode paths of all modules imported so far."""
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    return {name for name in files if name.endswith((".py", ".pyc"))}


def compile_stdlib(loaded: set[str]) -> None:
    """Rewrites the standard library's zip with the loaded modules as bytecode instead of source."""
    used = {name.rpartition("python314.zip/")[2] for name in loaded if "python314.zip/" in name}
    target = io.BytesIO()
    # Stored, because the whole archive is compressed afterwards, which is smaller.
    with zipfile.ZipFile(STDLIB) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for entry in old.infolist():
            if entry.is_dir():
                continue
            name, body = entry.filename, old.read(entry)
            if name in used:
                name, body = name + "c", bytecode(body, name)
            new.writestr(zipfile.ZipInfo(name, WHEN), body)
    Path(STDLIB).write_bytes(target.getvalue())


def compile_packages(loaded: set[str]) -> None:
    """Rewrites the tar of legroom and PyYAML with bytecode added for the loaded modules."""
    used = {name.removeprefix(SITE) for name in loaded if name.startswith(SITE)}
    target = io.BytesIO()
    with tarfile.open(OWN) as old, tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as new:
        for member in old.getmembers():
            packed = old.extractfile(member)
            body = packed.read() if packed else b""
            new.addfile(member, io.BytesIO(body))
            if member.name in used:
                folder, _, file = member.name.rpartition("/")
                pyc = tarfile.TarInfo(f"{folder}/__pycache__/{file[:-3]}.cpython-314.pyc")
                code = bytecode(body, member.name)
                pyc.size = len(code)
                new.addfile(pyc, io.BytesIO(code))
    Path(OWN).write_bytes(target.getvalue())


with tarfile.open(OWN) as archive:
    archive.extractall(SITE, filter="data")
sys.path.insert(0, SITE)
from legroom.web.endpoints import call  # noqa: E402 - from what was just unpacked

for name, request in FIRST_CALLS:
    call(name, json.dumps(request))
loaded_files = loaded_module_paths()
compile_stdlib(loaded_files)
compile_packages(loaded_files)
