"""The options that the deployment formats share."""

from __future__ import annotations

import argparse

from legroom.exports.server_times import DRAIN_S


def add_server_options(group: argparse._ArgumentGroup, *, image: bool = False) -> None:
    """What is the same for a unit, a container and a manifest."""
    group.add_argument("--name", metavar="NAME", help="what the service is called (default: from the model)")
    group.add_argument("--disk-speed", metavar="SPEED", help="how fast weights are read (default: 200MB/s)")
    group.add_argument("--download-speed", metavar="SPEED", help="how fast they are downloaded once (default: 100MB/s)")
    group.add_argument("--drain", metavar="SECONDS", help=f"for running requests when it stops (default: {DRAIN_S})")
    group.add_argument("--with-guard", action="store_true", help="legroom's guard in front of the requests")
    group.add_argument("--with-sidecar", action="store_true", help="legroom watch beside the server")
    if image:
        group.add_argument("--image", metavar="IMAGE", help="another image than vllm/vllm-openai of the release")
