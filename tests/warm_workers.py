"""Ray's workers of the tests, as forks of one process that has imported torch, transformers and DeepSpeed.

A run starts four processes and more, and imports are most of what each computes before it works: five seconds of a core
for a rank or a generator. What is forked is Ray's own worker, before it imports Ray or what of this package works with it: a
process of its own with the environment, the folder, the streams and the limits that Ray gave it.

It is no descendant of the command that runs it; a test that goes through these takes the fixture `cold`, with which workers
start as a user's do. So do all with `PODS_TEST_WARM=` (empty), those whose environment has other settings of these libraries
than the server's (threads, caches), and all where a GPU can be seen, which no fork may share. One on a made-up host of a test
(namespaces of its own for the network and the mounts) has a fork that goes there.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections import Counter
from pathlib import Path
from typing import Any

VARIABLE = "PODS_TEST_WARM"
FOLDER = Path(__file__).parent / "warm"
IMPORTS = (
    "asyncio",
    "accelerate",
    "deepspeed",
    "google.protobuf.json_format",
    "jaxtyping",
    "jinja2",
    "jsonschema",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pods_cluster.config",
    "pydantic",
    "requests",
    "safetensors.torch",
    "torch",
    "torch._dynamo",
    "tqdm.auto",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "uvloop",
    "yaml",
)
READ_BY_IMPORTS = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "OMP_", "MKL_", "MPL", "LD_", "PYTHONPATH", "TORCH_")
"""How variables begin that are read at an import; others of torch are read, and some set, later."""
_JOINED = ("net", "mnt")
"""Namespaces that a fork of a root's server goes to; where others differ the worker starts cold."""
_NO_GPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


class Server:
    """The process that is forked, as long as this one lives. It imports `at_once`, or when the first worker asks.

    The workers of processes that have its `environment` are forks of it.
    """

    def __init__(self, at_once: bool) -> None:
        self._folder = tempfile.mkdtemp(prefix="warm")
        address = f"{self._folder}/socket"
        paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), *(["at once"] if at_once else [])],
                env={**self.environment, **_NO_GPU},
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,
            )
        self.environment[VARIABLE] = address

    def close(self) -> None:
        """End the server; what was forked goes on."""
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


def start(at_once: bool) -> None:
    """Start a server for all that this process starts, as long as it lives."""
    if VARIABLE in os.environ or sees_a_gpu():
        return
    server = Server(at_once)
    os.environ.update(server.environment)
    atexit.register(server.close)


def sees_a_gpu() -> bool:
    """Whether there is a GPU on which processes started here may compute."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def settings(environment: dict[str, str]) -> dict[str, str]:
    """What of the environment the imports of `IMPORTS` read."""
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}


_begun_with: dict[str, str] | None = None


def keep_settings() -> None:
    """Note these settings as they are before any library is imported; `restore_settings` goes back to them."""
    global _begun_with
    _begun_with = settings(dict(os.environ))


def restore_settings() -> None:
    """Take back what libraries have set of these in this process: OpenCV, which vLLM imports, sets LD_LIBRARY_PATH, and vLLM
    LD_PRELOAD and OpenMP's settings. They act on processes that start later, which would all start cold.
    """
    if _begun_with is None:
        return
    for name in settings(dict(os.environ)).keys() - _begun_with.keys():
        del os.environ[name]
    os.environ.update(_begun_with)


def serve(listener: socket.socket) -> tuple[list[str], dict[str, Any]]:
    """Fork a process for each worker that asks. Returns in the fork, with the worker's command."""
    own, seen = settings(dict(os.environ)), Counter[str]()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # the tests' process has ended
            sys.exit()
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            message, streams = _receive(connection)
            try:
                command, obstacle = _command(message, own)
                seen[f"cold: {obstacle}" if obstacle else "forked"] += 1
                Path(f"{listener.getsockname()}.seen").write_text(json.dumps(seen))
                if obstacle:
                    connection.sendall(b"n")
                    continue
                _import()
                connection.sendall(b"y")
                if connection.recv(1) != b"y":  # it has not waited, and works by now
                    continue
                spaces = [os.open(f"/proc/{message['pid']}/ns/{name}", os.O_RDONLY) for name in message["namespaces"]]
                streams += spaces
                if os.fork() == 0:
                    listener.close()
                    connection.close()
                    _go_to(spaces)
                    _become(message, streams[:3])
                    return command, message
                connection.sendall(b"y")
            finally:
                for stream in streams:
                    os.close(stream)


def seen() -> dict[str, int]:
    """How many workers of all tests so far were forked, and how many started cold by each obstacle."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return json.loads(Path(f"{os.environ[VARIABLE]}.seen").read_text())
    return {}


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    streams = array.array("i")
    head, parts, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * streams.itemsize))
    for level, kind, data in parts:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            streams.frombytes(data)
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size and (part := connection.recv(1 << 20)):
        body += part
    return json.loads(body), list(streams)


def _command(message: dict[str, Any], own: dict[str, str]) -> tuple[list[str], str]:
    """The worker's script and arguments, as Ray's `setup_worker.py` would run them, and why it has to start cold, if it has
    to. The message's environment gets what the actor's `runtime_env` adds, and it gets the process group."""
    message["group"] = os.getpgid(message["pid"])
    message["namespaces"] = _other_namespaces(message["pid"])
    context: dict[str, Any] = {}
    script, *rest = message["command"][1:]
    command = [] if script.endswith("setup_worker.py") else [script]
    for item in rest:
        name, _, value = item.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            command.append(item)
    variables = context.get("env_vars") or {}
    message["environment"].update(variables)
    there = settings(message["environment"])
    message["paths"] = _added(there.get("PYTHONPATH", ""), own.get("PYTHONPATH", ""))
    message["apart"] = os.getsid(message["pid"]) != os.getsid(0)
    if message["apart"] and message["group"] != message["pid"]:
        return command, "in a process group of another session"
    if not set(message["namespaces"]) <= set(_JOINED) or (message["namespaces"] and os.geteuid()):
        return command, "in namespaces of its own"
    prefix = context.get("command_prefix") or []
    if len(prefix) == 3 and (prefix[0], prefix[2]) == ("cd", "&&"):  # a submitted run has a folder of its own
        (message["folder"],) = shlex.split(prefix[1])
        prefix = []
    if prefix or context.get("override_worker_entrypoint"):
        return command, "through a command of its own"
    if context.get("py_executable", sys.executable) != sys.executable:
        return command, "another Python"
    if "${" in str(variables):
        return command, "variables made of others"
    if message["paths"] is not None:
        there["PYTHONPATH"] = own.get("PYTHONPATH", "")
    if differ := sorted(name for name in there.keys() | own.keys() if there.get(name, "") != own.get(name, "")):
        return command, f"another {' and '.join(differ)}"
    return command, ""


def _added(paths: str, own: str) -> list[str] | None:
    """What comes before this process's own entries of PYTHONPATH (a submitted run has its folder there); None: it differs."""
    count = len(paths) - len(own)
    if paths == own:
        return []
    return paths[: count - 1].split(os.pathsep) if paths.endswith(os.pathsep + own) else None


def _other_namespaces(pid: int) -> list[str]:
    """The kinds of namespaces in which a process is not where this one is: a worker on a made-up host has its network."""
    kinds = [link.name for link in Path("/proc/self/ns").iterdir() if not link.name.endswith("_for_children")]
    return [kind for kind in kinds if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")]


def _go_to(spaces: list[int]) -> None:
    for space in spaces:
        if ctypes.CDLL(None, use_errno=True).setns(space, 0):
            os._exit(1)


def assert_forkable() -> None:
    """No thread is left that a fork could catch with a lock in its hands. jemalloc's, which Arrow may bring, is made again
    in a fork."""
    threads = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    others = [name for name in threads if name != "jemalloc_bg_thd"]
    assert threading.active_count() == len(others) == 1, f"a fork of a process with threads is not safe: {threads}"


_imported = False


def _import() -> None:
    global _imported
    if _imported:
        return
    for name in IMPORTS:
        __import__(name)
    assert_forkable()
    gc.collect()
    gc.freeze()
    _imported = True


def _become(message: dict[str, Any], streams: list[int]) -> None:
    """Take the place of the process that asked."""
    with contextlib.suppress(OSError):
        if message[
            "apart"
        ]:  # no group of another session can be joined; Ray's workers have a group each, for them alone
            os.setsid()
        else:
            os.setpgid(0, message["group"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for name, limit in message["limits"].items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), tuple(limit))
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["environment"])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave nothing behind
    if sys.argv[2:]:
        _import()
    command, message = serve(socket.socket(fileno=int(sys.argv[1])))
    globals_of = types.ModuleType("__main__")
    globals_of.__dict__["__file__"] = command[0]
    sys.modules["__main__"] = globals_of
    sys.argv = command
    sys.path[:1] = [str(Path(command[0]).parent), *message["paths"]]
    exec(compile(Path(command[0]).read_text(), command[0], "exec"), globals_of.__dict__)


if __name__ == "__main__":
    main()
