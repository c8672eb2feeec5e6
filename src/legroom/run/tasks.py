"""Computations of `legroom run` that run in short-lived processes, so that the supervisor stays small.

    python -m legroom.run.tasks TASK < question.json > answer.json

An answer is `{"answer": ...}` or `{"error": {"message", "hint", "exit_code"}}`.
"""

from __future__ import annotations

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

Question = Mapping[str, Any]
Answer = dict[str, Any]
_DRAIN_POLL_S = 0.25
_SWITCHES = ("switch", "bool", "optbool")


def prepare(question: Question) -> Answer:
    """Before the first start: the command with --shutdown-timeout, its GPUs and its expected memory, as JSON."""
    command = read_command(question["words"], question["vllm"], os.environ)
    gpus = visible_gpus({**os.environ, **command.env}, question["gpu"], command.args.gpus_needed)
    notes = []
    if not command.stated_release:
        notes.append(f"which vLLM release this is could not be found out: read as {command.release}, the newest known")
    elif command.release.note:
        notes.append(command.release.note)
    added = []  # --shutdown-timeout, where the release has it and the command does not (0.18 and later)
    if _given_shutdown_timeout(command, command.words) is None and "--shutdown-timeout" in flags_of(command.release):
        added = ["--shutdown-timeout", str(max(1, math.ceil(question["drain_s"])))]
    expected = expected_pool(command, os.environ, gpus)
    if added:
        why = "with vLLM's own default of 0 a SIGTERM during requests hangs the server"
        notes.append(f"added {shlex.join(added)}: {why}")
    return _command_answer(command, (*command.words, *added)) | {
        "gpus": asdict(gpus),
        "expected": asdict(expected),
        "notes": notes,
        "keep": [keep_option_name(written) for written in question["keep"]],
        "capacity_mark": next(line.mark for line in startup_lines() if line.id == "max_concurrency"),
    }


def _command_answer(command: ServerCommand, words: tuple[str, ...]) -> Answer:
    """The command as JSON for the supervisor: words, variables, address, model, and whether it has the guard."""
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
    """The command line with its variables, secrets replaced by placeholders."""
    return shlex.join(without_secrets([*assignments(env), *words]))


def _given_shutdown_timeout(command: ServerCommand, words: tuple[str, ...]) -> str | None:
    """--shutdown-timeout of the command line, else of its --config file; None where neither has it."""
    written = value_of(words, command.flags_at, "shutdown_timeout", command.release)
    return other_value(command.args, "--shutdown-timeout") if written is None else written


def find_fix(question: Question) -> Answer:
    """The remedy of a failed run: cause, next `words` and `env` (empty: none), why, and the command `line` to show."""
    command = read_command([*assignments(question["env"]), *question["words"]], question["vllm"], os.environ)
    bounds = Bounds(tuple(question["keep"]), question["min_context"], question["min_concurrency"])
    account = kernel_account_from(question["account"]) if question.get("account") else None
    kill = kernel_kill(account) if account is not None else None
    death = ProcessDeath(**question["death"]) if question.get("death") else None
    ended = death_text(death, account) if death and not kill else ""
    if kill and death and not kill.victim and death.signal in (None, signal.SIGKILL):
        kill = replace(kill, victim=death.process)
    log, gpus = Path(question["log"]), Gpus(**question["gpus"])
    remedy = find_remedy(
        log, command, bounds, gpus, os.environ, question["tried"], kill, None if kill else death, ended
    )
    answer = asdict(remedy)
    if remedy.words:
        answer["line"] = _masked_command(remedy.words, remedy.env or {})
    return answer


def apply_changes(question: Question) -> Answer:
    """The command with changes left for this restart, as words, env, unset, line, expected; LegroomError if refused."""
    env = question["changes"].get("env") or {}
    unset = [name for name, value in env.items() if value is None]
    given = {name: str(value) for name, value in {**question["env"], **env}.items() if name not in unset}
    command = read_command([*assignments(given), *question["words"]], question["vllm"], os.environ)
    flags = question["changes"].get("flags") or {}
    changes = dict(_flag_change(name, value, command.release) for name, value in flags.items())
    changed = with_settings(command.words, command.flags_at, changes, command.release)
    after = read_command([*assignments(given), *changed], question["vllm"], os.environ)
    wrong = [problem for problem in after.problems if problem not in command.problems]
    if wrong and not command.release.note:  # the flags of an unknown release are not known either
        raise LegroomError("; ".join(wrong))
    if after.url != command.url:
        raise LegroomError(f"the server would move to {after.url}")
    expected = asdict(expected_pool(after, os.environ, Gpus(**question["gpus"])))
    launch = {"words": list(changed), "env": given, "unset": unset, "line": _masked_command(changed, given)}
    return {**launch, "expected": expected}


def compare_pool(question: Question) -> Answer:
    """The task after start-up: a sentence that compares the printed KV pool with the expected one."""
    return {"line": pool_comparison(Path(question["log"]), Expectation(**question["expected"]))}


def verify_and_calibrate(question: Question) -> Answer:
    """Tests the server (`ok`, `proof`) and, unless that fails, stores its measured memory (`line`) for later plans."""
    from legroom.verify.openai_client import smoke_test  # an HTTP client

    command = read_command([*assignments(question["env"]), *question["words"]], question["vllm"], os.environ)
    ok: bool | None = True
    text = ""
    if question["verify"]:
        key = other_value(command.args, "--api-key") or {**os.environ, **command.env}.get("VLLM_API_KEY")
        ok, text = smoke_test(question["url"], key)
    line = store_calibration(Path(question["log"]), Gpus(**question["gpus"])) if ok is not False else ""
    return {"line": line, "ok": ok, "proof": text}


def drain_guard(question: Question) -> Answer:
    """Makes the guard refuse new requests, waits for running ones up to `deadline_s`, and says so in `line`."""
    from legroom.actions.server_drain import GuardDrain, count_in_flight, wait_until_empty  # an HTTP client

    async def drain() -> str:
        guard = GuardDrain(question["url"], question["token"])
        await guard.begin()
        if await count_in_flight(guard) is None:
            return "the guard takes nothing new, and does not say how many requests it holds"
        emptied = await wait_until_empty(guard, None, question["deadline_s"], _DRAIN_POLL_S)
        return f"the guard takes nothing new; {emptied}"

    return {"line": asyncio.run(drain())}


def _flag_change(name: str, value: Any, release: Release) -> tuple[str, Any]:
    """The Python name of a flag in any spelling, and its value; a switch becomes a bool."""
    part = next(command_parts([name], release))
    if part.flag is None and value == "":
        return part.dest, True
    if value is None or part.flag is None or part.flag.kind not in _SWITCHES:
        return part.dest, value
    is_on = str(value).lower() not in ("false", "0")
    return part.dest, is_on != name.startswith("--no-")


_ALL_TASKS = (prepare, find_fix, apply_changes, compare_pool, verify_and_calibrate, drain_guard)
TASKS: dict[str, Callable[[Question], Answer]] = {task.__name__: task for task in _ALL_TASKS}


def task_answer(task: str, question: Question) -> Answer:
    """Runs a task; returns the document with its answer or error."""
    try:
        return {"answer": TASKS[task](question)}
    except LegroomError as error:
        return {"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}


def main() -> None:
    """Answers the task named in argv: its input is JSON on stdin, its answer JSON on stdout."""
    die_with_parent()
    json.dump(task_answer(sys.argv[1], json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()


def keep_option_name(given: str) -> str:
    """The Python name of the flag, or the environment variable, that `--keep` names; LegroomError for neither."""
    name = "--" + given.lower() if not given.startswith("-") else given.lower() if given.startswith("--") else given
    part = next(iter(command_parts([name])))
    if part.flag is not None and ("-" in given or not given.isupper() or part.flag.name == flag_name(given.lower())):
        return part.flag.dest
    if re.fullmatch(r"[A-Z_][A-Z0-9_]*", given):
        return given
    near = difflib.get_close_matches(flag_name(name), flags_ever(), n=1)
    hint = f"did you mean {near[0]}?" if near else "write a flag of vLLM's as vLLM does, a variable in capitals"
    raise LegroomError(f"--keep {given}: vLLM has no such flag", hint)
