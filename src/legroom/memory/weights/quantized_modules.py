"""The quantization scheme of each module: the checkpoint's ignore list, targets and mixed-precision rules."""

import re
from collections.abc import Mapping
from fnmatch import translate
from functools import lru_cache
from itertools import accumulate

from legroom.facts.anatomy import Anatomy
from legroom.facts.model import Quantization
from legroom.memory.weights.module import Module
from legroom.records import dataclass, field

_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers", "layers")
_EXPERT_LEAVES = {"w13": ("gate_proj", "up_proj", "w1", "w3"), "w2": ("down_proj", "w2")}


@dataclass(frozen=True, slots=True)
class Patterns:
    """Module name patterns, by how they match."""

    exact: frozenset[str]
    """Names from `layers.` on, or whole names."""
    words: tuple[tuple[str, ...], ...]
    """Dotted parts that match anywhere in a name."""
    regex: re.Pattern[str] | None
    """Globs and regular expressions, joined into one."""
    starts: tuple[str, ...] = ()
    """Prefixes of globs with one trailing star: hundreds of them as one expression compile slowly."""
    starts_in_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Prefixes within a layer, by layer number."""
    numbers: frozenset[str] = frozenset()
    """Every number outside of expressions: layers whose number starts with none of these match equally."""
    tells_layers_apart: bool = False
    """Whether an expression may match one layer and not another with as many digits."""

    def names_layer(self, layer: int) -> bool:
        """Whether a pattern names this layer's number, so that other layers may be quantized differently."""
        if self.tells_layers_apart:
            return True
        number = str(layer)
        return any(number[:count] in self.numbers for count in range(1, len(number) + 1))

    def match(self, name: str) -> bool:
        """Whether a pattern matches a module's name, which starts at `layers.N.` or is outside the layers."""
        if self.exact and not self.exact.isdisjoint(accumulate(name.split("."), "{}.{}".format)):
            return True
        if self.words:
            parts = tuple(name.split("."))
            if any(_contains(parts, words) for words in self.words):
                return True
        if not name.startswith("layers."):
            return self._matches_whole(name)
        if self.starts_in_layers:
            number, _, rest = name.removeprefix("layers.").partition(".")
            if rest.startswith(self.starts_in_layers.get(number, ())):
                return True
        if self.regex is None and not self.starts:
            return False
        return any(self._matches_whole(prefix + name[len("layers") :]) for prefix in _PREFIXES)

    def _matches_whole(self, name: str) -> bool:
        """Whether the name starts with a listed prefix, or an expression matches it from its beginning."""
        return name.startswith(self.starts) or (self.regex is not None and self.regex.match(name) is not None)


def _contains(parts: tuple[str, ...], words: tuple[str, ...]) -> bool:
    """Whether `words` are consecutive items of `parts`."""
    size = len(words)
    return words[0] in parts and any(parts[i : i + size] == words for i in range(len(parts) - size + 1))


_NUMBER = re.compile(r"\d+")
_IN_LAYER = re.compile(r"(?P<head>.*layers)\.(?P<number>\d+)\.(?P<rest>.*)")
_CHOICE_OF_LETTERS = re.compile(r"\[[A-Za-z_]+\]")
_TELLS_DIGITS_APART = re.compile(r"[\d\[{]|\\\w|\(\?")


def _tells_digits_apart(expression: str) -> bool:
    """Whether the expression may match one digit but not another, as it has a digit or a character class."""
    return _TELLS_DIGITS_APART.search(_CHOICE_OF_LETTERS.sub("", expression.removeprefix("re:"))) is not None


@lru_cache(maxsize=64)
def patterns(names: tuple[str, ...]) -> Patterns:
    """A config's module names, globs and `re:` expressions, compiled; no expression is kept if one is invalid."""
    exact, words, expressions, starts = set(), [], [], []
    starts_in_layers: dict[str, tuple[str, ...]] = {}
    numbers, tells_apart = set[str](), False
    for name in names:
        if name.startswith("re:"):
            expressions.append(name[3:])
            tells_apart = tells_apart or _tells_digits_apart(name)
            continue
        if name.endswith("*") and not any(sign in name[:-1] for sign in "*?["):
            start = _IN_LAYER.fullmatch(name[:-1])
            if start is not None and start["head"] in _PREFIXES:
                starts_in_layers[start["number"]] = (*starts_in_layers.get(start["number"], ()), start["rest"])
            else:
                starts.append(name[:-1])
        elif "*" in name or "?" in name:
            expressions += [translate(name), translate(f"{name}.*")]
            tells_apart = tells_apart or _tells_digits_apart(name)
            continue
        elif "layers." in name:
            in_layer = name[name.index("layers.") :]
            exact.add(in_layer)
            numbers.add(in_layer.split(".", 2)[1])
            continue
        else:
            words.append(tuple(name.split(".")))
        numbers.update(_NUMBER.findall(name))
    try:
        regex = re.compile("|".join(f"(?:{expression})" for expression in expressions)) if expressions else None
    except re.error:
        regex = None
    return Patterns(
        frozenset(exact), tuple(words), regex, tuple(starts), starts_in_layers, frozenset(numbers), tells_apart
    )


@lru_cache(maxsize=64)
def _by_scheme(rules: tuple[tuple[str, Quantization], ...]) -> tuple[tuple[Quantization, Patterns], ...]:
    """A config's rules (pattern, scheme) as one (scheme, compiled patterns) per scheme, in order of appearance."""
    grouped: dict[Quantization, list[str]] = {}
    for name, scheme in rules:
        grouped.setdefault(scheme, []).append("*" if name == "Linear" else name)
    return tuple((scheme, patterns(tuple(names))) for scheme, names in grouped.items())


class Schemes:
    """The schemes of one checkpoint's modules."""

    def __init__(self, quantization: Quantization | None, anatomy: Anatomy) -> None:
        self._quantization = quantization
        self._anatomy = anatomy
        self._ignored = patterns(quantization.ignored) if quantization else None
        self._rules = _by_scheme(quantization.rules) if quantization else ()
        targets = patterns(quantization.targets or ()) if quantization else None
        self._patterns = tuple(filter(None, (self._ignored, targets, *(rule for _, rule in self._rules))))
        self._known: dict[tuple[str, tuple[str, ...], int], Quantization | None] = {}

    def of(self, module: Module, layer: int) -> Quantization | None:
        """The scheme of a module in a layer; None: unquantized."""
        if self._quantization is None or not module.quantizable:
            return None
        key = module.name, module.shards, self.kind_of_layer(layer)
        if key not in self._known:
            self._known[key] = self._find(self._names(module, layer), ".experts." in module.name)
        return self._known[key]

    def kind_of_layer(self, layer: int) -> int:
        """A cache key: layers in which the patterns match modules of the same names have the same number."""
        named = any(each.names_layer(layer) for each in self._patterns)
        return layer if named else -len(str(layer))  # a dot in an expression matches one digit

    def of_lm_head(self) -> Quantization | None:
        """The scheme of the output layer, if the checkpoint says that it is quantized; else None."""
        main = self._quantization
        if main is None:
            return None
        for scheme, rule in self._rules:
            if rule.match("lm_head") and ("lm_head",) in rule.words:
                return scheme
        return main if main.quantizes_lm_head and not (self._ignored and self._ignored.match("lm_head")) else None

    def _find(self, names: list[str], is_routed_expert: bool) -> Quantization | None:
        """The scheme of the first rule with one of these names of a module; None where it is left unquantized."""
        main = self._quantization
        assert main is not None and self._ignored is not None
        if any(self._ignored.match(name) for name in names):
            return None
        for scheme, rule in self._rules:
            if any(rule.match(name) for name in names):
                return scheme
        if main.targets == ("Linear",):
            return main
        if main.targets == ("experts",):
            return main if is_routed_expert else None
        return main if main.targets and any(patterns(main.targets).match(name) for name in names) else None

    def _names(self, module: Module, layer: int) -> list[str]:
        """The names that a checkpoint may give a module: the family's path, with its own name or its fused parts'."""
        head, _, rest = module.name.partition(".")
        path = {
            "self_attn": self._anatomy.attention_path,
            "mlp": self._anatomy.mlp_path if rest in _DENSE else self._anatomy.moe_path,
        }.get(head, head)
        stem = f"layers.{layer}.{path}." if path else f"layers.{layer}."
        if ".experts." in module.name:
            leaf = rest.rpartition(".")[2]
            return [f"{stem}experts", *(f"{stem}experts.0.{shard}" for shard in _EXPERT_LEAVES[leaf])]
        inner, _, leaf = rest.rpartition(".")
        inners = ("shared_experts.", "shared_expert.") if inner == "shared_experts" else (f"{inner}." if inner else "",)
        return [f"{stem}{within}{name}" for within in inners for name in (leaf, *module.shards)]


_DENSE = {"gate_up_proj", "up_proj", "down_proj"}
