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
    async def scene() -> None:
        bell = Bell()
        await asyncio.wait_for(bell.wait(0.01), 10)
        await asyncio.wait_for(bell.wait(0.0), 10)

    asyncio.run(scene())
