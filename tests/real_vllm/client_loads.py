"""Loads for a real vLLM: a healthy mix, and loads that provoke an incident each."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from legroom.live import thresholds

VOCABULARY = 250
"""Token ids that the tiny model has words for."""
CROWD_S = 3 * thresholds.DEFAULT.queue_wait_s
"""How long the last request of a crowd waits: three times the queue time that the detector allows."""
Load = Callable[["Client"], Awaitable[None]]


class Client:
    """Sends completions with prompts given as token ids, so that lengths are exact."""

    def __init__(self, url: str, model: str, seed: int = 7) -> None:
        self.url, self.model = url, model
        self.random = random.Random(seed)
        self.done = self.failed = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self.prefixes = [self.tokens(384) for _ in range(4)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(10, VOCABULARY) for _ in range(count)]

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._session
        await self._session.close()

    def send(self, prompt: list[int], max_tokens: int) -> None:
        """Start one request and go on."""
        task = asyncio.create_task(self._one(prompt, max_tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def open(self) -> int:
        return len(self._tasks)

    async def _one(self, prompt: list[int], max_tokens: int) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        assert self._session
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
            timeout = aiohttp.ClientTimeout(total=600)
            async with self._session.post(f"{self.url}/v1/completions", json=body, timeout=timeout) as answer:
                await answer.read()
                if answer.status == 200:
                    self.done += 1
                    return
        self.failed += 1


def mixed_request(client: Client) -> tuple[list[int], int]:
    """Short and long, with and without a shared beginning: what a chat service sees."""
    choose = client.random
    prompt = client.tokens(int(choose.lognormvariate(4.2, 0.8)) + 8)[:1200]
    if choose.random() < 0.5:
        prompt = choose.choice(client.prefixes) + prompt
    return prompt[:1800], min(int(choose.lognormvariate(3.3, 0.7)) + 4, 200)


async def healthy(client: Client, requests_a_second: float = 0.8) -> None:
    """Poisson arrivals that swing by a factor of three, small bursts, a long prompt now and then, and quiet minutes."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        minute = (loop.time() - start) / 60
        if int(minute) % 10 == 9:
            await asyncio.sleep(1)  # one quiet minute in ten
            continue
        swing = 1 + 0.5 * (int(minute) % 3 - 1)
        await asyncio.sleep(client.random.expovariate(requests_a_second * swing))
        kind = client.random.random()
        if kind < 0.01:
            for _ in range(12):
                client.send(*mixed_request(client))
        elif kind < 0.03:
            client.send(client.tokens(1800), 16)
        else:
            client.send(*mixed_request(client))


async def crowd(client: Client, least: int, prompt: int, output: int) -> None:
    """As many requests open as the server answers in `CROWD_S`, so that a fast machine has a queue that is as long in
    time."""
    began, before = time.monotonic(), client.done
    while True:
        answered_per_s = (client.done - before) / max(1, time.monotonic() - began)
        while client.open < max(least, CROWD_S * answered_per_s):
            client.send(client.tokens(prompt), output)
        await asyncio.sleep(0.1)


async def backlog(client: Client) -> None:
    """Far more requests than the server takes at once."""
    await crowd(client, 400, 32, 120)


async def thrash(client: Client) -> None:
    """Requests that start small and grow past what the pool holds, one for each place in the batch."""
    while True:
        while client.open < 24:
            client.send(client.tokens(24), 900)
        await asyncio.sleep(0.2)


async def low_hit_rate(client: Client) -> None:
    """Prompts that share nothing, of three blocks each to their end: seven at once fill the pool, and more wait."""
    while True:
        while client.open < 24:
            client.send(client.tokens(290), client.random.randrange(40, 90))
        await asyncio.sleep(0.05)


async def full_pool(client: Client) -> None:
    """Two requests that fill the pool between them, asked over and over, and nobody waits: what a pool is for."""
    prompts = [client.tokens(1290), client.tokens(1290)]
    turn = 0
    while True:
        while client.open < 2:
            client.send(prompts[turn % 2], 110)
            turn += 1
        await asyncio.sleep(0.02)


async def steady(client: Client) -> None:
    """A few long answers that end one by one, so that something runs at every moment."""
    while True:
        while client.open < 5:
            client.send(client.tokens(64), client.random.randrange(200, 400))
        await asyncio.sleep(0.05)
