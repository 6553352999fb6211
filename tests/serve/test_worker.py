"""The thread that owns the engine: order, the limit of the queue, cancelled jobs, failures."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from dsv4.serve.worker import Cancelled, Check, Job, QueueFull, Work, Worker


class Gate:
    """Work that begins when it is let through, or after a while: a test that has failed must not
    keep its thread.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def work(self, check: Check) -> Iterator[object]:
        self.begun.set()
        for _ in range(2000):
            if self.open.wait(0.01):
                break
            check()
        yield "through"


def counting(name: str, seen: list[str]) -> Work:
    def work(_: Check) -> Iterator[object]:
        seen.append(name)
        yield name

    return work


async def all_of(job: Job) -> list[object]:
    return [one async for one in job.results(30) if one is not None]


def test_jobs_run_in_the_order_of_their_arrival_and_no_more_than_the_queue_holds() -> None:
    async def run() -> None:
        worker = Worker(2)
        gate = Gate()
        seen: list[str] = []
        first = worker.submit(gate.work)
        await asyncio.to_thread(gate.begun.wait)
        others = [worker.submit(counting(name, seen)) for name in "ab"]
        with pytest.raises(QueueFull):
            worker.submit(counting("c", seen))
        assert (worker.waiting, seen) == (3, [])
        gate.open.set()
        assert [await all_of(job) for job in (first, *others)] == [["through"], ["a"], ["b"]]
        assert ([job.error for job in others], seen, worker.waiting) == (
            [None, None],
            ["a", "b"],
            0,
        )
        assert await all_of(worker.submit(counting("d", seen))) == ["d"]
        await worker.end()

    asyncio.run(run())


def test_a_cancelled_job_ends_while_it_waits_and_while_it_runs() -> None:
    async def run() -> None:
        worker = Worker(1)
        gate = Gate()
        seen: list[str] = []
        running = worker.submit(gate.work)
        await asyncio.to_thread(gate.begun.wait)
        waiting = worker.submit(counting("a", seen))
        waiting.cancel()
        assert worker.waiting == 1
        assert (await all_of(waiting), type(waiting.error)) == ([], Cancelled)
        worker.submit(counting("b", seen))
        running.cancel()
        assert (await all_of(running), type(running.error)) == ([], Cancelled)
        await worker.end()
        assert "a" not in seen

    asyncio.run(run())


def test_a_cancelled_job_keeps_no_prompt_while_another_one_runs() -> None:
    """However many come and leave during a long answer."""

    async def run() -> None:
        worker = Worker(1)
        gate = Gate()
        running = worker.submit(gate.work)
        await asyncio.to_thread(gate.begun.wait)
        left = Gate()
        waiting = worker.submit(left.work)
        prompt = weakref.ref(left)
        waiting.cancel()
        del left
        gc.collect()
        assert prompt() is None
        running.cancel()
        await worker.end()

    asyncio.run(run())


def test_a_failure_ends_its_job_alone() -> None:
    def failing(_: Check) -> Iterator[object]:
        yield 1
        raise FloatingPointError("NaN")

    async def run() -> None:
        worker = Worker(1)
        job = worker.submit(failing)
        assert await all_of(job) == [1]
        assert isinstance(job.error, FloatingPointError)
        assert await all_of(worker.submit(counting("a", []))) == ["a"]
        await worker.end()

    asyncio.run(run())


def test_a_job_with_nothing_to_say_says_so() -> None:
    async def run() -> None:
        worker = Worker(1)
        gate = Gate()
        results = worker.submit(gate.work).results(0.01)
        assert await anext(results) is None
        gate.open.set()
        assert [one async for one in results if one is not None] == ["through"]
        await worker.end()

    asyncio.run(run())


def test_the_end_cancels_everything() -> None:
    async def run() -> None:
        worker = Worker(5)
        gate = Gate()
        jobs = [worker.submit(gate.work) for _ in range(4)]
        await asyncio.to_thread(gate.begun.wait)
        await worker.end()
        assert [job.ended for job in jobs] == [True] * 4
        assert [type(job.error) for job in jobs] == [Cancelled] * 4
        with pytest.raises(Cancelled):
            worker.submit(Gate().work)

    asyncio.run(run())


def test_a_call_has_its_turn_in_the_thread_of_the_jobs() -> None:
    def naming(_: Check) -> Iterator[object]:
        yield threading.current_thread().name

    async def run() -> None:
        worker = Worker(1)
        name = worker.call(lambda: threading.current_thread().name)
        assert name != threading.current_thread().name
        assert await all_of(worker.submit(naming)) == [name]
        with pytest.raises(ZeroDivisionError):
            worker.call(lambda: 1 // 0)
        await worker.end()
        assert worker.call(lambda: 5) == 5

    asyncio.run(run())


def test_what_is_given_up_at_the_end_is_cancelled() -> None:
    async def run() -> None:
        worker = Worker(0)
        cancelled = asyncio.Event()

        async def patient() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        waiting = asyncio.create_task(worker.before_end(patient()))
        await asyncio.sleep(0.01)
        await worker.end()
        with pytest.raises(Cancelled):
            await waiting
        await asyncio.wait_for(cancelled.wait(), 5)

    asyncio.run(run())
