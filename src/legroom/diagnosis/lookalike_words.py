"""Values in the texts of look-alikes: package, first release, driver, build."""

import re
from collections.abc import Callable, Mapping
from functools import partial

from legroom.diagnosis.finding import reason
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.facts import read_data
from legroom.facts import release_support as support
from legroom.facts.diagnosis_texts import package_of
from legroom.facts.log_messages import Value
from legroom.facts.releases import first_release, known_releases, release
from legroom.isolation import is_local_model
from legroom.vllm_logs.evidence import Evidence

_LAST_BACKEND_VARIABLE = "0.14.1"  # VLLM_ATTENTION_BACKEND until here, then the flag.


class MatchedLine(dict[str, str]):
    """The values that a look-alike's line prints; a missing `{name}` is derived, else the look-alike's default."""

    def __init__(self, facts: Mapping[str, Value], evidence: Evidence, planner: FixPlanner) -> None:
        super().__init__({name: str(value) for name, value in facts.items() if value != ""})
        self.evidence, self.planner = evidence, planner
        self.defaults: Mapping[str, str] = {}

    def fill(self, text: str) -> str:
        """The text with each `{name}` replaced by the line's value, else a derived or default one."""
        return text.format_map(self) if "{" in text else text

    def __missing__(self, name: str) -> str:
        value = _DERIVATIONS[name](self) if name in _DERIVATIONS else None
        return value if value is not None else self.defaults.get(name, "")


def _whole_pieces(line: MatchedLine) -> str:
    """`N bytes (M pieces) or N2`: the sizes around the requested one that are multiples of the allocation unit."""
    unit = int(line["unit_count"])
    pieces = int(line["asked_count"]) // unit
    return f"{pieces * unit} bytes ({pieces} pieces) or {(pieces + 1) * unit}"


def _captured(pattern: str, text: str) -> str | None:
    """What the first group of the regular expression `pattern` captures in a text; None without a match."""
    match = re.search(pattern, text)
    return match[1] if match else None


def _missing_package(line: MatchedLine) -> str | None:
    """The PyPI package of the module that failed to import; None where the module is not named."""
    module = line.get("module")
    return package_of(module) if module else None


def _install_advice(line: MatchedLine) -> str:
    """`pip install PACKAGE`, or the advice in legroom's table of packages where no installation helps."""
    package = _missing_package(line) or "PACKAGE"
    return package.strip("()") if package.startswith("(") else f"pip install {package}"


def _architecture_since_text(line: MatchedLine) -> str:
    """A sentence: since which release vLLM has the model's architecture, or that no known release lists it."""
    name = line.get("architecture") or line.get("uninspected") or line.get("unwritten") or ""
    first = first_release(name)
    known = line.planner.known
    if first is None:
        return "No release up to the newest that legroom knows lists it, or it is spelt otherwise in config.json."
    if known.release_known and not known.release.before(first):
        return reason("code_not_loaded" if line.get("uninspected") else "registry_without_it", {"first": first})
    return f"vLLM serves it from release {first} on."


def _upgrade_step(line: MatchedLine) -> str:
    """A command that installs a release with the model's architecture; where it is there or unknown, where to look."""
    name = line.get("architecture") or line.get("uninspected") or line.get("unwritten") or ""
    first = first_release(name)
    if first and (not line.planner.known.release_known or line.planner.known.release.before(first)):
        return f"pip install -U 'vllm>={first}' (image: vllm/vllm-openai:v{first} or newer)"
    if line.get("uninspected"):
        return reason("import_error_behind")
    return "look for `architectures` in config.json and in the list of supported models of vLLM's newest release"


def _dotted_capability(fact: str, line: MatchedLine) -> str | None:
    """The line's fact named `fact` (`80`) as a compute capability (`8.0`); None where it is no number."""
    digits = line.get(fact, "")
    return f"{digits[:-1]}.{digits[-1]}" if len(digits) >= 2 and digits.isdigit() else None


def _attention_backend_step(line: MatchedLine) -> str:
    """A step: which attention backend to choose instead, by card and release."""
    known = line.planner.known
    capability = known.gpu.compute_capability if known.gpu else (0, 0)
    # FLASH_ATTN needs 8.0; FlashInfer runs from 7.5 on; before V1, xFormers served older cards.
    # The workspace that can be too small is FlashInfer's own.
    name = "FLASH_ATTN" if capability >= (8, 0) or line.evidence.id == "backend_workspace" else "FLASHINFER"
    if known.release_known and known.release.before("0.9.0") and (0, 0) < capability < (7, 5):
        name = "XFORMERS"
    if "flashattention" in re.sub("[ _]", "", line.evidence.window.lower()):
        name = "TRITON_ATTN"  # another backend than the one that the message names
    if known.release_known and not known.release.after(_LAST_BACKEND_VARIABLE):
        return f"VLLM_ATTENTION_BACKEND={name} before the same command (or TRITON_ATTN, if not Triton's kernel fails)"
    flag = f"--attention-backend {name}"
    older = "" if known.release_known else f" (up to {_LAST_BACKEND_VARIABLE}: VLLM_ATTENTION_BACKEND={name})"
    return f"add {flag}{older}, or TRITON_ATTN if it is not Triton's kernel that fails"


def _timeout_step(line: MatchedLine) -> str:
    """How to raise the timeout that expired: the environment variable of this vLLM release or of Ray."""
    known = line.planner.known
    if re.search(r"\b[Rr]ay", line.evidence.text):
        return "RAY_CGRAPH_get_timeout=1200 before the same command (Ray's compiled graphs give up after 300 s)"
    if known.release_known and known.release.before("0.9.2"):
        return "VLLM_RPC_TIMEOUT=60000 (milliseconds) and VLLM_ENGINE_ITERATION_TIMEOUT_S=300 before the same command"
    return reason("longer_timeouts")


def _origin_text(kind: str, column: int, line: MatchedLine) -> str:
    """Where the line's `kind` (symbol, library or module) is from (`column` 1) or how to repair it (2): a sentence."""
    named = (line.get(key, "") for key in ("object", "library", "module"))
    name = f"{line.get('symbol', '')} {''.join(named)}".lower()
    rows = read_data("lookalikes.json")["origins"][kind]
    return line.fill(next(str(row[column]) for row in rows if re.search(row[0], name)))


def _version_pin(planner: FixPlanner) -> str:
    """The failed server's release for pip, as `==0.11.0`; empty where it is not known."""
    return f"=={planner.known.release.version}" if planner.known.release_known else ""


def _missing_op_step(line: MatchedLine) -> str:
    """A step for the library that vLLM's compiled ops did not find; where none is named, a fresh installation."""
    missing = line.planner.case.first("library_missing")
    if missing is not None and missing.facts.get("library"):
        return _origin_text("library", 2, MatchedLine(missing.facts, missing, line.planner))
    return reason("new_environment", {"pin": _version_pin(line.planner)})


def _invalid_config_step(line: MatchedLine) -> str:
    """How to inspect a model file that is no valid config."""
    file = line.get("file", "")
    if file and not file.endswith(".json"):
        return reason("file_as_model", {"file": file})
    return f"look at it: head -c 300 {file or 'config.json'}; an HTML page or a Git LFS pointer is not the file"


def _logged_driver(planner: FixPlanner) -> str:
    """The NVIDIA driver version in the log; empty where it is not printed."""
    item = planner.case.first("driver_version")
    return str(item.facts.get("driver", "")) if item else ""


def _driver_why(line: MatchedLine) -> str:
    """A sentence with the logged driver version and the CUDA version that the vLLM release needs."""
    have = _logged_driver(line.planner)
    shown = f" The log shows driver {have}." if have else ""
    if not line.planner.known.release_known:
        return shown
    build = support.build_of(line.planner.known.release)
    return f"{shown} vLLM {line.planner.known.release.version} is built with CUDA {build.cuda}."


def _driver_step(line: MatchedLine) -> str:
    """A step: upgrade to the oldest driver for the release's CUDA; or a note that the logged one is new enough."""
    if not line.planner.known.release_known:
        oldest = {build.cuda: build.oldest_driver for build in support.builds()}
        needs = ", ".join(f"CUDA {cuda} needs {driver}" for cuda, driver in reversed(oldest.items()))
        return f"upgrade the NVIDIA driver on the host: {needs}"
    build, have = support.build_of(line.planner.known.release), _logged_driver(line.planner)
    oldest_driver, is_old = build.oldest_driver, line.evidence.id == "driver_old"
    if is_old and have and oldest_driver and not support.driver_is_older(have, oldest_driver):
        return reason("driver_is_new", {"have": have, "cuda": build.cuda})
    return f"upgrade the NVIDIA driver on the host to {build.oldest_driver} or newer (CUDA {build.cuda} needs it)"


def _older_build_step(line: MatchedLine) -> str:
    """The last release whose CUDA version the logged driver accepts, else where to find builds for an older CUDA."""
    have, known = _logged_driver(line.planner), line.planner.known
    own = support.build_of(known.release)
    if have and own.oldest_driver and support.driver_is_older(have, own.oldest_driver):
        fits = support.newest_build_for_driver(have, known.release)
        if fits is not None:
            last = _last_release_of_build(fits.since)
            return f"driver {have} serves CUDA {fits.cuda}: vLLM {last} is the last release built with it"
    compat = "on a data-centre card VLLM_ENABLE_CUDA_COMPATIBILITY=1 (from 0.16 on) uses the image's compat library; "
    compat = "" if known.release_known and known.release.before("0.16.0") else compat
    return f"{compat}vLLM's release page has wheels for an older CUDA (+cu126, +cu128, +cu129)"


def _last_release_of_build(since: str) -> str:
    """The last release built with the same CUDA version as the release `since`."""
    later = next((build.since for build in support.builds() if release(build.since).after(since)), None)
    return [version for version in known_releases() if later is None or release(version).before(later)][-1]


def _capability(planner: FixPlanner) -> tuple[int, int]:
    """The card's compute capability; (0, 0) where it is not known or not NVIDIA's."""
    gpu = planner.known.gpu
    return gpu.compute_capability if gpu and gpu.vendor == "nvidia" else (0, 0)


def _unsupported_capability_why(line: MatchedLine) -> str:
    """A sentence with the card's compute capability and those the release was compiled for."""
    capability, known = _capability(line.planner), line.planner.known
    if capability == (0, 0) or known.gpu is None:
        return ""
    card = f" {known.gpu.name} is of compute capability {capability[0]}.{capability[1]}"
    if not known.release_known:
        return f"{card}."
    return (
        f"{card}; vLLM {known.release.version} is built for {', '.join(support.build_of(known.release).capabilities)}."
    )


_AMD_TARGET = re.compile(r"\bgfx\d{3,4}[a-f]?\b")


def _no_kernel_image_why(line: MatchedLine) -> str:
    """A sentence on whether any release has kernels for this card ("no kernel image is available")."""
    if target := _AMD_TARGET.search(line.evidence.text):
        return f"This build has no code for {target[0]}."
    capability = _capability(line.planner)
    if capability == (0, 0):
        return reason("kernels_by_generation")
    if support.first_build_with(capability) is None:
        return "No release's wheels have kernels for this card."
    return "Take a release whose wheels have kernels for this card."


_NOT_IN_EVERY_BUILD = ((7, 0), (10, 0), (12, 0))


def _releases_by_capability() -> str:
    """For each compute capability that only some releases have kernels for: which release to install."""
    parts = []
    for capability in _NOT_IN_EVERY_BUILD:
        first, last = support.first_build_with(capability), support.last_build_with(capability)
        if first is not None and last is not None:
            build, after = last
            version = f"=={_last_release_of_build(build.since)}" if after is not None else f">={first.since}"
            parts.append(f"{capability}: pip install 'vllm{version}'")
    return ", ".join(parts)


def _no_kernel_image_step(line: MatchedLine) -> str:
    """The release to install, or how to build from source, for this card."""
    if target := _AMD_TARGET.search(line.evidence.text):
        return reason("build_for_amd", {"target": target[0]})
    capability = _capability(line.planner)
    source = "or build from source: export TORCH_CUDA_ARCH_LIST='{}' && pip install -e . --no-build-isolation"
    last = support.last_build_with(capability) if capability != (0, 0) else None
    if capability == (0, 0):
        others = source.format("MAJOR.MINOR").removeprefix("or ")
        return reason("build_by_generation", {"releases": _releases_by_capability(), "others": others})
    if last is None:
        return source.format(f"{capability[0]}.{capability[1]}").removeprefix("or ")
    build, after = last
    first = support.first_build_with(capability)
    text = source.format(f"{capability[0]}.{capability[1]}")
    if after is not None:
        return f"pip install 'vllm=={_last_release_of_build(build.since)}' (the last with kernels for it), {text}"
    assert first is not None
    return f"pip install -U 'vllm>={first.since}' with its own torch (no older torch or add-on beside it), {text}"


_DERIVATIONS: dict[str, Callable[[MatchedLine], str | None]] = {
    "model": lambda line: None if is_local_model(name := line.planner.known.args.model) else name or None,
    "port": lambda line: _captured(r"(?:[:,] ?)(\d{4,5})\b", line.evidence.window or line.evidence.text),
    "package": _missing_package,
    "package_why": partial(_origin_text, "module", 1),
    "install_step": partial(_origin_text, "module", 2),
    "install": _install_advice,
    "architecture": lambda line: line.get("uninspected") or line.get("unwritten"),
    "first_release": _architecture_since_text,
    "upgrade_step": _upgrade_step,
    "minimum_dotted": partial(_dotted_capability, "minimum"),
    "current_dotted": partial(_dotted_capability, "current"),
    "backend_step": _attention_backend_step,
    "timeout_step": _timeout_step,
    "symbol_why": partial(_origin_text, "symbol", 1),
    "symbol_step": partial(_origin_text, "symbol", 2),
    "library_stem": lambda line: line.get("library", "").partition(".so")[0] or None,  # libcudart of libcudart.so.12
    "library_why": partial(_origin_text, "library", 1),
    "library_step": partial(_origin_text, "library", 2),
    "whole_pieces": _whole_pieces,
    "cuda_major": lambda line: _captured(r"\.so\.(\d+)", line.get("library", "")),
    "pin": lambda line: _version_pin(line.planner),
    "op_step": _missing_op_step,
    "config_step": _invalid_config_step,
    "driver_story": _driver_why,
    "driver_step": _driver_step,
    "older_build_step": _older_build_step,
    "build_story": _unsupported_capability_why,
    "image_why": _no_kernel_image_why,
    "image_step": _no_kernel_image_step,
}
