"""The page as files: everything beside it, small, and the same every time."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from legroom.errors import LegroomError
from legroom.web import static_edition
from legroom.web.static_edition import browser_package, runtime_files, write_static

ROOT = Path(__file__).parents[2]
RUNTIME = {
    "pyodide.mjs": b"export {}",
    "pyodide.asm.mjs": b"export {}",
    "pyodide.asm.wasm": b"\0asm" * 1000,
    "python_stdlib.zip": b"PK",
    "pyodide-lock.json": b'{"info": {"python": "3.14.2"}, "packages": {}}',
}


ON_ITS_OWN = """
import sys, json
sys.path.insert(0, sys.argv[1])
from legroom.web.endpoints import ENDPOINTS, call
requests = {
    "plan": {"model": "llama-3.1-70b", "gpu": "h100", "language": "zh"},
    "speed": {"model": "llama-3.1-8b", "gpu": "l4"},
    "card": {"gpu": "rtx4090", "names": ["llama-3.1-8b"]},
    "upgrade": {"model": "llama-3.1-8b", "gpu": "h100", "vllm": "0.20.0", "to": "0.32.0"},
    "pack": {"gpu": "h100", "commands": ["vllm serve llama-3.1-8b --max-model-len 8192"]},
    "fragments": {"file": sys.argv[2]},
    "math": {"model": "llama-3.1-8b", "gpu": "l4"},
    "size": {"model": "llama-3.1-8b", "cards": ["l4"]},
    "entry": {"id": "LR203"},
    "read": {"text": "services: {a: {image: 'vllm/vllm-openai:v0.10.0', command: --model a/b}}"},
    "diagnose": {"log": "torch.OutOfMemoryError: CUDA out of memory."},
    "simulate": {"mix": {}, "blocks": 9999, "step_ms": 9},
}
plan = {"model": "llama-3.1-8b", "gpu": "h100"}
for form in ("docker", "compose", "kubernetes", "systemd", "script"):
    requests["files"] = {"plan": plan, "format": form}
    assert "files" in json.loads(call("files", json.dumps(requests["files"])))
for name, endpoint in ENDPOINTS.items():
    if name != "hub" and endpoint.in_browser:
        document = json.loads(call(name, json.dumps(requests.get(name, {}))))
        assert "error" not in document, (name, document)
"""


@pytest.fixture(scope="module")
def with_small_runtime():
    """Pyodide is 13 MB and comes from npm: what is around it is tested with a stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_edition, "runtime_files", lambda given: dict(RUNTIME))
        patch.setattr(static_edition, "with_bytecode", dict)
        yield


@pytest.fixture(scope="module")
def written(with_small_runtime, tmp_path_factory):
    """Packing takes most of a second: one folder for all who read it."""
    return write_static(tmp_path_factory.mktemp("static"))


def test_everything_that_is_loaded_lies_beside_the_page(written):
    assert {"index.html", "worker.js", "sw.js", "engine/pyodide.mjs", "engine/legroom.tar.packed"} <= set(written.sizes)
    assert {file.relative_to(written.folder).as_posix() for file in written.folder.rglob("*") if file.is_file()} == set(
        written.sizes
    )


def test_the_page_says_that_it_is_static_and_has_a_policy(written):
    page = (written.folder / "index.html").read_text("utf-8")
    assert 'name="legroom-edition" content="static"' in page
    assert "script-src 'self' 'wasm-unsafe-eval'" in page
    assert "unsafe-inline" not in page


def test_no_placeholder_is_left_in_a_script(written):
    for name in ("worker.js", "sw.js"):
        assert not re.search(r"__[A-Z_]+__", (written.folder / name).read_text("utf-8"))


def test_a_static_host_or_a_space_takes_the_folder_as_it_is(written):
    page = (written.folder / "index.html").read_text("utf-8")
    named = re.findall(r'(?:src|href|content)="(\./[^"]+|/[^"]*|https?:[^"]*)"', page)
    assert named
    assert all((written.folder / name).is_file() for name in named)
    assert {"./link.js", "./preview.png"} <= set(named)
    assert (written.folder / "preview.png").read_bytes()[16:24] == bytes.fromhex("000004b0 00000276")  # 1200 x 630
    assert (written.folder / "README.md").read_text("utf-8").startswith("---\ntitle: legroom\nsdk: static\n")
    assert '"link.js"' in (written.folder / "sw.js").read_text("utf-8")
    headers = (written.folder / "_headers").read_text("utf-8")
    assert headers.startswith("/*\n  Cache-Control: no-cache\n")
    frozen = re.findall(r"^/(\S+)\n  Cache-Control: public, max-age=31536000, immutable$", headers, re.MULTILINE)
    assert frozen
    assert all(re.search(r"-[A-Z0-9]{8}\.js$", name) and (written.folder / name).is_file() for name in frozen)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
@pytest.mark.parametrize(
    ("search", "hash_", "kept"),
    [
        ("?model=llama-3.1-8b&gpu=h100", "", ["/site/#/plan?model=llama-3.1-8b&gpu=h100"]),
        ("", "", []),
        ("?utm=x", "#/catalog", []),
    ],
)
def test_a_link_with_a_model_and_a_gpu_opens_the_plan(search, hash_, kept):
    location = {"search": search, "hash": hash_, "pathname": "/site/"}
    script = (Path(static_edition.__file__).with_name("static_files") / "link.js").read_text("utf-8")
    shown = (
        f"const kept = [], location = {json.dumps(location)}, history = {{replaceState: (a, b, to) => kept.push(to)}};"
    )
    words = ["node", "-e", f"{shown}{script}\nconsole.log(JSON.stringify(kept))"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == kept


def test_the_same_install_writes_the_same_bytes(written, tmp_path):
    write_static(tmp_path)
    files = [file for file in written.folder.rglob("*") if file.is_file()]
    assert files
    assert all(file.read_bytes() == (tmp_path / file.relative_to(written.folder)).read_bytes() for file in files)


def test_what_a_browser_loads_of_legroom_is_small():
    assert len(gzip.compress(browser_package(), 9)) < 1_600_000


def test_what_a_browser_loads_plans_and_diagnoses_on_its_own(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(browser_package())) as archive:
        archive.extractall(tmp_path, filter="data")
    snapshot = base64.b64encode((ROOT / "docs/samples/leak-before.pickle").read_bytes()).decode()
    words = [sys.executable, "-I", "-S", "-c", ON_ITS_OWN, str(tmp_path), snapshot]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_runtime_of_other_bytes_is_refused(tmp_path):
    other = tmp_path / "pyodide.tgz"
    other.write_bytes(b"something else")
    with pytest.raises(LegroomError, match="is not pyodide@"):
        runtime_files(str(other))


def test_without_npm_the_sentence_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    monkeypatch.setattr(static_edition.shutil, "which", lambda name: None)
    with pytest.raises(LegroomError) as caught:
        runtime_files()
    assert "--runtime" in caught.value.hint
    assert caught.value.exit_code == 3


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(static_edition, "static_files", lambda runtime: {"index.html": b""})
    (tmp_path / "file").write_text("")
    with pytest.raises(LegroomError, match="cannot write"):
        write_static(tmp_path / "file" / "site")
