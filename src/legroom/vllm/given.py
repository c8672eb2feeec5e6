"""Looking up what a user gave outside the fields of `ServeArgs`: other flags and environment variables."""

from __future__ import annotations

from legroom.vllm.args import ServeArgs


def other_values(args: ServeArgs, name: str) -> tuple[str, ...] | None:
    """The values of a flag kept in `others`: () for a bare switch, None where it was not given. The last one wins."""
    tokens = args.others
    if not tokens:
        return None
    found: tuple[str, ...] | None = None
    for i, token in enumerate(tokens):
        flag, has_value, value = token.partition("=")
        if flag != name:
            continue
        if has_value:
            found = (value,)
            continue
        stop = i + 1
        while stop < len(tokens) and not tokens[stop].startswith("--"):
            stop += 1
        found = tokens[i + 1 : stop]
    return found


def other_value(args: ServeArgs, name: str) -> str | None:
    """The first value of a flag kept in `others`, None where it was not given."""
    values = other_values(args, name)
    return values[0] if values else None


def is_given(args: ServeArgs, name: str) -> bool:
    """Whether a flag is among `others`."""
    return other_values(args, name) is not None


def env_flag(args: ServeArgs, name: str) -> bool | None:
    """An environment variable that holds 0 or 1; None where it is not set or not readable as one."""
    value = args.env.get(name)
    if value is None:
        return None
    text = value.strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    return False if text in ("0", "false", "no", "off", "") else None
