"""Ask one vLLM release's own code what it supports, and write the answers into `facts/data/vllm/RELEASE.json`.

    PYTHON tools/import_vllm.py RELEASE --judge FOLDER [--src FOLDER] [--out src/legroom/facts/data/vllm]

PYTHON is an interpreter that has vLLM's dependencies, FOLDER of --judge holds `fakecuda.py` (a CUDA platform that
only answers questions), FOLDER of --src the `vllm` package of the release. The file of the newest
release is whole, an older one's holds what differs from the next. The parts:

- attention_backends: what each attention backend takes, by compute capability, and the order of preference;
- model_interfaces: what each model class implements (pipeline parallelism, LoRA, EAGLE-3, ...);
- config_fields: bounds and choices of the fields of vLLM's config classes;
- quantization_overrides: the values of --quantization that each kind of quantized checkpoint accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_answers.attention_backends import CAPABILITIES, backends_of_card, by_backend
from vllm_answers.config_fields import config_fields
from vllm_answers.model_classes import model_interfaces
from vllm_answers.quantization import quantization_overrides


def main() -> int:
    options = _options()
    if options.capability:
        _pretend(options, options.capability)
        json.dump(backends_of_card(options.capability), sys.stdout)
        return 0
    if not options.only or "attention_backends" in options.only:
        by_capability = {name: _ask_in_process(options, name) for name in CAPABILITIES}
        _update(options.out, options.release, "attention_backends", by_backend(by_capability))
    _pretend(options, "9.0")
    for name, ask in _PARTS.items():
        if not options.only or name in options.only:
            _update(options.out, options.release, name, ask())
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("src/legroom/facts/data/vllm"))
    parser.add_argument("--only", action="append", help="one of the parts")
    parser.add_argument("--capability", help=argparse.SUPPRESS)
    return parser.parse_args()


def _ask_in_process(options: argparse.Namespace, capability: str) -> dict[str, Any]:
    """The backends of one capability, asked in a process of its own, because vLLM fixes its platform at import."""
    words = [sys.executable, __file__, options.release, "--judge", options.judge, "--src", options.src]
    done = subprocess.run([*map(str, words), "--capability", capability], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"capability {capability}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{capability}: {len(answer['backends'])} backends", file=sys.stderr)
    return answer


def _pretend(options: argparse.Namespace, capability: str) -> None:
    """Import vLLM under a platform that answers as a card of this capability does."""
    sys.path.insert(0, str(options.judge))
    import fakecuda

    stubs = Path(sys.prefix).parent / "stubs"
    with contextlib.redirect_stdout(sys.stderr):
        fakecuda.install(f"capability {capability}", capability, 80, str(options.src.absolute()), str(stubs))
        from vllm.utils import flashinfer

    for name in ("has_flashinfer_sm90_nope_mla", "has_flashinfer_sparse_mla_sm120"):
        setattr(flashinfer, name, lambda: True)


_PARTS = {
    "model_interfaces": model_interfaces,
    "config_fields": config_fields,
    "quantization_overrides": quantization_overrides,
}


def _update(folder: Path, release: str, part: str, answers: dict[str, Any]) -> None:
    """Set one part of a release's facts; of all releases but the newest the difference to the next one is written."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # vLLM's interpreter has no legroom
    from legroom.facts.config_classes import with_difference

    documents: dict[str, dict[str, Any]] = {}
    names = sorted({release, *(path.stem for path in folder.glob("*.json"))}, key=_numbers, reverse=True)
    for newer, name in zip([None, *names], names, strict=False):
        path = folder / f"{name}.json"
        own = json.loads(path.read_text()) if path.exists() else {}
        documents[name] = dict(with_difference(documents[newer], own)) if newer and own else own
    documents[release] |= {"source": f"the code of vLLM {release}, asked by tools/import_vllm.py", part: answers}
    for newer, name in zip([None, *names], names, strict=False):
        write(folder / f"{name}.json", difference(documents[newer], documents[name]) if newer else documents[name])


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


def difference(base: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The values of a release that the next one has not, map by map, and the keys that only the next one has."""
    lacking = [key for key in base if key not in whole]
    own: dict[str, Any] = {"without": lacking} if lacking else {}
    for key, value in whole.items():
        if key not in base or base[key] != value:
            inside = isinstance(value, dict) and isinstance(base.get(key), dict)
            own[key] = difference(base[key], value) if inside else value
    return own


def write(path: Path, document: dict[str, Any]) -> None:
    """A part and each of its keys on a line of its own, so that a change reads as one line."""
    rows = []
    for name, facts in sorted(document.items()):
        lines = (
            ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in facts.items()) if isinstance(facts, dict) else ""
        )
        rows.append(f"{json.dumps(name)}: " + (f"{{\n{lines}\n}}" if lines else json.dumps(facts)))
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
