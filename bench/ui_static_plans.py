"""The static edition against the command line: random plans, the same JSON.

python bench/ui_static_plans.py [--plans 1000] [--seed 0]

Writes a static edition, starts its Python under node as its worker does in a browser, and compares every plan with what
`legroom plan --json` prints in this Python. Without advice: searching for it takes seconds where nothing fits.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from legroom.cli.main import main as legroom
from legroom.facts.bundled import bundled_names
from legroom.facts.gpus import all_gpus
from legroom.facts.releases import known_releases
from legroom.vllm.command_line import any_release_words
from legroom.web.browser_engine import runtime_files
from legroom.web.static_edition import static_files

NODE = """
import fs from "node:fs"; import { pathToFileURL } from "node:url";
const folder = process.argv[2];
const { loadPyodide } = await import(pathToFileURL(folder + "/pyodide.mjs").href);
const python = await loadPyodide({ indexURL: folder });
python.unpackArchive(new Uint8Array(fs.readFileSync(folder + "/legroom.tar")), "tar", { extractDir: "/site" });
const call = python.runPython("import sys; sys.path.insert(0, '/site'); from legroom.web.endpoints import call; call");
const out = fs.createWriteStream(folder + "/answers.jsonl");
for (const line of fs.readFileSync(folder + "/requests.jsonl", "utf8").trim().split("\\n"))
  out.write(call("plan", line) + "\\n");
out.end();
"""


def random_plan(rng: random.Random) -> dict[str, object]:
    flags: dict[str, object] = {}
    choices: dict[str, tuple[object, ...]] = {
        "max_model_len": (1024, 4096, 8192, 32768, 131072),
        "max_num_seqs": (1, 16, 128, 512),
        "max_num_batched_tokens": (2048, 8192, 16384),
        "gpu_memory_utilization": (0.5, 0.8, 0.9, 0.95),
        "kv_cache_dtype": ("auto", "fp8"),
        "tensor_parallel_size": (1, 2, 4, 8),
        "enforce_eager": (True,),
        "block_size": (16, 32),
        "enable_prefix_caching": (True, False),
    }
    for name, values in choices.items():
        if rng.random() < 0.3:
            flags[name] = rng.choice(values)
    request: dict[str, object] = {
        "model": rng.choice(bundled_names()),
        "gpu": rng.choice(all_gpus()).name,
        "vllm": rng.choice(known_releases()),
        "flags": flags,
        "advice": False,
    }
    if rng.random() < 0.3:
        request["gpus"] = rng.choice((1, 2, 4, 8))
    return request | ({"cold": True} if rng.random() < 0.1 else {})


def on_command_line(request: dict[str, object]) -> dict[str, object]:
    words = ["plan", str(request["model"]), "--gpu", str(request["gpu"]), "--vllm", str(request["vllm"]), "--json"]
    words += ["--gpus", str(request["gpus"])] if "gpus" in request else []
    words += [*(["--cold"] if request.get("cold") else []), *(["--no-advice"] if not request["advice"] else [])]
    flags = request["flags"]
    assert isinstance(flags, dict)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = legroom([*words, *any_release_words(flags)])
    if code >= 2:
        return {"error": err.getvalue().partition("error: ")[2].partition("\n")[0]}
    document: dict[str, object] = json.loads(out.getvalue())
    return document


def in_browser_engine(requests: list[dict[str, object]], runtime: str | None) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, body in static_files(runtime).items():
            if name.startswith("engine/"):
                packed = name.endswith(".packed")
                file = place / name.removeprefix("engine/").removesuffix(".packed")
                file.write_bytes(gzip.decompress(body) if packed else body)
        (place / "pyodide-lock.json").write_bytes(runtime_files(runtime)["pyodide-lock.json"])
        (place / "run.mjs").write_text(NODE)
        (place / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))
        subprocess.run(["node", str(place / "run.mjs"), folder], check=True)
        answers = (json.loads(line) for line in (place / "answers.jsonl").read_text("utf-8").splitlines())
        return [{"error": answer["error"]["message"]} if "error" in answer else answer for answer in answers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", help="the npm package of Pyodide, where npm cannot fetch it")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    requests = [random_plan(rng) for _ in range(args.plans)]
    answers = in_browser_engine(requests, args.runtime)
    os.environ["LEGROOM_HOME"] = tempfile.mkdtemp()  # what this user measured is not known to a visitor's browser
    pairs = zip(requests, answers, map(on_command_line, requests), strict=True)
    different = refused = 0
    for request, browser, command_line in pairs:
        refused += "error" in command_line
        if browser != command_line:
            different += 1
            if different <= 5:
                print(json.dumps(request), "\n ", json.dumps(browser)[:300], "\n ", json.dumps(command_line)[:300])
    print(f"{args.plans} plans ({refused} refused by both or either): {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
