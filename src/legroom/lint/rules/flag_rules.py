"""Flags that the release does not accept, or accepts and does not use."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from legroom.deployments.file_kinds import kind_of
from legroom.deployments.subjects import InvokedCommand, StartedServer
from legroom.facts import pattern, read_data
from legroom.facts.bundled import find, misspelling_of
from legroom.facts.config_classes import is_recorded
from legroom.facts.flags import advice, companion_of, flag_name, flags_ever, flags_of
from legroom.facts.release_support import plugin_of, quantization_methods
from legroom.facts.releases import Release, known_releases
from legroom.facts.releases import release as known_release
from legroom.lint.rule import (
    Context,
    Findings,
    LintFinding,
    checks,
    finding,
    flag_place,
    flag_value,
    flag_word,
    has_open_words,
    has_same_words,
    rules_by_id,
    similarity,
)
from legroom.lint.server_plan import plan_of_server
from legroom.vllm.command_line import plain_name
from legroom.vllm.config_rules import field_refusals
from legroom.vllm.flag_problems import FlagProblem, explain_unknown

_BY_KIND = {kind: rule.id for rule in rules_by_id().values() for kind in rule.problems}
"""The rule for each kind of problem that the parser of flags tells."""
_SHARE = "--gpu-memory-utilization"
_VARIABLE, _FILLED_IN = pattern("flag_rules.variable"), pattern("flag_rules.filled_in")
_CHOICE_FOR_READER, _MORE = pattern("flag_rules.choice_for_reader"), pattern("flag_rules.more")
_QUANTIZED = re.compile(r"(?i)fp[48]|int[48]|[wa]\d+a\d+|awq|gptq|bnb|gguf|quant|[48]bit")
_EXTENSIONS = {"--omni": "vLLM-Omni"}  # Switches that hand the command line to another program with its own flags.
_EXTENSION_MODULES = {"dynamo.vllm.omni": "vLLM-Omni"}
_OTHER_RELEASE = frozenset({"removed", "renamed", "not_yet"})
_FORK = frozenset({"unknown", "bad_choice"})  # Problems that a fork, a plugin or a newer release may not have.


@checks(StartedServer, "flag-unknown", "flag-removed", "flag-not-yet", "flag-value", "flag-ignored", "flag-of-another")
def refused_or_unused_flags(server: StartedServer, context: Context) -> Findings:
    """Flags that the release refuses or ignores, or a note that another program reads them."""
    if any(word.text.startswith("--help") for word in server.words):
        return
    problems = context.parsed_args(server).problems
    given = frozenset(plain_name(word.text) for word in server.words if word.text.startswith("--"))
    if any(problem.kind == "unknown" for problem in problems) and (program := companion_of(given)):
        message = f"flags of {program} are not judged: it reads this command line itself"
        yield finding("flag-of-another", server.place, message)
        return
    if own := _fork_flags(server, problems):
        message = f"flags of a fork are not judged: no release has {' or '.join(own[:2])}"
        yield finding("flag-of-another", server.place, message)
        problems = tuple(problem for problem in problems if problem.flag not in own)
    extension = next((name for word in server.words if (name := _EXTENSIONS.get(word.text))), "")
    strays = sum(not problem.flag.startswith("-") for problem in problems)
    reported = set()
    for problem in problems:
        if (problem.flag, problem.kind) in reported or problem.kind not in _BY_KIND:
            continue
        is_fine = problem.kind != "unknown" and context.is_accepted_by_named(server, problem.flag, problem.kind)
        if not is_fine and not _is_no_mistake(server, problem, strays, extension):
            reported.add((problem.flag, problem.kind))
            yield _finding_of_problem(server, context, problem)
    release = context.release_of(server)
    for word in server.left_out if not extension else ():
        problem = explain_unknown(flag_name(word.text), release)
        if problem.flag not in flags_of(release) and problem.kind in _OTHER_RELEASE:
            message = f"{problem.message} (the chart gives it for other values)"
            found = finding(_BY_KIND[problem.kind], server.place_of(word), message, _suggested_flag(problem))
            yield replace(found, severity="note")
    if extension:
        message = f"flags of {extension} are not judged: {extension} reads this command line itself"
        yield finding("flag-of-another", server.place, message)
    yield from _utilization_above_one(server, context)
    yield from _refused_by_config_classes(server, context)
    yield from _device_of_another_build(server, release)
    yield from _config_not_in_yaml(server)
    yield from _misspelled_model(server, context)
    yield from _unknown_quantization(server, context)
    yield from _checkpoint_of_another_method(server, context)
    yield from _batch_below_its_parts(server, context)


@checks(InvokedCommand, "flag-of-another")
def module_with_own_flags(command: InvokedCommand, context: Context) -> Findings:
    """A note that a module run with `python -m` reads its flags itself, so that they are not judged."""
    for word in command.values_of("-m"):
        if other := _EXTENSION_MODULES.get(word.text):
            message = f"flags of {other} are not judged: {word.text} reads this command line itself"
            yield finding("flag-of-another", command.locate(word.offset), message, length=len(word.text))


@checks(InvokedCommand, "flag-cut-off")
def flags_of_no_command(command: InvokedCommand, context: Context) -> Findings:
    """A vLLM flag that stands as a command, as the server's command on the line before lacks a backslash."""
    if command.is_cut_off and plain_name(command.words[0].text) in flags_ever():
        message = f"{command.words[0].text} does not reach vLLM: the command ends on a line before it"
        suggestion = "end every line but the last with a backslash, with no comment line between them"
        yield finding("flag-cut-off", command.locate(command.words[0].offset), message, suggestion)


def _is_no_mistake(server: StartedServer, problem: FlagProblem, strays: int, extension: str) -> bool:
    """Whether a flag's problem is not its author's mistake; `strays`: number of words that belong to no flag,
    `extension`: the program that reads the flags instead of vLLM, or empty."""
    is_stray = not problem.flag.startswith("-")
    if is_stray and (strays > 2 or server.runs in ("config", "python") or has_open_words(server)):
        return True  # a sentence, or the value of a key that is reported already
    if is_stray and problem.flag.strip("'").startswith(("[", "(")):
        return True  # `vllm serve MODEL [options]`
    if problem.kind == "bad_choice" and server.runs == "python":
        return True  # LLM(...) does not check choices, the command line does
    if extension and problem.kind in ("unknown", "bad_value"):
        return True
    if problem.flag == "--device" and not (server.runs_on_gpus or "cpu" in server.device_words or server.named_release):
        return True  # builds for other hardware keep it for longer
    texts = [word.text for word in server.words]
    pairs = zip(texts, [*texts[1:], None], strict=True)
    is_empty = any(plain_name(text) == problem.flag and (text.endswith("=") or after == "") for text, after in pairs)
    if problem.kind in ("bad_value", "bad_choice") and not problem.value and is_empty:
        return True  # an empty variable, or a template that was read without its values
    if problem.flag == "--config" and problem.kind == "ignored":
        return True  # the config file is on another machine
    is_switch = "takes no value, got" in problem.message and server.runs != "python"  # whatever the variable holds
    if _VARIABLE.search(problem.flag) or (_VARIABLE.search(problem.value) and not is_switch):
        return True
    is_document = kind_of(server.place.path, "") == "document"
    if not problem.flag.startswith("-"):
        return is_document and bool(_MORE.fullmatch(problem.flag))
    if problem.kind != "bad_value":
        return False
    names_itself = bool(problem.value) and problem.value.replace("_", "-") in problem.flag
    is_for_reader = is_document and (names_itself or bool(_CHOICE_FOR_READER.fullmatch(problem.value)))
    return is_for_reader or bool(_FILLED_IN.fullmatch(problem.value))


def _finding_of_problem(server: StartedServer, context: Context, problem: FlagProblem) -> LintFinding:
    """The finding for a flag's problem, at the flag's word; a warning where the release is uncertain."""
    word = next((word for word in server.words if _gives_flag(word.text, problem.flag)), None)
    message, is_certain = problem.message, True
    if _depends_on_release(server, context, problem):
        is_certain = False
        if problem.kind != "unknown" and not context.is_release_certain(server):
            message += f" ({_why_uncertain(server, context)})"
    elif problem.kind in ("unknown", "bad_value", "bad_choice") and server.runs == "config":
        is_certain = False  # the file may be another program's
    elif problem.kind in _OTHER_RELEASE and server.runs == "python" and not server.named_release:
        is_certain = False  # programs often check the version and have a call for each
    place = server.place_of(word) if word else server.place
    rule, length = _BY_KIND[problem.kind], len(problem.flag)
    found = finding(rule, place, message, _suggested_flag(problem), length, is_certain=is_certain)
    is_newest = problem.kind == "removed" and "newest-build" in context.platform_signs and not server.named_release
    is_open = problem.kind in (*_OTHER_RELEASE, "ignored") and not is_certain and not is_newest
    is_open = is_open or (problem.kind == "unknown" and server.runs == "config" and not _is_typo(server, problem))
    return replace(found, severity="note") if is_open else found


def _fork_flags(server: StartedServer, problems: Sequence[FlagProblem]) -> list[str]:
    """The flags that no release has, if two share an unknown feature (`--tiered-moe-...`) as in a fork; or empty."""
    unknown = [item for item in problems if item.kind == "unknown" and item.flag.startswith("--")]
    own = list(dict.fromkeys(problem.flag for problem in unknown if not _is_near(problem)))
    known = {_feature(flag) for flag in flags_ever()}
    features = Counter(_feature(flag) for flag in own)
    is_fork = any(number > 1 and feature not in known for feature, number in features.items())
    is_built = server.is_release_assumed and server.runs == "compose" and not server.installed
    return own if is_fork or is_built else []


def _feature(flag: str) -> str:
    """The first two words of a flag without `enable`, `no` ...: `tiered-moe` of `--enable-tiered-moe-cache`."""
    words = flag.strip("-").split("-")
    return "-".join(words[words[0] in ("enable", "disable", "no", "use") :][:2])


def _suggested_flag(problem: FlagProblem) -> str:
    """What to do about the flag, as a finding's suggestion: leave it out, or write another one."""
    if not problem.instead:
        return "leave it out"
    if problem.kind == "unknown" and advice(problem.flag) is None:
        return f"leave it out, or did you mean {problem.instead}?"
    return f"leave it out, or see {problem.instead}" if problem.kind == "removed" else f"write {problem.instead}"


def _depends_on_release(server: StartedServer, context: Context, problem: FlagProblem) -> bool:
    """Whether one of the releases that a server of unknown release may run accepts the flag."""
    if problem.kind in _OTHER_RELEASE:
        return not context.is_release_certain(server)
    if problem.kind in _FORK:
        if problem.kind == "unknown" and (_is_typo(server, problem) or context.runs_vllms_own(server)):
            return False
        return not context.runs_published_build(server)
    return not context.is_release_certain(server) and not context.is_always_refused(server, problem.flag, problem.kind)


def _is_typo(server: StartedServer, problem: FlagProblem) -> bool:
    """Whether an unknown flag is a known one but for a letter or two; an image or launcher may have its own flags."""
    return not server.launcher and not server.image and _is_near(problem)


def _is_near(problem: FlagProblem) -> bool:
    """Whether the flag suggested by the problem differs from the given one by a letter or two only."""
    candidate = problem.instead.partition(" ")[0]
    return has_same_words(problem.flag, candidate, "-") and similarity(problem.flag, candidate) >= 0.92


def _why_uncertain(server: StartedServer, context: Context) -> str:
    """Why it is uncertain which vLLM release the server runs."""
    runs = server.launcher or ("the image" if "$" in server.image or "{{" in server.image else server.image)
    if context.has_unknown_release(server):
        return f"which release {runs} holds is not known"
    if server.is_release_assumed and server.named_release:
        return f"that {context.release_of(server)} is what runs is only likely"
    if server.named_release:
        return f"{runs or 'it'} is not vLLM's own build of {context.release_of(server)}"
    return f"the file names no release, and {context.release} is assumed"


@checks(StartedServer, "flag-costly")
def abbreviated_flags(server: StartedServer, context: Context) -> Findings:
    """Abbreviated flags (`--max-model`), which argparse completes while only one flag begins so."""
    table = flags_of(context.release_of(server))
    for word in server.words if server.runs != "config" and not server.launcher else ():
        name = plain_name(word.text)
        longer = {flag.name for key, flag in table.items() if key.startswith(name) and len(name) > 4}
        if len(longer) == 1 and name.startswith("--") and name not in flags_ever():
            message = f"{name} is short for {min(longer)}, until a release has another flag that begins so"
            yield finding("flag-costly", server.place_of(word), message, f"write {min(longer)}", len(name))


def _utilization_above_one(server: StartedServer, context: Context) -> Findings:
    """A --gpu-memory-utilization above 1, which every release refuses."""
    share = context.parsed_args(server).args.gpu_memory_utilization
    word = flag_word(server, _SHARE, "--device-memory-utilization")
    if share is None or share <= 1 or word is None:
        return
    message = f"{_SHARE} is a share of the GPU from 0 to 1, and {share:g} is asked for"
    suggestion = f"write {_SHARE} {share / 100:g}" if 2 <= share <= 100 else ""
    is_certain = server.runs != "config"  # it may be another program's percent
    yield finding("flag-value", server.place_of(word), message, suggestion, len(_SHARE), is_certain=is_certain)


def _refused_by_config_classes(server: StartedServer, context: Context) -> Findings:
    """Values that the release's config classes refuse for any model; none if a GPU is named, as its plan says so."""
    if server.gpu_names or server.call is not None:
        return
    is_certain = context.is_release_certain(server) and context.runs_vllms_own(server)
    args = context.parsed_args(server).args
    for message, hint in field_refusals(args, context.release_of(server)):
        word = next((word for word in server.words if plain_name(word.text) in hint.split()), None)
        is_known = word is not None and not _VARIABLE.search(f"{word.text} {flag_value(server, word)}")
        if word is not None and is_known and plain_name(word.text) != _SHARE:
            found = finding("flag-value", server.place_of(word), message, hint, len(word.text), is_certain=is_certain)
            recorded = filter(is_recorded, map(known_release, known_releases()))
            is_of_all = all(message in dict(field_refusals(args, release)) for release in recorded)
            is_open = not context.is_release_certain(server) and not is_of_all
            yield replace(found, severity="note") if is_open else found


def _batch_below_its_parts(server: StartedServer, context: Context) -> Findings:
    """--max-num-batched-tokens below --max-num-seqs or, without chunked prefill, --max-model-len; if no plan tells."""
    args, release = context.parsed_args(server).args, context.release_of(server)
    tokens, place = args.max_num_batched_tokens, flag_place(server, "--max-num-batched-tokens")
    if tokens is None or server.call is not None or plan_of_server(server, release) or server.gpu_names:
        return
    # Before 0.8 prompts were chunked by request alone, or above 32,768 tokens.
    is_old = release.before("0.8.0") and args.enable_chunked_prefill is None and (args.max_model_len or 0) <= 32768
    is_whole = args.enable_chunked_prefill is False or (is_old and context.is_release_certain(server))
    parts = {"--max-num-seqs": args.max_num_seqs, "--max-model-len": args.max_model_len if is_whole else None}
    for flag, value in parts.items():
        if value is not None and tokens < value and not server.launcher:
            message = f"--max-num-batched-tokens {tokens} is below {flag} {value}: vLLM does not start"
            yield finding("flag-value", place, message, f"raise the first or lower the second to {tokens}")


def _checkpoint_of_another_method(server: StartedServer, context: Context) -> Findings:
    """--quantization awq for a checkpoint that is called GPTQ, or the reverse."""
    word, name = flag_word(server, "--quantization"), context.parsed_args(server).args.model.lower()
    method = flag_value(server, word).removesuffix("_marlin") if word is not None else ""
    other = {"awq": "gptq", "gptq": "awq"}.get(method, "")
    if word is not None and other and other in name and method not in name:
        what = f"the checkpoint's name says {other.upper()}, and --quantization {method}"
        message = f"{what}: vLLM refuses another method"
        yield finding("flag-value", server.place_of(word), message, "leave it out", is_certain=False)


def _unknown_quantization(server: StartedServer, context: Context) -> Findings:
    """A --quantization method of no release; a note where only this release lacks it and no plugin adds it."""
    word, methods = flag_word(server, "--quantization"), read_data("quantization_methods.json")["methods"]
    method, release = flag_value(server, word) if word is not None else "", context.release_of(server)
    is_gone = method not in quantization_methods(release) and plugin_of(method, release) is None
    is_gone = is_gone and (method, server.runs) != ("auto", "config")  # a tool's word for leaving it out
    if word is None or not is_gone or not re.fullmatch(r"[a-z][\w-]+", method) or server.launcher:
        return
    who = f"vLLM {release} has no" if method in methods else "no vLLM release has a"
    message, is_certain = f"{who} quantization method {method}", context.runs_vllms_own(server)
    found = finding("flag-value", server.place_of(word), message, "leave it out", is_certain=is_certain)
    is_overridden = _QUANTIZED.search(context.parsed_args(server).args.model)  # by the checkpoint's own method
    yield replace(found, severity="note") if method in methods or is_overridden or server.runs == "config" else found


def _misspelled_model(server: StartedServer, context: Context) -> Findings:
    """A model whose name differs from a known one by a letter or two."""
    model = context.parsed_args(server).args.model
    word = next((word for word in server.words if model and word.text.endswith(model)), None)
    if word is not None and find(model) is None and (right := misspelling_of(model)):
        message, question = f"no model {model} is known, and {right} is", f"did you mean {right}?"
        yield finding("flag-value", server.place_of(word), message, question, len(model), is_certain=False)


def _config_not_in_yaml(server: StartedServer) -> Findings:
    """A --config file whose name does not end in .yaml or .yml, which every release refuses."""
    word = flag_word(server, "--config")
    value = flag_value(server, word) if word is not None else ""
    name = value.rpartition("/")[2]
    if word is not None and "." in name and not name.endswith((".yaml", ".yml")) and not _VARIABLE.search(value):
        message = f"--config takes a file that ends in .yaml or .yml, and {name} does not: vLLM does not start"
        yield finding("flag-value", server.place_of(word), message, "write its settings as YAML", len("--config"))


def _device_of_another_build(server: StartedServer, release: Release) -> Findings:
    """`--device` cpu, tpu, hpu, xpu or neuron in vLLM's CUDA image, whose worker refuses it; 0.10.0 drops the flag."""
    word, value = flag_word(server, "--device"), server.refused_device
    if word is not None and value and "--device" in flags_of(release):
        message = f"{server.image} is built for CUDA, and --device asks for {value}: vLLM does not start"
        yield finding("flag-value", server.place_of(word), message, f"use vLLM's image for {value}, or leave it out", 8)


def _gives_flag(word: str, flag: str) -> bool:
    """Whether a command-line word gives the flag, also as `flag=value`, with `--no-`, or under a longer name."""
    head = word.partition("=")[0]
    if flag in (head, word):
        return True
    if not head.startswith("--"):
        return flag == head.partition(".")[0]
    plain = plain_name(head)
    return flag in (plain, plain.replace("--no-", "--", 1)) or (plain.startswith(flag) and len(flag) > 4)
