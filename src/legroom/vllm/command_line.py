"""Command lines as words: split into flags with values, changed flag by flag, written from settings, without secrets.
`parse` converts a command to ServeArgs. Here words are kept as written, removed and misspelled flags included."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from legroom.facts.flags import Flag, dest_name, flag_name, flags_ever, flags_of
from legroom.facts.releases import Release
from legroom.masking import PLACEHOLDER, is_secret_json_key, shown_word
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs
from legroom.vllm.flag_values import FIELDS, SPECULATIVE_FIELDS, as_words, looks_like_flag

_TRUTHS = ("true", "false", "0", "1")
_PLACEHOLDERS = {"--api-key": "YOUR_API_KEY", "--hf-token": "YOUR_HF_TOKEN"}


@dataclass(frozen=True, slots=True)
class CommandPart:
    """A flag with its values, or a bare word."""

    words: tuple[str, ...]
    name: str = ""
    """As written, with `_` as `-`; empty for a bare word."""
    flag: Flag | None = None
    """None for a bare word and for a flag that no release has."""

    @property
    def value(self) -> str:
        """The value as written, several joined by spaces; "" for a switch or a bare word."""
        return self.words[0].partition("=")[2] or " ".join(self.words[1:])

    @property
    def long_name(self) -> str:
        """The flag's full name, if it is written short, abbreviated or with `--no-`; an unknown one without `no-`."""
        return self.flag.name if self.flag else _without_no_prefix(self.name)

    @property
    def dest(self) -> str:
        """vLLM's Python name of the flag (argparse's dest), such as `max_model_len`; derived for an unknown flag."""
        return self.flag.dest if self.flag else dest_name(self.name)


def command_parts(words: Sequence[str], release: Release | None = None) -> Iterator[CommandPart]:
    """The flags, with their values, and bare words of a command, as the release parses them; None: as any does."""
    table = flags_ever() if release is None else flags_of(release)
    at = 0
    while at < len(words):
        word = words[at]
        if not looks_like_flag(word):
            yield CommandPart((word,))
            at += 1
            continue
        name = plain_name(word)
        flag = _flag_by_name_or_prefix(name, table) or _flag_by_name_or_prefix(name, flags_ever())
        end = at + 1 if "=" in word or name.startswith("-O") else _end_of_values(words, at + 1, flag)
        yield CommandPart(tuple(words[at:end]), name, flag)
        at = end


def plain_name(word: str) -> str:
    """The flag's name in a word as written: `--max-model-len` for `--max_model_len=8`, `--x` for `--x.key`."""
    name = word.partition("=")[0]
    return flag_name(name[2:].partition(".")[0]) if name.startswith("--") else name


def long_name(name: str) -> str:
    """The full name of a flag, in any spelling, of any release; an unknown one as written, without `no-`."""
    plain = plain_name(name)
    flag = _flag_by_name_or_prefix(plain, flags_ever())
    return flag.name if flag else _without_no_prefix(plain)


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The values of a command's flags, joined by spaces, by the name as written; "" for a switch."""
    return {part.name: part.value for part in command_parts(words) if part.name}


def value_of(words: Sequence[str], flags_at: int, dest: str, release: Release) -> str | None:
    """The last value of the flag of this dest in `words[flags_at:]`, as written; "" for a switch, None if absent."""
    values = [part.value for part in command_parts(words[flags_at:], release) if part.name and part.dest == dest]
    return values[-1] if values else None


def _without_no_prefix(name: str) -> str:
    """The flag without `no-`: `--no-x` as `--x`."""
    return "--" + name[5:] if name.startswith("--no-") else name


def _flag_by_name_or_prefix(name: str, table: Mapping[str, Flag]) -> Flag | None:
    """The flag of `table` with this name or --no- name, or the only one with this prefix; None for none or several."""
    flag = table.get(name) or table.get(_without_no_prefix(name))
    if flag is not None or not name.startswith("--") or len(name) < 4:
        return flag
    near = {flag.name: flag for long, flag in table.items() if long.startswith(name)}
    return near.popitem()[1] if len(near) == 1 else None


def _end_of_values(words: Sequence[str], at: int, flag: Flag | None) -> int:
    """The index in `words` after a flag's values, which begin at `at`; an unknown flag (None) takes one at most."""
    kind, end = flag.kind if flag else "str", at
    if kind in ("switch", "bool") or (kind == "optbool" and words[at : at + 1] and words[at].lower() not in _TRUTHS):
        return at
    most = len(words) if kind.startswith("list:") else min(at + 1, len(words))
    while end < most and not looks_like_flag(words[end]):
        end += 1
    return end


def with_flags(words: Sequence[str], flags: Mapping[str, str | None]) -> list[str]:
    """The words of a command with these flags set ("" for a switch) or removed (None)."""
    changed = {long_name(name) for name in flags}
    kept = [word for part in command_parts(words) if part.long_name not in changed for word in part.words]
    for name, value in flags.items():
        if value is not None:
            kept += joined(name, (value,) if value else ())
    return kept


def with_settings(words: Sequence[str], flags_at: int, changes: Mapping[str, Any], release: Release) -> tuple[str, ...]:
    """The words with these settings (by dest) as the release's flags (None: removed); flags begin at `flags_at`."""
    kept = list(words[:flags_at])
    for part in command_parts(words[flags_at:], release):
        if not part.name or part.dest not in changes:
            kept += part.words
    by_dest = _by_dest(release)
    for dest, value in changes.items():
        if value is not None:
            name = dest if dest.startswith("-") else flag_name(dest)
            unknown = Flag(name, dest, "switch" if value is True else "str")
            kept += flag_words(by_dest.get(dest, unknown), value)
    return tuple(kept)


def changes_back(now: Sequence[str], before: Sequence[str]) -> dict[str, str | None]:
    """The flags to give to `with_flags` to turn the command `now` into `before`; None for those to remove."""
    current, wanted = flags_in(now), flags_in(before)
    gone: dict[str, str | None] = {name: None for name in current if name not in wanted}
    return gone | {name: value for name, value in wanted.items() if current.get(name) != value}


def command(args: ServeArgs, release: Release) -> tuple[str, ...]:
    """The command that starts this server; settings without a flag in the release are left out."""
    by_dest = _by_dest(release)
    words = ["vllm", "serve", args.model] if args.model else ["vllm", "serve"]
    if release.before("0.5.2"):
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", *(("--model", args.model) if args.model else ())]
    for dest in FIELDS:
        value = _field_value(args, dest, release)
        if dest == "model" or value is None:
            continue
        if dest == "speculative_config" and dest not in by_dest:
            # The flags of speculative decoding up to 0.8.2.
            for own, key in SPECULATIVE_FIELDS.items():
                words += flag_words(by_dest[own], value[key]) if key in value and own in by_dest else ()
        elif dest == "optimization_level" and dest in by_dest:
            words.append(f"-O{value}")
        elif dest in by_dest:
            words += flag_words(by_dest[dest], value)
    return (*words, *args.others)


def setting_words(dest: str, value: Any, release: Release) -> list[str] | None:
    """The setting of this dest as the release's flag; empty for a switch that is off, None without such a flag."""
    flag = _by_dest(release).get(dest)
    return None if flag is None else flag_words(flag, value)


def any_release_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings by dest as flags, although no release may have them: True as `--x`, False as `--no-x`, None left out."""
    words: list[str] = []
    for dest, value in settings.items():
        name = flag_name(dest)
        if value is False:
            words.append("--no-" + name[2:])
        elif value is not None:
            # A list is JSON unless the flag takes several words.
            flag = flags_ever().get(name)
            is_json = isinstance(value, (list, tuple)) and not (value and flag and flag.kind.startswith("list:"))
            words += joined(name, (json.dumps(value),) if is_json else as_words(value))
    return words


def change_words(settings: Mapping[str, Any]) -> list[str]:
    """Changed settings by dest as flags to show a user; a removed one (None) as `(without --flag)`."""
    dropped = [f"(without {flag_name(dest)})" for dest, value in settings.items() if value is None]
    return [*any_release_words(settings), *dropped]


def flag_words(flag: Flag, value: Any) -> list[str]:
    """A flag with its value in the form that its release accepts; empty for a switch that is off."""
    if flag.kind in ("switch", "bool", "optbool"):
        if value:
            return [flag.name]
        return {"bool": ["--no-" + flag.name[2:]], "optbool": [f"{flag.name}=False"]}.get(flag.kind, [])
    if flag.name == "--compilation-config" and "-O" in flag.short_names and set(value) == {"level"}:
        return [f"-O{value['level']}"]
    if flag.kind == "pairs" and isinstance(value, Mapping):
        return [flag.name, ",".join(f"{key}={count}" for key, count in value.items())]
    if flag.kind in ("int", "human") and isinstance(value, float):
        value = round(value)  # --swap-space took whole GiB until 0.5.4
    return joined(flag.name, (json.dumps(dict(value)),) if isinstance(value, Mapping) else as_words(value))


def joined(name: str, values: Sequence[str]) -> list[str]:
    """A flag and its values as words; joined by `=` where a value starts with a dash."""
    return [f"{name}={values[0]}"] if len(values) == 1 and looks_like_flag(values[0]) else [name, *values]


def _by_dest(release: Release) -> dict[str, Flag]:
    """The flags of a release by vLLM's Python name (argparse's dest)."""
    return {flag.dest: flag for flag in flags_of(release).values()}


def _field_value(args: ServeArgs, dest: str, release: Release) -> Any:
    """The ServeArgs field `dest` as its flag takes it: before 0.11.1 compilation_config holds the capture sizes."""
    value = getattr(args, dest)
    if release.at_least("0.11.1"):
        return value
    if dest == "cudagraph_capture_sizes":
        return None
    if dest == "compilation_config" and args.cudagraph_capture_sizes is not None:
        return {**(value or {}), "cudagraph_capture_sizes": list(args.cudagraph_capture_sizes)}
    return value


def without_secrets(words: Iterable[str], release: Release | None = None) -> Iterator[str]:
    """The words of a command, variables too, with placeholders in place of API keys, tokens and credentials."""
    for part in command_parts(tuple(words), release):
        hidden = _PLACEHOLDERS.get(part.long_name) if part.name else None
        if part.name and is_secret_json_key(part.words[0].partition("=")[0].partition(".")[2]):
            hidden = PLACEHOLDER
        if hidden is None:
            yield from map(shown_word, part.words)
            continue
        flag, joined, _ = part.words[0].partition("=")
        yield f"{flag}={hidden}" if joined else flag
        yield from (hidden for _ in part.words[1:])  # --api-key takes several keys
