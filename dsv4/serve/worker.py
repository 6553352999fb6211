"""The one thread that owns the engine: jobs in the order of their arrival."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dsv4.errors import UserError

# Called in the thread now and then: raises ``Cancelled`` when nobody waits for the job any more.
Check = Callable[[], None]
Work = Callable[[Check], Iterator[object]]
# Errors of a job that leave the engine as good as before it.
HARMLESS = (UserError, FloatingPointError)
_END = object()
_Result = TypeVar("_Result")


class Cancelled(Exception):
    """Nobody waits for a job, or the server is ending."""


class QueueFull(Exception):
    """As many jobs wait as may."""


class Job:
    """Work that waits for the thread, or is under way in it; used in the thread of the loop."""

    def __init__(self, work: Work, pool: ThreadPoolExecutor) -> None:
        self._work: Work | None = work
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[object] = asyncio.Queue()
        self._stop = threading.Event()
        self._future: Future[None] = pool.submit(self._run)
        self._future.add_done_callback(lambda _: self._post(_END))

    @property
    def ended(self) -> bool:
        """Whether the thread has done with it."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What ended it before its end, once it has ended."""
        return Cancelled() if self._future.cancelled() else self._future.exception()

    def cancel(self) -> None:
        """Ends it: at once while it waits, else at its next token."""
        self._stop.set()
        if self._future.cancel():
            self._work = None  # The pool keeps the job until its turn, but not the prompt.

    async def results(self, idle_seconds: float) -> AsyncIterator[object]:
        """What the work yields, and None when nothing has come for so long. Ends with the work,
        also where that fails.
        """
        while True:
            try:
                result = await asyncio.wait_for(self._results.get(), idle_seconds)
            except TimeoutError:
                yield None
                continue
            if result is _END:
                return
            yield result

    def _run(self) -> None:
        assert self._work is not None
        for result in self._work(self._check):
            self._post(result)

    def _check(self) -> None:
        if self._stop.is_set():
            raise Cancelled

    def _post(self, result: object) -> None:
        self._loop.call_soon_threadsafe(self._results.put_nowait, result)


class Worker:
    """The thread, and the jobs that it has yet to end. ``most_waiting``: besides the one under
    way.
    """

    def __init__(self, most_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(1, "engine")
        self._most_waiting = most_waiting
        self._jobs: list[Job] = []
        self._ending = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Jobs that have not ended, the one under way included."""
        self._jobs = [job for job in self._jobs if not job.ended]
        return len(self._jobs)

    def call(self, function: Callable[[], _Result]) -> _Result:
        """What ``function`` returns, called in the thread behind all jobs; raises what it raises.
        What belongs to a thread, such as the current device of CUDA, is that of the jobs.
        """
        return self._pool.submit(function).result()

    def submit(self, work: Work) -> Job:
        """A new job. Raises ``QueueFull``, and ``Cancelled`` behind ``end``."""
        if self._ending.is_set():
            raise Cancelled
        if self.waiting > self._most_waiting:
            raise QueueFull
        job = Job(work, self._pool)
        self._jobs.append(job)
        return job

    async def before_end(self, waiting: Coroutine[object, object, _Result]) -> _Result:
        """What ``waiting`` returns; raises what it raises. ``end`` gives it up: ``Cancelled``."""
        task = asyncio.create_task(waiting)
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Cancelled
            return task.result()
        finally:
            task.cancel()
            ending.cancel()

    async def end(self) -> None:
        """Cancels every job, gives up what waits for one, and waits until the thread has nothing
        to do.
        """
        self._ending.set()
        for job in self._jobs:
            job.cancel()
        await asyncio.to_thread(self.call, lambda: None)
