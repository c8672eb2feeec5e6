"""The command that is pasted with a log: a shell line, `LLM(...)`, a YAML list, or settings in a sentence."""

import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from legroom.deployments.deployment import Deployment, deployment_from_command
from legroom.deployments.server_words import expand_variables
from legroom.diagnosis.told_settings import OFF, SETTINGS, named_settings, setting_words, stated_settings, with_setting
from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.facts.bundled import derived, find
from legroom.facts.flags import flags_ever
from legroom.facts.gpus import gpu, gpu_names, gpus_of_instances
from legroom.facts.log_messages import trainer_settings
from legroom.facts.releases import Release, latest
from legroom.units import GIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import parse_flags

_PERIOD = re.compile(r"[a-z]\. [A-Z]")
_OPENING = re.compile(r"\bvllm serve\b|vllm\.entrypoints|\b(?:docker|podman) run\b")
NUMBERS = {"two": "2", "dual": "2", "three": "3", "four": "4", "quad": "4", "eight": "8"}
_PROSE_END = re.compile(r"[`，。；：（）？！]|(?<=[A-Za-z\d])(?=[\u3040-\u9fff]{4})")
_LISTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_LIST = re.compile(rf'\[\s*"(?:vllm|serve)"(?=[^\]]*"--)(?:\s*,\s*{_LISTED.pattern})+\s*,?\s*\]?')
_PICTURE = re.compile(r"!\[[^\]\n]*\]\([^)\s]*\)|<img [^>\n]*>")  # What is attached to a report tells of no media.
_SUCCESS = re.compile(r"(?i)\W{0,8}(?:success\w*|working|good)\b(?: \w+){0,2} (?:command|config\w*|start|deployment)\b")
_ON_BY_DEFAULT = ("enable_chunked_prefill", "enable_prefix_caching")
_LMI_OPTION = re.compile(r"\bOPTION_([A-Z_]+)")
_LMI_NAMES = {"MAX_ROLLING_BATCH_SIZE": "max_num_seqs", "TENSOR_PARALLEL_DEGREE": "tensor_parallel_size"}
"""Variables of SageMaker's LMI container with another name than vLLM's setting (its guide to vLLM)."""
_ELIDED = re.compile(r"(?<!\S)(?:\.{2,}|…|<\w[\w -]*>)(?!\S)")


@cache
def prose(name: str) -> re.Pattern[str]:
    """The pattern `name` of `evidence.json` for how people write a setting, a card, a model or a release."""
    return re.compile(read_data("evidence.json")["prose"][name], re.ASCII)  # a name may follow a Chinese character


def pasted_command(
    text: str, failure_line: int | None, release: Release | None, mismatch: Callable[[ServeArgs], int] = lambda args: 0
) -> tuple[str | None, ServeArgs]:
    """The command in the text with the least `mismatch`, and its settings. Of equals one not called working, then one
    without `...`, then the last above the failure. (None, settings that the text names) where none is usable, because
    it cannot be read, has `...`, --config or an unknown variable, or names no model."""
    values = dict(setting_words("assigned").findall(text))
    text = expand_variables(expand_variables(text, values), values)  # a value may name another variable
    lines = _LIST.sub(_line_of_list, text).split("\n")
    commands = list(command_lines(lines))
    above = [command for command in commands if failure_line is None or command[0] <= failure_line]
    ordered = [*reversed(above), *(command for command in commands if command not in above)]
    read_commands = [(*command, _deployment(command[2], release)) for command in ordered]
    read_commands.sort(
        key=lambda command: (
            3 if command[3] is None else mismatch(command[3].args),
            any(map(_SUCCESS.match, lines[max(command[0] - 4, 0) : command[0] - 1])),  # a heading, and a fence
            bool(_ELIDED.search(command[2])),
        )
    )
    for _, _, line, read in read_commands:
        if read is None or _ELIDED.search(line):
            break
        args, prose = read.args, [item.flag for item in read.problems if not item.flag.startswith("-")]
        is_named = not prose or bool(re.search(r"[\d/]", args.model))  # "vllm serve on a Mac with ..."
        if args.model and is_named and "--config" not in line and "$" not in args.model:
            # In a sentence the command goes on in words that are no flags.
            words = rf"(?<!\S)(?:{'|'.join(map(re.escape, prose))})(?!\S)"
            start = line.index(args.model) + len(args.model)
            return line[:start] + (re.sub(words, "", line[start:]) if prose else line[start:]), args
    for start, end, _, _ in read_commands[1:]:  # of two servers one failed: the other's flags are not its own
        lines[start - 1 : end] = [""] * (end - start + 1)
    return None, _settings_outside_commands(lines, release or latest())


def _line_of_list(match: re.Match[str]) -> str:
    """A command line of the words in a JSON list, also a cut-off one, and as many line ends as the list had."""
    words = [word.replace('\\"', '"') for word in _LISTED.findall(match[0])]
    return shlex.join(["vllm", *words][words[0] == "vllm" :]) + "\n" * match[0].count("\n")


def _deployment(line: str, release: Release | None) -> Deployment | None:
    """The server that a command line starts; None where it cannot be read."""
    try:
        return deployment_from_command(_ELIDED.sub(" ", line), release)
    except LegroomError:
        return None


def command_lines(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """(first line number, last line number, command) of each command that starts a server, continued lines joined."""
    last, logged = 0, setting_words("logged")
    for number, line in enumerate(lines, 1):
        if number <= last or logged.search(line) or not _OPENING.search(line):
            continue
        command, end = line, number
        while command.rstrip().endswith("\\") and end < len(lines):
            command, end = f"{command.rstrip()[:-1]} {lines[end]}", end + 1
        if (start := setting_words("start").search(command)) is None:
            continue
        command, last = command[start.start() :], end
        # In prose a command ends at its closing backquote, or at a full-width mark.
        yield number, end, _PROSE_END.split(re.sub(r"\\(?=\s|$)", " ", command), maxsplit=1)[0].strip()


def plain_lines(lines: list[str]) -> Iterator[str]:
    """The lines that neither vLLM nor Python wrote and that start no server."""
    logged, start = setting_words("logged"), setting_words("start")
    return (line for line in lines if not logged.search(line) and not start.search(line))


def sentence_lines(lines: list[str]) -> Iterator[str]:
    """Every line, empty where it is a command, of an environment dump, or written by vLLM or Python."""
    logged, start, environment = map(setting_words, ("logged", "start", "environment"))
    is_command = (start.match(line.lstrip(" $#>`")) and not _PERIOD.search(line) for line in lines)
    printed = (bool(logged.search(line) or environment.match(line)) for line in lines)
    written = (_PICTURE.sub("", line) for line in lines)
    return ("" if any(either) else line for line, *either in zip(written, is_command, printed, strict=True))


def _not_logged(lines: list[str]) -> str:
    """The lines that neither vLLM nor Python wrote, as one text."""
    logged = setting_words("logged")
    return "\n".join(line for line in lines if not logged.search(line))


def _settings_outside_commands(lines: list[str], release: Release) -> ServeArgs:
    """Settings in lines that were not logged, typed flags first; of sentences only those with a single value."""
    typed: dict[str, str] = {}
    said: dict[str, set[str]] = {}
    plain = prose("advice").sub("", _not_logged(lines))
    plain = prose("pod").sub("", setting_words("comment").sub("", plain))
    plain = _LMI_OPTION.sub(lambda match: _LMI_NAMES.get(match[1], match[1].lower()), plain)
    for match in setting_words("setting").finditer(plain):
        name, value = (match["flag"] or match["name"]).replace("-", "_"), match["value"] or ""
        if value.lower() == "false" and name in _ON_BY_DEFAULT:
            typed[name] = OFF
        if name.startswith("no_") and name[3:] in SETTINGS and match["dashes"]:
            typed[name[3:]] = OFF
        if name not in SETTINGS or (not match["dashes"] and not re.fullmatch(r"[\d._]+|[Tt]rue|fp8\w*|auto", value)):
            continue
        start = plain.rfind("\n", 0, match.start()) + 1
        if re.match(r"[$#>]|\s*(?:-\s+)?[\"']?--|.*\bLLM\(|.*\bvllm\b", plain[start : match.start() + 2]):
            typed[name] = value
        elif name not in named_settings():
            said.setdefault(name, set()).add(value)
    for name, values in said.items():
        if len(values) == 1:
            typed.setdefault(name, *values)
    args, model = _bare_flags(plain.split("\n"), release), prose("model").search(plain)
    for name, value in typed.items():
        if getattr(args, name) is None:
            args = with_setting(args, name, value, release)
    stated: dict[str, Any] = {n: value for n, value in stated_settings(plain).items() if getattr(args, n) is None}
    args = replace(args, **stated)
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if getattr(args, name) is None and (found := prose(name).search(plain)):
            given: dict[str, Any] = {name: int(next(filter(None, found.groups())).replace(",", ""))}
            args = replace(args, **given)
    counts = {
        NUMBERS.get(count.lower(), count) for match in prose("card_count").findall(plain) for count in match if count
    }
    # A trainer's processes have an engine each, unless it is told to split them.
    is_split = not prose("unsplit").search(plain) and trainer_settings(plain) is None
    if len(counts) == 1 and args.tensor_parallel_size is None and is_split:
        args = replace(args, tensor_parallel_size=int(*counts))
    if args.dtype is None and prose("float32").search(plain):
        args = replace(args, dtype="float32")
    known = {name for name in prose("hub_id").findall(plain) if find(name) or derived(name)}
    known = known or set(prose("model_line").findall(plain)) or _named_models(plain)
    name = model["model"] if model else args.model or (known.pop() if len(known) == 1 else "")
    return replace(args, model=name.rstrip(".,;:"))


def _named_models(plain: str) -> set[str]:
    """The models that sentences name, as written, also `Llama 3.1 70B`; of several spellings the longest."""
    names = {re.sub(r"[ _]", "-", name) for name in prose("model_name").findall(plain)}
    ordered = sorted(sorted(names, reverse=True), key=len)
    models = {name: found for name in ordered if (found := find(name) or derived(name))}
    return set({found.base or found.name: name for name, found in models.items()}.values())


@cache
def _card_names() -> re.Pattern[str]:
    """Names of all cards as people write them; short ones in capitals only, and numbers behind a count: `4x3090`."""
    spellings = ((name.removeprefix("NVIDIA "), *aliases) for name, aliases in gpu_names().items())
    names = {name.replace("-", " ") for each in spellings for name in each}
    names |= {str(name) for name in read_data("gpus.json")["ambiguous"]} | {
        re.sub(r"(?<=\d)ti$", " ti", name) for name in names
    }
    numbers = "|".join(name for name in names if name.isdigit())
    names = {name.upper() if len(name) < 4 else f"(?i:{re.escape(name)})" for name in names if not name.isdigit()}
    words = "|".join(sorted(names - {"A2"}, key=len, reverse=True)).replace("\\ ", "[ _-]?")
    before = prose("before_card").pattern
    spelled = rf"(?i:[gr]tx[ _-]?)?({words})|{before}({numbers})"
    behind = r"(?!\w|[.-](?!\d\d\b)\w|[ _-]?(?i:ti\b|super|laptop|mobile))"
    return re.compile(rf"(?<![A-Za-z\d_.-])(?=[\w|])(?:{spelled})s?{behind}", re.ASCII)


def named_card(text: str) -> str | None:
    """The only card, else the only size of a card (`80GiB`), that the text names outside logged lines; else None."""
    plain = re.sub(r"(?<=\d-\d\dG)\b", "B", _not_logged(text.split("\n")))  # H100-80G
    names = sorted(
        (*(name or number for name, number in _card_names().findall(plain)), *gpus_of_instances(plain)), key=len
    )
    cards = {gpu(name.replace("_", " ")).name: _slice_of(name, plain) for name in names}
    sizes = {size for match in prose("card_size").finditer(plain) for size in match.groups() if size}
    if len(cards) != 1 and len(sizes) == 1:
        return f"{sizes.pop()}GiB"
    return cards.popitem()[1] if len(cards) == 1 else None


def _slice_of(name: str, plain: str) -> str:
    """The card that `plain` means by `name`: by sizes that it states a larger variant or a MIG slice (`20GiB`)."""
    size = re.search(rf"{re.escape(name)}[ ,(*x×-]{{1,2}}(\d{{2,3}})(?: ?G(?:i?B)?|(?<=-\d\d))\b", plain)
    card, sizes = gpu(name.replace("_", " ")), prose("card_size").findall(plain)
    sizes += [(size[1], "")] if size else []
    if card.larger and any(int(first or other) * GIB > card.total_bytes * 5 / 4 for first, other in sizes):
        return card.larger
    return f"{size[1]}GiB" if size and int(size[1]) * GIB < 3 / 4 * card.total_bytes else name


def _bare_flags(lines: list[str], release: Release) -> ServeArgs:
    """The flags on lines of nothing but flags; those of other releases go to `others`, unknown ones are dropped."""
    text = " ".join(line.strip().lstrip("$#> ") for line in lines if setting_words("bare_flags").match(line))
    try:
        words = shlex.split(text.replace("\\", " "), comments=True)
    except ValueError:
        return ServeArgs()
    parsed, lost = parse_flags(words, release), []
    refused = {item.flag for item in parsed.problems if item.kind not in ("bad_value", "ignored")}
    for flag in sorted(flag for flag in refused if flag in flags_ever() and flag in words):
        at = words.index(flag)
        lost += [flag, *itertools.takewhile(lambda word: not word.startswith("-"), words[at + 1 :])]
    return replace(parsed.args, others=(*parsed.args.others, *lost), model="")
