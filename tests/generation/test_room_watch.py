"""The watch over free places, with workers that answer when the test says so."""

from __future__ import annotations

import asyncio

from pods_cluster.generation.room_watch import RoomWatch


class Worker:
    """Each call waits for the next `answers`."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[int]] = []

    @property
    def wait_for_room(self) -> Worker:
        return self

    def remote(self, places: int, timeout: float) -> asyncio.Future[int]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]


def test_an_answer_from_before_a_question_is_not_taken_for_one() -> None:
    async def body() -> None:
        watch, one, other = RoomWatch(), Worker(), Worker()
        workers = {"one": one, "other": other}
        asking = asyncio.ensure_future(watch.wait(workers, 9, 30.0))
        await asyncio.sleep(0)
        one.calls[0].set_result(5)
        assert await asking == {"one": 5}
        # something is sent to both; meanwhile the other's call is answered with what was true before that
        other.calls[0].set_result(8)
        await asyncio.sleep(0.01)
        asking = asyncio.ensure_future(watch.wait(workers, 9, 30.0))
        await asyncio.sleep(0)
        assert len(other.calls) == 2, "it is asked again"
        for worker, count in ((one, 2), (other, 3)):
            worker.calls[1].set_result(count)
        assert await asking == {"one": 2, "other": 3}
        watch.close()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_nobody_to_ask_and_a_worker_that_is_gone_bring_nothing() -> None:
    async def body() -> None:
        watch, gone = RoomWatch(), Worker()
        assert await watch.wait({}, 9, 0.0) == {}
        assert await watch.wait({"gone": gone}, 9, 0.0) == {}
        assert await watch.wait({}, 9, 0.0) == {}  # its call is not waited for
        assert gone.calls[0].cancelled() or not gone.calls[0].done()
        watch.close()

    asyncio.run(asyncio.wait_for(body(), 60))
