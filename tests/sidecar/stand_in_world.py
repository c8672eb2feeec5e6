"""A server, its platform and its drain without any process, for tests of what is done to them and in which order."""

from legroom.actions.platform import Override, State
from legroom.live.metrics.sample import EngineSample, Sample, ScrapeFailure


class Killed(BaseException):
    """Stands for SIGKILL: nothing that follows in this process runs."""


class World:
    """A server, its platform and its drain in one, with a list of what was done to them."""

    name = "the world"
    settle_s = 0.0

    def __init__(self, running=0.0):
        self.done, self.starts, self.up, self.flags = [], 1, True, None
        self.running = running
        self.die_at = None
        self.comes_back = True
        self.closed = False

    def happens(self, what):
        self.done.append(what)
        if self.die_at == what:
            self.die_at = None
            raise Killed

    async def state(self):
        return State(f"start {self.starts}", self.up)

    async def restart(self, asked):
        await asked.launched(0, "")
        self.happens("launched")
        self.starts += 1
        self.up = self.comes_back
        self.happens("restart")

    async def override_place(self):
        return Override("flags", self.flags)

    async def write_flags(self, change):
        self.flags = str(change)
        self.happens("flags written")

    async def restore_flags(self, override):
        self.flags = override.before
        self.happens("flags restored")

    async def begin(self):
        self.closed = True
        self.happens("closed")

    async def end(self):
        self.closed = False
        self.happens("opened")

    async def in_flight(self):
        return None

    async def look(self, server):
        if not self.up:
            return ScrapeFailure(0.0, "a", "refused", "nothing listens there")
        return Sample(0.0, "a", (EngineSample("m", "0", running=self.running),), process_start_s=float(self.starts))
