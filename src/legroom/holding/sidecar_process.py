"""The sidecar as a process: alone with its journal, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable

from legroom.errors import LegroomError
from legroom.holding.alone import alone
from legroom.holding.sidecar import Sidecar
from legroom.holding.sidecar_config import SidecarConfig
from legroom.holding.sidecar_sources import source_of
from legroom.live.journal import journal_path
from legroom.live.journal_masking import masked


def run_sidecar(config: SidecarConfig, say: Callable[[str], None] | None = None) -> int:
    """Runs the sidecar until SIGTERM or SIGINT. The exit code: 0 when it was told to stop."""
    tell, journal = say or _to_stderr, config.journal or journal_path()
    one = journal.with_name(f"{journal.name}.sidecar")
    refusal = f"another legroom already watches with the journal {journal}"
    with alone(one, tell, "a second sidecar away", lambda pid: LegroomError(f"{refusal} (pid {pid})")):
        asyncio.run(_main(config, tell))
    return 0


async def _main(config: SidecarConfig, say: Callable[[str], None]) -> None:
    sidecar = Sidecar(config, say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sidecar.stop)
    acting = sorted(config.act - {"notify"})
    say(f"watching {_watched(config)}; {'acting: ' + ', '.join(acting) if acting else 'telling only'}")
    await sidecar.run(source_of(config, say))
    say("stopped")


def _watched(config: SidecarConfig) -> str:
    finders = (("Prometheus", config.prometheus), ("Kubernetes", config.kubernetes))
    found = [f"what {name} lists" for name, finder in finders if finder is not None]
    named = [f"{len(config.servers)} server{'s' if len(config.servers) != 1 else ''}"] if config.servers else []
    return " and ".join((*named, *found)) or "nothing"


def _to_stderr(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} legroom: {masked(text)}", file=sys.stderr, flush=True)
