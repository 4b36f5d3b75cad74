"""A Dockerfile carried out without a container engine: its own instructions, in empty Debian roots, and a command in the result.

    sudo python docker/rehearse.py docker/cpu.Dockerfile --root /tmp/image --run "pods quickstart --no-baseline"

Linux, root, and `mmdebstrap` (`apt-get install mmdebstrap`). Each stage begins with a fresh Debian of the release that its base
image is made of, with Debian's own Python in place of the image's (the same minor version, or it is refused); RUN, COPY, ENV,
WORKDIR and USER are carried out as they stand, in a chroot with mounts of its own. What it cannot show: the base image
itself, layers, and the size of the image. With `--pip-as-here` RUN reaches the package index that pip reaches on this machine
(its settings, a firm's certificates, a local index). `--bind` makes further files visible; `--env` passes variables on, as
build arguments too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT = Path(__file__).parents[1]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = "ca-certificates,python3,python3-venv"
IGNORED = ("LABEL", "EXPOSE", "CMD")
_MOUNTS = """
set -e
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
for path in $BINDS; do
  if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root$(dirname "$path")"; touch "$root$path"; fi
  mount --bind "$path" "$root$path"
done
unset BINDS
exec "$@"
"""


@dataclass
class Stage:
    """A root, and what the instructions so far have set for those that follow."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": "/root"})
    args: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)

    def run(self, command: Sequence[str], binds: Sequence[str], extra: dict[str, str]) -> None:
        """Run a command in the root. Raises SystemExit with its exit code where it fails."""
        env = {**extra, **self.args, **self.env}
        if self.user != "0:0":
            env["HOME"] = f"/home/{'ray' if self.user.startswith('1000') else self.user}"
        inside = ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env", "--ignore-environment",
                  f"--chdir={self.folder}", *(f"{name}={value}" for name, value in env.items()), *command]  # fmt: skip
        # The command is process 1, as in a container: what it leaves behind ends with it.
        apart = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        mounted = [*apart, "bash", "-c", _MOUNTS, "mounts", str(self.root)]
        done = subprocess.run([*mounted, *inside], env={**os.environ, "BINDS": " ".join(binds)}, check=False)
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {shlex.join(command)[:300]}")


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def pip_as_here(settings: str) -> tuple[dict[str, str], list[str]]:
    """Variables and files with which pip elsewhere has `settings` (the output of `pip config list`). The files of an index
    `file:///a/simple` lie beside that folder.
    """
    lines = [line.partition("=") for line in settings.splitlines()]
    lines.sort(key=lambda line: line[0].startswith(":env:"))  # these win
    env, files = {}, []
    for name, _, value in lines:
        section, _, option = name.rpartition(".")
        if section in ("global", ":env:") and option not in ("config-file", "cache-dir"):
            env[f"PIP_{option.upper().replace('-', '_')}"] = ast.literal_eval(value)
    for word in " ".join(env.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            files.append(str(path.parent if word.startswith("file://") else path))
    return env, sorted(set(files))


def base(image: str, folder: Path) -> Path:
    """An empty Debian like that of the image `python:3.11…-slim-bookworm`, made once."""
    found = re.fullmatch(r"python:(\d+\.\d+)[\d.]*-slim-(\w+)", image)
    if found is None:
        raise SystemExit(f"{image}: only python:VERSION-slim-RELEASE is known here")
    version, release = found.groups()
    root = folder / release
    if not root.exists():
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", release, str(root)], check=True
        )
    there = os.readlink(root / "usr/bin/python3").removeprefix("python")
    if there != version:
        raise SystemExit(f"{image}: Debian {release} has Python {there}, not {version}")
    link = root / "usr/local/bin/python"
    if not link.is_symlink():
        link.symlink_to("/usr/bin/python3")
    return root


def copy(stages: dict[str, Stage], stage: Stage, rest: str) -> None:
    """COPY, from the repository or from another stage; links stay links."""
    words = rest.split()
    origin, left_out = CONTEXT, shutil.ignore_patterns("__pycache__")
    if words[0].startswith("--from="):
        left_out = None  # what pip compiled goes along, or each process of the image would compile it anew
        origin = stages[words.pop(0).partition("=")[2]].root
    *sources, target = words
    to = stage.root / str(Path(stage.folder, target)).lstrip("/")
    for source in sources:
        path = origin / source.lstrip("/")
        if path.is_dir():  # its contents, as COPY does
            shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True, ignore=left_out)
        else:
            place = to / path.name if target.endswith("/") or len(sources) > 1 else to
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)


def build(path: Path, folder: Path, binds: Sequence[str], extra: dict[str, str], *, built: bool = False) -> Stage:
    """Carry out the whole Dockerfile; its last stage. `built`: its roots are there, and only what it sets is read."""
    stages: dict[str, Stage] = {}
    stage, outer = None, {}
    for word, rest in instructions(path):
        began = time.monotonic()
        if word == "FROM":
            image, _, name = re.sub(r"\$\{(\w+)\}", lambda m: outer[m[1]], rest).partition(" AS ")
            stage = Stage(folder / f"stage{len(stages)}")
            if not built:
                subprocess.run(["cp", "--archive", str(base(image, folder)), str(stage.root)], check=True)
                shutil.copy("/etc/resolv.conf", stage.root / "etc/resolv.conf")
            stages[name or "last"] = stage
        elif word == "ARG":
            name, _, value = rest.partition("=")
            (outer if stage is None else stage.args)[name] = extra.get(name, value.strip('"'))
        elif word in IGNORED or (built and word in ("RUN", "COPY")):
            continue
        elif stage is None:
            raise SystemExit(f"{word} before FROM")
        elif word == "RUN":
            stage.run([*stage.shell, rest], binds, extra)
        elif word == "COPY":
            copy(stages, stage, rest)
        elif word == "ENV":
            for item in shlex.split(rest):
                name, _, value = item.partition("=")
                stage.env[name] = value.replace("$PATH", stage.env["PATH"])
        elif word == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word == "SHELL":
            stage.shell = json.loads(rest)
        elif word == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        else:
            raise SystemExit(f"{word} is not known here")
        print(f"{time.monotonic() - began:6.1f} s  {word} {rest[:110]}", flush=True)
    if stage is None:
        raise SystemExit(f"{path} has no stage")
    return stage


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--root", type=Path, required=True, help="empty folder for the roots; left behind")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH", help="visible inside at the same path")
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="of this environment, for RUN")
    parser.add_argument("--pip-as-here", action="store_true", help="pip's settings of this machine, for RUN")
    parser.add_argument("--run", default="", metavar="COMMAND", help="what the image is to run in the end")
    parser.add_argument(
        "--built", action="store_true", help="the roots are those of an earlier call: run the command alone"
    )
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        raise SystemExit("needs root, and mmdebstrap: apt-get install mmdebstrap")
    options.root.mkdir(parents=True, exist_ok=True)
    extra, binds = {}, list(options.bind)
    if options.pip_as_here:
        settings = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        )
        extra, files = pip_as_here(settings.stdout)
        binds += files
    extra |= {name: os.environ[name] for name in options.env if name in os.environ}
    stage = build(options.file, options.root.resolve(), binds, extra, built=options.built)
    size = subprocess.run(["du", "-sxm", str(stage.root)], capture_output=True, text=True, check=True).stdout.split()[0]
    print(f"the last stage has {size} MB", flush=True)
    if options.run:
        stage.run([*stage.entrypoint, *shlex.split(options.run)], (), {})


if __name__ == "__main__":
    main()
