"""The bundled models: their configs by name, without network or model files.

`data/models/*.json` holds one family a file. An entry has the Hub `ids` it covers, a `source`, the published
`parameters` (`counted`: not published to the digit, so counted from the config) and the `config` facts that memory
depends on, `per_id` where one id has its own. A variant names its `base` and only what differs, often a `quantization`
from `schemes.json`. `bundled_config` writes an entry out as a config.json would."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from heapq import nlargest
from typing import Any

from legroom.facts import DATA_FOLDER, read_texts
from legroom.facts.config.fields import overridden
from legroom.records import dataclass

FOLDER = DATA_FOLDER / "models"
_ROLES = frozenset({"instruct", "it", "chat", "base", "hf", "pt"})
_PLAIN = frozenset({"bf16", "fp16"})
_SIZE = re.compile(r"[ae]?(\d+x)?\d+(\.\d+)?b|\d{2,}m")
"""8b, 0.6b, 135m, 8x7b, e4b, and the active parameters of a30b-a3b. 1m is a context."""
_VERSION = re.compile(r"v?\d{1,3}(\.\d+)?n?")
_ROUNDING = 0.05  # Names round a model's size: 106B for 106.85.


@dataclass(frozen=True, slots=True)
class Bundled:
    """One bundled model: its short name, the Hub ids that share the facts, and the facts."""

    name: str
    ids: tuple[str, ...]
    source: str
    parameters: int
    """The published count, or 0 where the variant's own was not published."""
    base: str | None
    entry: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The entry of `legroom models --json`."""
        return {
            "name": self.name,
            "ids": list(self.ids),
            "parameters": self.parameters or None,
            "quantized_from": self.base,
            "source": self.source,
        }

    def with_words(self, words: Sequence[str]) -> "Bundled | None":
        """The model if name and ids together contain all `words` (lower case), else None; ids that contain all of them
        come first, unless the short name does."""
        named = [one for one in self.ids if all(word in one.lower() for word in words)]
        if not all(word in " ".join((self.name, *self.ids)).lower() for word in words):
            return None
        if all(word in self.name for word in words) or not named:
            return self
        return replace(self, ids=tuple(dict.fromkeys((*named, *self.ids))))


def bundled_names() -> tuple[str, ...]:
    """Short names of every bundled model, variants included."""
    return tuple(_all_entries())


def all_bundled() -> list[Bundled]:
    """Every bundled model, variants included, in the order of `bundled_names`."""
    return [_bundled(key, entry) for key, entry in _all_entries().items()]


def find(name: str) -> Bundled | None:
    """The bundled model of a Hub id or short name, case-insensitive; None where there is none."""
    wanted = name.strip().lower()
    key = _key_of_exact_name(wanted) or _keys_by_name().get(wanted)
    return _bundled_of(key) if key else None


def mirrored(name: str) -> Bundled | None:
    """The bundled model that a known mirror's Hub id copies (`unsloth/Llama-3.2-3B-Instruct`); None for other ids."""
    owner, _, repo = name.strip().lower().partition("/")
    if owner not in _shared_values()["mirrors"] or not repo:
        return None
    key = _keys_by_name().get(repo)
    return _bundled_of(key) if key else None


def derived(name: str) -> Bundled | None:
    """The bundled model that another checkpoint's id or path names, with the quantization named there; else None."""
    parts = [part.rpartition("--")[2] for part in re.split(r"[/\\]", name.strip().lower()) if part] or [""]
    while len(parts) > 1 and _is_word("unnamed_folders", parts[-1]):
        parts.pop()
    repo = re.sub(r":(?=\d+(\.\d+)?b|e\db)", "-", parts[-1].removesuffix(".gguf"))  # llama3.1:8b
    exact = _keys_by_name().get(repo)
    scheme = None if exact else _scheme_in_name("/".join(parts[-2:]))
    spellings = (repo, repo.replace("_", "-"), *(("-".join(parts),) if len(parts) == 2 else ()))  # llama_3_8b, kimi/k3
    key = exact or next(filter(None, map(_key_in_name, spellings)), None)
    own = str(bundled_config(_bundled_of(key)).get("quantization_config", {}).get("quant_method")) if key else ""
    scheme = None if own in repo else scheme  # gpt-oss-20b-MXFP4
    if key is None or scheme == "unknown":
        return None
    bits = f"{scheme['mean_bits']:g} bits on average" if isinstance(scheme, dict) and "mean_bits" in scheme else "GGUF"
    stored = f", its weights stored as {scheme if isinstance(scheme, str) else bits}" if scheme else ""
    plain = {"without": ["quantization_config"]} if re.search(r"bf16|fp16", repo) and not scheme else {}
    likeness = (_bundled_of(key).ids or (key,))[0]
    source = f"taken from its name to be built as {likeness}{stored}; its config was not read"
    entry = (
        {"base": key, "assumed": True}
        | ({} if exact else {"named_alone": True})
        | plain
        | ({"quantization": scheme} if scheme else {})
    )
    return Bundled(name, (name,), source, 0, key, entry)


def is_misspelt(name: str) -> bool:
    """Whether an id without owner starts like a known model's but has a word that is no role, format or part of it."""
    if "/" in name or (model := derived(name)) is None or not model.base:
        return False
    repo = _spelled(name.strip())
    if any(pattern.search(repo) for pattern, _ in _tuned_from()):
        return False
    own = {word for each in _names_of(model.base, _entry_of_key(model.base)) for word in _words(_repo_name(each))}
    words = _words(repo.removesuffix(".gguf"))
    others = set(words) - own if words[:1] and words[0] in own else ()
    return any(word.isalpha() and len(word) > 2 and _scheme_in_name(word) is None for word in others)


def _scheme_in_name(name: str) -> Any:
    """The quantization in a checkpoint's name: a key of schemes.json, a config section, `unknown`, or None for none."""
    bits = re.search(r"(?:^|[-_.:])i?q(\d)", name)
    if "gguf" in name or re.search(r":i?q\d", name):  # vLLM's REPO:Q4_K_M
        return {"quant_method": "gguf", "bits": int(bits[1]) if bits else 4}  # Q4_K_M is the usual file
    mean = re.search(r"(?<![\d.])([2-8]\.\d+)[-_]?bit", name)
    if mean and not re.search(_shared_values()["words"]["other_storage"], name.replace(mean[0], "")):
        return _shared_values()["schemes"]["w4a16" if mean[1] < "6" else "w8a16"] | {"mean_bits": float(mean[1])}
    found = next((scheme for pattern, scheme in _shared_values()["by_name"] if re.search(pattern, name)), None)
    return found or ("unknown" if re.search(_shared_values()["words"]["other_storage"], name) else None)


def named_scheme(name: str) -> dict[str, Any] | None:
    """The `quantization_config` that a checkpoint's name implies; None where it names no known scheme."""
    scheme = _scheme_in_name(name.lower())
    section = _shared_values()["schemes"].get(scheme) if isinstance(scheme, str) else scheme
    return _expand(section) if section else None


def _key_in_name(repo: str) -> str | None:
    """The key of the bundled model whose words and sizes a name has, with no word of another model; else None."""
    repo, found = _spelled(repo), 0
    for pattern, base in _tuned_from():
        repo, found = pattern.subn(base, repo, count=1)
        if found:
            break
    words = _words(repo)
    sizes, unsized = frozenset(word for word in words if _SIZE.fullmatch(word)), frozenset[str]()
    for length, start in itertools.product(range(len(words), 0, -1), range(len(words))):
        run, following = words[start : start + length], "".join(words[start + length : start + length + 1])
        if len(run) < length or {run[0], run[-1]} & sizes or (_VERSION.fullmatch(following) and not found):
            continue
        letters = "".join(word for word in run if word not in sizes).replace(".", "")
        for named in (sizes, unsized):
            key = _keys_by_words().get((letters, named))
            if key and named != sizes and not _is_its_total_size(key, sizes):
                continue
            if key and not _names_other_model(words, key, bool(sizes)):
                return key
    return None


def _is_its_total_size(key: str, sizes: frozenset[str]) -> bool:
    """Whether the largest of these sizes (`30b`) is the model's parameter count, rounded; not `a3b`, active ones."""
    totals = (size for size in sizes if size[0].isdigit() and "x" not in size)
    total = max((float(size[:-1]) * {"b": 1e9, "m": 1e6}[size[-1]] for size in totals), default=0.0)
    return bool(abs(total / max(1, _entry_of_key(key).get("parameters", 0)) - 1) < _ROUNDING)


def _names_other_model(words: list[str], key: str, is_sized: bool) -> bool:
    """Whether words missing in the names of model `key` stand for another model (or series, unless `is_sized`)."""
    own = {word for each in _names_of(key, _entry_of_key(key)) for word in _words(_repo_name(each))}
    multimodal = any(part in bundled_config(_bundled_of(key)) for part in ("vision_config", "audio_config", "visual"))
    kinds = ("other_models", *(() if multimodal else ("modalities",)), *(() if is_sized else ("series",)))
    return any(_is_word(kind, word) for word in set(words) - own for kind in kinds)


def _is_word(kind: str, word: str) -> bool:
    """Whether a word of a checkpoint's name matches the pattern under `kind` in schemes.json's `words`."""
    return bool(re.fullmatch(_shared_values()["words"][kind], word))


def _words(repo: str) -> list[str]:
    """The words of a repository's name without roles such as `instruct` and precisions such as `bf16`."""
    return [word for word in re.split(r"[-: ]+|\.(?!\d)", _spelled(repo)) if word and word not in _ROLES | _PLAIN]


def _spelled(repo: str) -> str:
    """A name in lower case with one spelling of sizes and versions: `30b-a3b` for `30ba3b`, `0.5b` for `05b`."""
    text = re.sub(r"(?<=\d)_(?=\d)", ".", re.sub(r"(?<=\db)(?=a\d)", "-", repo.lower())).replace("_", "-")
    return re.sub(r"(?<![\d.])0(?=\d+[bm]\b)", "0.", text.removeprefix("meta-"))


def variants(name: str) -> tuple[Bundled, ...]:
    """The known quantized checkpoints of a model, for a Hub id only those of its role (base or chat); () if unknown."""
    bundled = find(name)
    if bundled is None:
        return ()
    root = bundled.base or bundled.name
    hub_name, any_role = (name, False) if "/" in name else (hub_id_of(bundled, name), True)
    others = (
        _bundled_of(key) for key, entry in _all_entries().items() if entry.get("base") == root and key != bundled.name
    )
    matching = (
        replace(other, ids=tuple(hub_id for hub_id in other.ids if _is_quantized_from(hub_name, hub_id, any_role)))
        for other in others
    )
    return tuple(other for other in matching if other.ids)


def smaller_siblings(name: str) -> tuple[Bundled, ...]:
    """Bundled models with the same series, owner and role but fewer parameters, the largest first; () if unknown."""
    bundled = find(name)
    if bundled is None:
        return ()
    root = _bundled_of(bundled.base) if bundled.base else bundled
    lineage = _lineage(name if "/" in name else hub_id_of(bundled, name))
    smaller = []
    for key, entry in _all_entries().items():
        if "base" in entry or not 0 < entry.get("parameters", 0) < root.parameters:
            continue
        alike = tuple(hub_id for hub_id in entry.get("ids", ()) if _lineage(hub_id) == lineage)
        smaller += [replace(_bundled_of(key), ids=alike)] if alike else []
    return tuple(sorted(smaller, key=lambda each: -each.parameters))


def hub_id_of(bundled: Bundled, name: str) -> str:
    """The one of a bundled model's Hub ids whose name is closest to the short name `name`."""
    wanted = _alphanumeric(name)
    ids = bundled.ids or (bundled.name,)
    if wanted == _alphanumeric(bundled.name):
        return ids[0]
    plain = (hub_id for hub_id in ids if _alphanumeric(_without_role(_repo_name(hub_id))) == wanted)
    begins = (hub_id for hub_id in ids if _alphanumeric(_repo_name(hub_id)).startswith(wanted))
    holds = (hub_id for hub_id in ids if wanted in _alphanumeric(_repo_name(hub_id)))
    same = (hub_id for hub_id in ids if _alphanumeric(_repo_name(hub_id)) == wanted)
    return next(itertools.chain(same, plain, begins, holds, ids))


def _is_quantized_from(name: str, quantized: str, any_role: bool) -> bool:
    """Whether a quantized checkpoint's name extends this one's, by no date, with the same role (or `any_role`)."""
    if not any_role and checkpoint_role(name) != checkpoint_role(quantized):
        return False
    wanted_words, made = ([word for word in _name_words(each) if word not in _ROLES] for each in (name, quantized))
    rest = made[len(wanted_words) :]  # a date has four digits: DeepSeek-V3-0324, Qwen3-4B-2507
    return made[: len(wanted_words)] == wanted_words and not any(re.fullmatch(r"\d{4}", word) for word in rest)


def checkpoint_role(hub_id: str) -> str:
    """`chat`, `base` or empty, from a checkpoint's name."""
    words = set(_name_words(hub_id))
    return "chat" if words & {"instruct", "it", "chat"} else "base" if words & {"base", "pt"} else ""


def chat_checkpoint(name: str, hub_id: str) -> str:
    """The chat checkpoint of the bundled model `name` that belongs to the base checkpoint `hub_id`; empty for none."""
    bundled = find(name) if "/" not in name else None
    chats = (each for each in (bundled.ids if bundled else ()) if checkpoint_role(each) == "chat" and each != hub_id)
    return next((each for each in chats if each.startswith(hub_id)), "")


def _lineage(hub_id: str) -> tuple[str, list[str], str]:
    """(owner, words of the name without sizes and roles, role) of a Hub id; equal for all models of one series."""
    words = [word for word in _name_words(hub_id) if word not in _ROLES and not _SIZE.fullmatch(word)]
    return hub_id.partition("/")[0].lower(), words, checkpoint_role(hub_id)


def _repo_name(hub_id: str) -> str:
    """The part of a Hub id after the owner, in lower case: `qwen3-8b` of `Qwen/Qwen3-8B`."""
    return hub_id.rpartition("/")[2].lower()


def _alphanumeric(name: str) -> str:
    """The letters and digits of a name, so that llama3.1-8b, llama-3.1:8b and Meta-Llama-3.1-8B are equal."""
    return re.sub(r"[^a-z0-9]", "", name.strip().lower().removeprefix("meta-"))


def _name_words(name: str) -> list[str]:
    """The hyphen-separated words of a repository's name in lower case, without a vendor's prefix and a last `bf16`."""
    words = name.rpartition("/")[2].lower().removeprefix("meta-").removeprefix("nvidia-").split("-")
    return words[:-1] if words[-1] in _PLAIN else words


@lru_cache(maxsize=64)
def nearest(name: str, limit: int = 5) -> tuple[str, ...]:
    """Short names of the bundled models with the most similar names, at most `limit`; empty if none is similar."""
    import difflib  # only on the way to an error message

    close: list[str] = []
    for spelling in dict.fromkeys((name.strip().lower(), _repo_name(name.strip().rstrip("/")))):
        wanted = _letter_pairs(spelling)
        alike = nlargest(
            16, _keys_by_name(), key=lambda each: len(wanted & _letter_pairs(each)) / (len(wanted) + len(each))
        )
        close += difflib.get_close_matches(spelling, alike, n=2 * limit, cutoff=0.55)
    return tuple(dict.fromkeys(_keys_by_name()[each] if "/" in each else each for each in close))[:limit]


@lru_cache(maxsize=64)
def misspelling_of(name: str) -> str:
    """The known Hub id of which one word of five or more letters is misspelt here; or, where only a version such as
    `-v0.3` is missing, the newest of those ids; empty for neither."""
    import difflib  # only where a name is wrong

    versions = [known for known in _keys_by_name() if re.fullmatch(rf"{re.escape(name.lower())}-v0\.\d", known)]
    if versions and "/" in name:
        return max(versions)
    words = name.lower().replace("/", "-").split("-")
    for known in _keys_by_name() if "/" in name else ():
        right = known.replace("/", "-").split("-")
        pairs = [pair for pair in zip(words, right, strict=False) if pair[0] != pair[1]]
        if len(right) == len(words) and len(pairs) == 1 and "/" in known and min(map(len, pairs[0])) >= 5:
            is_word = all(map(str.isalpha, pairs[0])) and difflib.SequenceMatcher(None, *pairs[0]).ratio() >= 0.8
            if is_word and pairs[0][0][0] == pairs[0][1][0]:
                return known
    return ""


@cache
def _letter_pairs(name: str) -> frozenset[tuple[str, str]]:
    """The pairs of adjacent characters in a name; two names are as similar as they share pairs."""
    return frozenset(itertools.pairwise(name))


def bundled_config(model: Bundled, hub_id: str = "") -> dict[str, Any]:
    """The config.json of a bundled model, with what differs in the checkpoint `hub_id`."""
    entry = model.entry
    inherited = bundled_config(_bundled_of(model.base)) if model.base else {}
    config = overridden(inherited, _expand(entry.get("config", {})))
    for key in entry.get("without", ()):
        config.pop(key, None)
    own_of_id = {key.lower(): facts for key, facts in entry.get("per_id", {}).items()}
    config.update(own_of_id.get(hub_id.lower(), {}))
    scheme = entry.get("quantization")
    if scheme is not None:
        quantization = _expand(_shared_values()["schemes"][scheme]) if isinstance(scheme, str) else _expand(scheme)
        config["quantization_config"] = quantization
    if entry.get("unquantized") and "quantization_config" in config:
        # Unquantized modules beyond the scheme's own list.
        quantized = config["quantization_config"]
        lists_ignored = quantized.get("quant_method") in ("compressed-tensors", "modelopt")
        key = "ignore" if lists_ignored else "modules_to_not_convert"
        config["quantization_config"] = {
            **quantized,
            key: [*(quantized.get(key) or ()), *_expand(entry["unquantized"])],
        }
    return config


def _expand(value: Any) -> Any:
    """A value of a model's data file with the short forms `cycle`, `runs`, `names` and `each` written out."""
    if isinstance(value, Mapping):
        if "cycle" in value:
            return list(value["cycle"]) * value["times"] + list(value.get("then", ()))
        if "runs" in value:
            return [item for item, count in value["runs"] for _ in range(count)]
        if "names" in value:
            return [name for pattern in value["names"] for name in _names(pattern)]
        if "each" in value:
            return {name: item for patterns, item in value["each"] for pattern in patterns for name in _names(pattern)}
        return {key: _expand(item) for key, item in value.items()}
    return [_expand(item) for item in value] if isinstance(value, list) else value


def _names(pattern: str | list[str]) -> Iterator[str]:
    """The names that `["model.layers.{}.mlp.gate", "3-60"]` stands for; each further item fills the next `{}`."""
    if isinstance(pattern, str):
        yield pattern
        return
    template, *spans = pattern
    for numbers in itertools.product(*(_numbers_in_spans(span) for span in spans)):
        yield template.format(*numbers)


def _numbers_in_spans(spans: str) -> list[int]:
    """The numbers of a text such as `0-3,7`: 0, 1, 2, 3 and 7."""
    pairs = (span.partition("-") for span in spans.split(","))
    return [number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)]


@cache
def _texts() -> dict[str, str]:
    """The JSON text of each model family's data file, by family."""
    return {family: text for family, text in read_texts(FOLDER).items() if family != "schemes"}


@cache
def _parse_family(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The entries of one family's data file, by key."""
    return dict(json.loads(_texts()[name]))


@cache
def _all_entries() -> dict[str, Mapping[str, Any]]:
    """The entries of all bundled models, by key."""
    return {key: entry for family in _texts() for key, entry in _parse_family(family).items()}


@cache
def _entry_of_key(key: str) -> Mapping[str, Any]:
    """The entry of the bundled model `key`; parses its family's file alone, as all take a tenth of a plan's time."""
    quoted = f'"{key}"'
    return next(
        entries[key] for name in _texts() if quoted in _texts()[name] and key in (entries := _parse_family(name))
    )


@cache
def _key_of_exact_name(wanted: str) -> str | None:
    """The key of the model with exactly this lower-case name, found without building the index of all; else None."""
    quoted = f'"{wanted}"'
    for family, text in _texts().items():
        if quoted in text.lower():
            for key, entry in _parse_family(family).items():
                if wanted in (each.lower() for each in _names_of(key, entry)):
                    return key
    return None


def _names_of(key: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """All names of a bundled model: its key, and its entry's Hub ids and aliases."""
    return (key, *entry.get("ids", ()), *entry.get("aliases", ()))


@cache
def _shared_values() -> Mapping[str, Any]:
    """The parsed schemes.json: quantization schemes and name patterns that model files share."""
    return dict(json.loads(read_texts(FOLDER)["schemes"]))


@cache
def _tuned_from() -> list[tuple[re.Pattern[str], str]]:
    """How names of tuned models spell a model that is bundled, and that model's own name."""
    word_end = r"((?<=-)|(?![a-z0-9]|\.\d))"
    return [(re.compile(f"(?<![a-z0-9]){name}{word_end}"), base) for name, base in _shared_values()["tuned_from"]]


@cache
def _keys_by_name() -> dict[str, str]:
    """Keys of bundled models by lower-case name: a Hub id, a repository's name or a short name."""
    index: dict[str, str] = {}
    for key, entry in _all_entries().items():
        for name in _names_of(key, entry):
            index.setdefault(name.lower(), key)
    for key, entry in _all_entries().items():
        for full in entry.get("ids", ()):
            index.setdefault(_repo_name(full), key)
            if "base" not in entry:
                index.setdefault(_without_role(_repo_name(full)), key)
    return index


@cache
def _keys_by_words() -> dict[tuple[str, frozenset[str]], str]:
    """(a name's letters without its sizes, those sizes) -> key of the first such model that is no quantized variant."""
    index: dict[tuple[str, frozenset[str]], str] = {}
    for name, key in _keys_by_name().items():
        if "/" not in name and not {"base", "quantization"} <= _all_entries()[key].keys():
            sizes = frozenset(word for word in _words(name) if _SIZE.fullmatch(word))
            letters = "".join(word for word in _words(name) if word not in sizes).replace(".", "")
            index.setdefault((letters, sizes), key)
            index.setdefault((letters, frozenset(size for size in sizes if size[0] != "a")), key)
    return index


def _without_role(repo: str) -> str:
    """A repository's name without its role such as `instruct`: `llama-3.1-8b` for `llama-3.1-8b-instruct`."""
    words = repo.split("-")
    while len(words) > 1 and words[-1] in _ROLES:
        words.pop()
    return "-".join(words)


def _bundled_of(key: str) -> Bundled:
    """The bundled model of an entry's key."""
    return _bundled(key, _entry_of_key(key))


def _bundled(key: str, entry: Mapping[str, Any]) -> Bundled:
    """The bundled model of an entry and its key."""
    ids = tuple(entry.get("ids", ()))
    source = _shared_values()["sources"].get(entry["source"], entry["source"]).format((ids or (key,))[0])
    parameters, base = entry.get("parameters", 0), entry.get("base")
    return Bundled(name=key, ids=ids, source=source, parameters=parameters, base=base, entry=entry)
