"""Synthetic traces: `poisson rate=8 prompt=lognormal(1200,0.8) output=uniform(10,400) requests=5000`."""

import math
import random
import re
from collections.abc import Callable

from legroom.errors import LegroomError
from legroom.simulation.trace import THINK_S, Trace, Users
from legroom.units import KIB, seconds_in

_WORD = re.compile(r"(\w+)=((?:[^\s()]|\([^)]*\))+)|(\S+)")
_CALL = re.compile(r"(\w+)\(([^)]*)\)")
_MAX_TOKENS = 10_000_000
_MAX_REQUESTS = 20_000_000  # As many as are read from a file.
_EXAMPLE = "write it like 'poisson rate=8 prompt=lognormal(1200,0.8) output=uniform(10,400) requests=5000'"

Draw = Callable[[random.Random], float]


def read(spec: str, seed: int = 0) -> Trace:
    """The random trace that a text such as `poisson rate=8 prompt=lognormal(1200,0.8) requests=5000` describes."""
    # `long=SHARE,LENGTH` makes a share of the prompts very long; `prefix=GROUPS,LENGTH` lets prompts share prefixes.
    words: dict[str, str] = {}
    process = ""
    for match in _WORD.finditer(spec):
        if match[3]:
            process = match[3]
        else:
            words[match[1]] = match[2]
    known = ["rate", "users", "think", "prompt", "output", "requests", "long", "prefix"]
    known += ["burst"] * (process in ("", "bursts"))
    process = process or ("poisson" if "users" in words else "")
    if unknown := set(words) - {*known, "burst"}:
        raise LegroomError(f"a synthetic mix has no {min(unknown)!r}; its keys are {', '.join(known)}", _EXAMPLE)
    if process not in ("poisson", "uniform", "bursts"):
        raise LegroomError(f"arrivals can be poisson, uniform or bursts, not {process!r}", _EXAMPLE)
    rng, users = random.Random(seed), _users(words)
    rate = users.rate(0.0) if users else _parse_number(words.get("rate", "1"), "rate")
    # Each user asks a few times.
    usual = max(1000, min(3 * users.count, 20_000), users.count) if users else 1000
    count = int(_parse_number(words.get("requests", str(usual)), "requests"))
    if users and count < users.count:
        few = f"{count:,} requests are too few to show how long {users.count:,} users wait"
        raise LegroomError(few, f"give requests={users.count} or more, or fewer users")
    prompt = _length_distribution(words.get("prompt", "lognormal(500,0.8)"))
    output = _length_distribution(words.get("output", "lognormal(150,0.8)"))
    burst = int(_parse_number(words.get("burst", "20"), "burst")) if process == "bursts" else 1
    if rate <= 0 or burst < 1 or not 1 <= count <= _MAX_REQUESTS:
        raise LegroomError("rate must be above 0, burst at least 1 and requests between 1 and 20 million", _EXAMPLE)
    long_share, long_length = _number_pair(words.get("long", "0,1"), "long")
    groups, prefix_len = _number_pair(words.get("prefix", "0,0"), "prefix")
    trace = Trace("synthetic", in_seconds=True, users=users)
    at = 0.0
    for i in range(count):
        if i % burst == 0:
            gap = burst / rate
            at += gap if process == "uniform" else rng.expovariate(1 / gap)
        length = long_length if long_share and rng.random() < long_share else prompt(rng)
        name = f"prefix{rng.randrange(int(groups))}" if groups >= 1 else None
        shared = int(prefix_len) if name else 0
        trace.add(_bounded_tokens(length), _bounded_tokens(output(rng)), at, prefix_id=name, prefix_len=shared)
    return trace


def _users(words: dict[str, str]) -> Users | None:
    """The users of `users=N think=S`; None where neither is given; LegroomError if a rate is given, too."""
    if "users" not in words:
        if "think" in words:
            raise LegroomError("think= is what users do between two questions", "add users=N")
        return None
    think = words.get("think", f"{THINK_S:g}")
    users = Users(int(_parse_number(words["users"], "users")), seconds_in(think))
    if math.isnan(users.think_s):
        raise LegroomError(f"{think!r} is not a time to think", "write it like 30s or 2min")
    if "rate" in words:
        raise LegroomError("both rate= and users= say how many requests come", "give one of them")
    if not (1 <= users.count <= 1e6 and 0.1 <= users.think_s < 86400):
        raise LegroomError("users are 1 to 1,000,000 and think 0.1 s to a day", "write it like users=200 think=30")
    return users


def _length_distribution(text: str) -> Draw:
    """A function that draws lengths in tokens, for a text such as `800` or `lognormal(500,0.8)`; or LegroomError."""
    call = _CALL.fullmatch(text)
    if not call:
        value = _parse_tokens(text, "a length")
        if value < 1:
            raise LegroomError(f"a prompt or an output has at least 1 token, not {text}", _EXAMPLE)
        return lambda rng: value
    numbers = [_parse_tokens(part, text) for part in call[2].split(",")]
    if call[1] == "lognormal" and len(numbers) == 2 and numbers[0] > 0:
        median, sigma = math.log(numbers[0]), numbers[1]
        return lambda rng: math.exp(min(rng.normalvariate(median, sigma), 700.0))  # more overflows a float
    if call[1] == "uniform" and len(numbers) == 2:
        return lambda rng: rng.uniform(*numbers)
    if call[1] in ("exponential", "geometric") and len(numbers) == 1 and numbers[0] > 0:
        return lambda rng: rng.expovariate(1 / numbers[0])
    hint = "use N, lognormal(median,sigma), uniform(a,b), exponential(m)"
    raise LegroomError(f"{text!r} is not a distribution of lengths", hint)


def _parse_number(text: str, what: str) -> float:
    """The text as a finite number; LegroomError otherwise. `what`: the parameter's name in the message."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise LegroomError(f"{what}: {text.strip()!r} is not a finite number", _EXAMPLE)
    return value


def _parse_tokens(text: str, what: str) -> float:
    """The text as a number of tokens, where `7k` is 7,168; `what`: the parameter's name in an error."""
    return _parse_number(text[:-1], what) * KIB if text[-1:] in ("k", "K") else _parse_number(text, what)


def _number_pair(text: str, what: str) -> tuple[float, float]:
    """The numbers of "a,b" or "(a,b)", where b may be `7k`; else LegroomError; `what`: the parameter's name in it."""
    parts = text.strip("()").split(",")
    if len(parts) != 2:
        raise LegroomError(f"{what} takes two numbers, not {text!r}", _EXAMPLE)
    return _parse_number(parts[0], what), _parse_tokens(parts[1], what)


def _bounded_tokens(length: float) -> int:
    """A drawn length as whole tokens, from 1 to the maximum."""
    return max(1, min(int(length), _MAX_TOKENS))
