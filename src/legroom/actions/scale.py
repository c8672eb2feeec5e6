"""More or fewer servers of a group: changed where the platform can, else said in words."""

from __future__ import annotations

from legroom.actions.platform import ActionFailed, Platform, Scalable


async def scale(platform: Platform, replicas: int, act: bool) -> str:
    """Wants so many servers, or without `act` says how to. The answer is a sentence either way."""
    if replicas < 1:
        raise ActionFailed("a group is never scaled below one server")
    if not isinstance(platform, Scalable):
        return f"start another server beside {platform.name}: legroom cannot scale it ({replicas} wanted)"
    if not act:
        return f"to have {replicas}: {platform.scale_words(replicas)}"
    before = await platform.replicas()
    if before == replicas:
        return f"{platform.name} has {replicas} already"
    await platform.scale(replicas)
    return f"{platform.name} scaled from {before} to {replicas}"
