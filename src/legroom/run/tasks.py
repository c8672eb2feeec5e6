"""Computations of `legroom run` that run in short-lived processes, so that the supervisor stays small.

    python -m legroom.run.tasks TASK < input.json > output.json

The file written is `{"answer": output}` or `{"error": {"message", "hint", "exit_code"}}`.
"""

import asyncio
import difflib
import json
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from legroom.actions.keeper import die_with_parent
from legroom.deployments.server_words import assignments
from legroom.errors import LegroomError
from legroom.facts.flags import flag_name, flags_ever, flags_of
from legroom.facts.log_messages import startup_lines
from legroom.facts.model_sources import path_exists
from legroom.facts.releases import Release
from legroom.guard import MIDDLEWARE
from legroom.live.kernel_memory import kernel_kill
from legroom.run.expectation import Expectation, Gpus, expected_pool, pool_comparison, store_calibration, visible_gpus
from legroom.run.healing import Bounds, death_text, find_remedy
from legroom.run.restart_policy import ProcessDeath
from legroom.run.run_file import kernel_account_from
from legroom.run.server_command import ServerCommand, read_command
from legroom.vllm.args import other_value
from legroom.vllm.command_line import command_parts, value_of, with_settings, without_secrets

TaskInput = Mapping[str, Any]
TaskOutput = dict[str, Any]
_SWITCHES = ("switch", "bool", "optbool")


def prepare(task_input: TaskInput) -> TaskOutput:
    """Before the first start: the command (with --shutdown-timeout), its address, the GPUs and expected memory."""
    command = read_command(task_input["words"], task_input["vllm"], os.environ)
    if (model := command.args.model).startswith(("/", "./", "../")) and not path_exists(Path(model)):
        raise LegroomError(f"there is no file or folder {model}", "check the path, and what is mounted")
    gpus = visible_gpus({**os.environ, **command.env}, task_input["gpu"], command.args.gpus_needed)
    notes = []
    if not command.stated_release:
        notes.append(f"which vLLM release this is could not be found out: read as {command.release}, the newest known")
    elif command.release.note:
        notes.append(command.release.note)
    added = []  # --shutdown-timeout, where the release has it and the command does not (0.18 and later)
    if _given_shutdown_timeout(command, command.words) is None and "--shutdown-timeout" in flags_of(command.release):
        added = ["--shutdown-timeout", str(max(1, math.ceil(task_input["drain_s"])))]
    expected = expected_pool(command, os.environ, gpus)
    if added:
        why = "with vLLM's own default of 0 a SIGTERM during requests hangs the server"
        notes.append(f"added {shlex.join(added)}: {why}")
    return _command_json(command, (*command.words, *added)) | {
        "gpus": asdict(gpus),
        "expected": asdict(expected),
        "notes": notes,
        "keep": [keep_option_name(written) for written in task_input["keep"]],
        "capacity_mark": next(line.mark for line in startup_lines() if line.id == "max_concurrency"),
    }


def _command_json(command: ServerCommand, words: tuple[str, ...]) -> TaskOutput:
    """JSON of the command with these `words` in place of its own: also variables, address, model, `has_guard`."""
    own_drain_s = _given_shutdown_timeout(command, words) or ""
    return {
        "words": list(words),
        "env": dict(command.env),
        "vllm": command.stated_release or command.release.version,
        "host": command.host,
        "port": command.port,
        "url": command.url,
        "model": command.args.model,
        "line": _masked_command(words, command.env),
        "own_drain_s": float(own_drain_s) if own_drain_s.isdecimal() else 0.0,
        "has_guard": any(part.dest == "middleware" and part.value == MIDDLEWARE for part in command_parts(words)),
    }


def _masked_command(words: tuple[str, ...], env: Mapping[str, str]) -> str:
    """The command line, preceded by its variables, with secrets replaced by placeholders."""
    return shlex.join(without_secrets([*assignments(env), *words]))


def _given_shutdown_timeout(command: ServerCommand, words: tuple[str, ...]) -> str | None:
    """The --shutdown-timeout in `words`, else in the --config file; None where neither has it."""
    written = value_of(words, command.flags_at, "shutdown_timeout", command.release)
    return other_value(command.args, "--shutdown-timeout") if written is None else written


def find_fix(task_input: TaskInput) -> TaskOutput:
    """The `Remedy` of a failed start or a crash, as JSON; with the command `line` to show where there is a fix."""
    command = _command_of(task_input, task_input["env"])
    bounds = Bounds(tuple(task_input["keep"]), task_input["min_context"], task_input["min_concurrency"])
    account = kernel_account_from(task_input["account"]) if task_input.get("account") else None
    kill = kernel_kill(account) if account is not None else None
    death = ProcessDeath(**task_input["death"]) if task_input.get("death") else None
    ended = death_text(death, account) if death and not kill else ""
    if kill and death and not kill.victim and death.signal in (None, signal.SIGKILL):
        kill = replace(kill, victim=death.process)
    log, gpus, death = Path(task_input["log"]), Gpus(**task_input["gpus"]), None if kill else death
    remedy = find_remedy(log, command, bounds, gpus, os.environ, task_input["tried"], kill, death, ended)
    line = {"line": _masked_command(remedy.words, remedy.env or {})} if remedy.words else {}
    return asdict(remedy) | line


def _command_of(task_input: TaskInput, env: Mapping[str, str]) -> ServerCommand:
    """The server's command of a task's input, with these variables assigned before it."""
    return read_command([*assignments(env), *task_input["words"]], task_input["vllm"], os.environ)


def apply_changes(task_input: TaskInput) -> TaskOutput:
    """The command with the `changes` left for this restart, expected memory, and variables to `unset`; LegroomError if
    vLLM would refuse it or it moves to another address."""
    env = task_input["changes"].get("env") or {}
    unset = [name for name, value in env.items() if value is None]
    given = {name: str(value) for name, value in {**task_input["env"], **env}.items() if name not in unset}
    command = _command_of(task_input, given)
    flags = task_input["changes"].get("flags") or {}
    changes = dict(_flag_change(name, value, command.release) for name, value in flags.items())
    changed = with_settings(command.words, command.flags_at, changes, command.release)
    after = read_command([*assignments(given), *changed], task_input["vllm"], os.environ)
    wrong = [problem for problem in after.problems if problem not in command.problems]
    if wrong and not command.release.note:  # the flags of an unknown release are not known either
        raise LegroomError("; ".join(wrong))
    if after.url != command.url:
        raise LegroomError(f"the server would move to {after.url}")
    expected = asdict(expected_pool(after, os.environ, Gpus(**task_input["gpus"])))
    launch = {"words": list(changed), "env": given, "unset": unset, "line": _masked_command(changed, given)}
    return {**launch, "expected": expected}


def compare_pool(task_input: TaskInput) -> TaskOutput:
    """`line`: a sentence that compares the KV pool in the file `log` with the expected one; empty if it shows none."""
    return {"line": pool_comparison(Path(task_input["log"]), Expectation(**task_input["expected"]))}


def verify_and_calibrate(task_input: TaskInput) -> TaskOutput:
    """Sends test requests (`ok`, `proof`: a sentence); unless they fail, stores the memory measured in the log."""
    from legroom.verify.openai_client import smoke_test  # an HTTP client

    command = _command_of(task_input, task_input["env"])
    ok: bool | None = True
    text = ""
    if task_input["verify"]:
        key = other_value(command.args, "--api-key") or {**os.environ, **command.env}.get("VLLM_API_KEY")
        ok, text = smoke_test(task_input["url"], key)
    line = store_calibration(Path(task_input["log"]), Gpus(**task_input["gpus"])) if ok is not False else ""
    return {"line": line, "ok": ok, "proof": text}


def drain_guard(task_input: TaskInput) -> TaskOutput:
    """Makes the guard refuse new requests and waits up to `deadline_s` for running ones; `line`: the result."""
    from legroom.actions.server_drain import GuardDrain, count_in_flight, wait_until_empty  # an HTTP client

    async def drain() -> str:
        """Drains the guard alone, not the server; returns a sentence on what is left."""
        guard = GuardDrain(task_input["url"], task_input["token"])
        await guard.begin()
        if await count_in_flight(guard) is None:
            return "the guard takes nothing new, and does not say how many requests it holds"
        return f"the guard takes nothing new; {await wait_until_empty(guard, None, task_input['deadline_s'])}"

    return {"line": asyncio.run(drain())}


def _flag_change(name: str, value: Any, release: Release) -> tuple[str, Any]:
    """(Python name, value) of a flag in any spelling; a switch's value becomes a bool, None removes the flag."""
    part = next(command_parts([name], release))
    if part.flag is None and value == "":
        return part.dest, True
    if value is None or part.flag is None or part.flag.kind not in _SWITCHES:
        return part.dest, value
    return part.dest, (str(value).lower() not in ("false", "0")) != name.startswith("--no-")


_ALL_TASKS = (prepare, find_fix, apply_changes, compare_pool, verify_and_calibrate, drain_guard)
TASKS: dict[str, Callable[[TaskInput], TaskOutput]] = {task.__name__: task for task in _ALL_TASKS}


def output_or_error(task: str, task_input: TaskInput) -> dict[str, Any]:
    """Runs a task; returns the JSON document with its output (`answer`) or its LegroomError (`error`)."""
    try:
        return {"answer": TASKS[task](task_input)}
    except LegroomError as error:
        return {"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}


def keep_option_name(given: str) -> str:
    """The Python name of the flag or variable that `--keep` names; LegroomError if it is neither."""
    name = "--" + given.lower() if not given.startswith("-") else given.lower() if given.startswith("--") else given
    part = next(iter(command_parts([name])))
    if part.flag is not None and ("-" in given or not given.isupper() or part.flag.name == flag_name(given.lower())):
        return part.flag.dest
    if re.fullmatch(r"[A-Z_][A-Z0-9_]*", given):
        return given
    near = difflib.get_close_matches(flag_name(name), flags_ever(), n=1)
    hint = f"did you mean {near[0]}?" if near else "write a flag of vLLM's as vLLM does, a variable in capitals"
    raise LegroomError(f"--keep {given}: vLLM has no such flag", hint)


def main() -> None:
    """Runs the task named in argv, with its input as JSON on stdin and its output or error as JSON on stdout."""
    die_with_parent()
    json.dump(output_or_error(sys.argv[1], json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
