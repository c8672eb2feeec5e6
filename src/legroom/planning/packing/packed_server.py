"""A server to pack, of its command and of the options of `legroom pack` among its flags."""

import re
from collections.abc import Mapping

from legroom.errors import LegroomError
from legroom.planning.packing.needs import PackedServer, default_name
from legroom.planning.plan import Policy, Target
from legroom.planning.search_space import CapacityGoal
from legroom.units import parse_length, parse_whole
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import served_model

SERVER_OPTIONS = ("--want-context", "--want-concurrency", "--weight", "--name")
_OPTION = re.compile(rf"(?<!\S)({'|'.join(SERVER_OPTIONS)})(?:=|\s+)(\S+)")


def split_command(command: str) -> tuple[dict[str, str], str]:
    """(the options of `legroom pack` in a server's command by name, the command without them)."""
    return dict(_OPTION.findall(command)), _OPTION.sub("", command)


def packed_server(
    options: Mapping[str, str], target: Target, args: ServeArgs, policy: Policy, sleep_level: int = 1
) -> PackedServer:
    """The server with its name, weight and goal; LegroomError for an option that cannot be read."""
    text = options.get("--weight", "1")
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < 1e6:
        raise LegroomError(f"--weight {text} is not a share", "write it like --weight 2")
    goal = _capacity_goal(options, args, policy)
    return PackedServer(options.get("--name") or default_name(args), target, args, weight, goal, sleep_level)


def _capacity_goal(options: Mapping[str, str], args: ServeArgs, policy: Policy) -> CapacityGoal | None:
    """The context and concurrency that the server is to hold; None where the options state neither."""
    context, concurrency = (options.get(f"--want-{name}") for name in ("context", "concurrency"))
    if context is None and concurrency is None:
        return None
    usual = args.max_model_len or served_model(args).max_position_embeddings
    tokens = parse_length(context, "--want-context") if context else usual
    return CapacityGoal(tokens, float(parse_whole(concurrency or "1", "--want-concurrency", 1, 10**6)), policy=policy)
