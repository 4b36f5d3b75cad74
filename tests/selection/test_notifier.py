"""The notifier that wakes whoever waits for a change in the selector."""

from __future__ import annotations

import asyncio

from pods_cluster.selection.actor import Notifier


def test_a_notification_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    async def scene() -> tuple[list[str], bool]:
        notifier, woken = Notifier(), []

        async def wait(name: str) -> None:
            await notifier.wait(60.0)
            woken.append(name)

        first = [asyncio.create_task(wait(name)) for name in "ab"]
        await asyncio.sleep(0)
        notifier.notify_all()
        notifier.notify_all()
        await asyncio.wait_for(asyncio.gather(*first), 10)
        late = asyncio.create_task(wait("c"))
        await asyncio.sleep(0.01)
        waits = not late.done()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        notifier.notify_all()
        return woken, waits

    assert asyncio.run(scene()) == (["a", "b"], True)


def test_a_wait_ends_at_its_deadline() -> None:
    async def scene() -> int:
        notifier = Notifier()
        waits = [asyncio.create_task(notifier.wait(seconds)) for seconds in (0.01, 0.0)]
        ended, _ = await asyncio.wait(waits, timeout=10)
        return len(ended)

    assert asyncio.run(scene()) == 2
