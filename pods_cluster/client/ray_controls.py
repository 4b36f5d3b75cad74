"""Controls of runs that are alive on a Ray cluster: their controllers are named actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from pods_cluster.actor_names import NAMESPACE, actor_name
from pods_cluster.client.controls import ControlFailed, LiveStatus, NotLive, WorkerState
from pods_cluster.client.deadline import awaited_within
from pods_cluster.run.ray_access import check_reachable, reaching
from pods_cluster.telemetry.number_format import first_line

FIND_SECONDS = 10.0
CONNECT_SECONDS = 3.0
STATUS_SECONDS = 5.0
CALL_SECONDS = 30.0


class RayControls:
    """Calls the actor `<run>/controller/0` in the namespace `pods`. Connects when first asked; starts no cluster.

    `address` is one for `ray.init` ("auto": the cluster of this machine), or a function from a run's name to the address
    of its cluster (None: the run is not alive). A process is connected to one cluster at a time: for a run on another
    one it connects anew.
    """

    def __init__(self, address: str | Callable[[str], str | None] = "auto") -> None:
        self._address = address
        self._connecting = threading.Lock()
        self._connected: str | None = None

    async def status(self, run: str) -> LiveStatus:
        controller = await self._controller(run)
        method = getattr(controller, "status", None)
        if method is None:
            await self._call(run, controller.poll.remote(2**62), STATUS_SECONDS)
            return LiveStatus(
                live=True, workers=[WorkerState(name=actor_name(run, "controller"), role="controller", state="alive")]
            )
        status = await self._call(run, method.remote(), STATUS_SECONDS)
        try:  # the controller may be of another version
            return LiveStatus.model_validate(vars(status), from_attributes=True)
        except (ValidationError, TypeError) as error:
            raise ControlFailed(
                f"{run}: its controller answers in another way than this version expects: {error}"
            ) from error

    async def scale(self, run: str, generators: int | None, learners: int | None) -> str:
        controller = await self._controller(run)
        method = getattr(controller, "scale", None)
        if method is None:
            raise ControlFailed(f"{run}: its controller cannot change its pools; it runs an older version")
        answer = await self._call(run, method.remote(generators=generators, learners=learners), CALL_SECONDS)
        wanted = ", ".join(
            f"{count} {name}"
            for count, name in ((generators, "generators"), (learners, "learners"))
            if count is not None
        )
        return answer if isinstance(answer, str) and answer else f"{wanted} asked for"

    async def stop(self, run: str, reason: str) -> str:
        controller = await self._controller(run)
        await self._call(run, controller.stop.remote(reason), CALL_SECONDS)
        return "the run ends after what it is doing, its state saved"

    async def runs(self, address: str) -> list[str]:
        """Names of the runs that are alive on a cluster. Raises NotLive."""
        try:
            return await awaited_within(FIND_SECONDS, lambda: self._list(address))
        except TimeoutError:
            raise NotLive(f"the Ray cluster at {address} did not answer in {FIND_SECONDS:g} s") from None
        except (ConnectionError, RuntimeError) as error:
            raise NotLive(f"no Ray cluster at {address} can be reached ({first_line(error)})") from error

    async def _controller(self, run: str) -> Any:
        name = actor_name(run, "controller")
        address = self._address(run) if callable(self._address) else self._address
        if address is None:
            raise NotLive(f"{run}: is not alive")
        try:
            return await awaited_within(FIND_SECONDS, lambda: self._find(address, name))
        except TimeoutError:
            raise NotLive(f"{run}: the Ray cluster at {address} did not answer in {FIND_SECONDS:g} s") from None
        except ConnectionError as error:
            raise NotLive(f"{run}: no Ray cluster at {address} can be reached ({first_line(error)})") from error
        except ValueError:
            if self._connected is None:
                here = "the Ray cluster that this process is connected to"
                raise NotLive(f"{run}: no run of this name is alive on {here}; {address} was not looked at") from None
            raise NotLive(f"{run}: no run of this name is alive on the Ray cluster at {address}") from None

    def _find(self, address: str, name: str) -> Any:
        import ray

        self._connect(address)
        return ray.get_actor(name, namespace=NAMESPACE)

    def _list(self, address: str) -> list[str]:
        import ray

        self._connect(address)
        there: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in there if actor["namespace"] == NAMESPACE]
        end = actor_name("", "controller")
        return sorted(name.removesuffix(end) for name in names if name.endswith(end))

    def _connect(self, address: str) -> None:
        import ray

        with self._connecting:
            if ray.is_initialized() and self._connected in (None, address):
                return  # None: the process was connected by someone else, and stays so
            if ray.is_initialized():
                ray.shutdown()
            check_reachable(address, CONNECT_SECONDS)
            # Ray warns on every thread but the main one that it cannot handle a signal there.
            logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
            with reaching(address):
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
            self._connected = address

    async def _call(self, run: str, ref: Any, seconds: float) -> Any:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), seconds)
        except TimeoutError:
            with contextlib.suppress(Exception):
                ray.cancel(ref)
            raise ControlFailed(f"{run}: its controller did not answer in {seconds:g} s") from None
        except RayActorError as error:
            raise NotLive(f"{run}: its controller has ended ({first_line(error)})") from error
        except RayTaskError as error:
            raise ControlFailed(f"{run}: {first_line(error.cause or error)}") from error
