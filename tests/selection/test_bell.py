"""The bell that wakes whoever waits for news in the selector."""

from __future__ import annotations

import asyncio

from pods_cluster.selection.bell import Bell


def test_a_ring_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    async def scene() -> tuple[list[str], bool]:
        bell, woken = Bell(), []

        async def wait(name: str) -> None:
            await bell.wait(60.0)
            woken.append(name)

        first = [asyncio.create_task(wait(name)) for name in "ab"]
        await asyncio.sleep(0)
        bell.ring()
        bell.ring()
        await asyncio.wait_for(asyncio.gather(*first), 10)
        late = asyncio.create_task(wait("c"))
        await asyncio.sleep(0.01)
        waits = not late.done()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        bell.ring()
        return woken, waits

    assert asyncio.run(scene()) == (["a", "b"], True)


def test_a_wait_ends_at_its_deadline() -> None:
    async def scene() -> int:
        bell = Bell()
        waits = [asyncio.create_task(bell.wait(seconds)) for seconds in (0.01, 0.0)]
        ended, _ = await asyncio.wait(waits, timeout=10)
        return len(ended)

    assert asyncio.run(scene()) == 2
