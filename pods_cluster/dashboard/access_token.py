"""The token that opens the dashboard from elsewhere, and every change to a run."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from pods_cluster.dashboard import DashboardError

FILE = ".pods-token"
COOKIE = "pods_session"
SHORTEST = 16


class Token:
    """Compares in constant time and never shows itself."""

    __slots__ = ("_digest", "_session", "source")

    def __init__(self, text: str, source: str = "given") -> None:
        """`source` says where it comes from, for people. Raises DashboardError if it is too short to be safe."""
        if len(text) < SHORTEST:
            raise DashboardError(f"token: {len(text)} characters are too few to be safe; give {SHORTEST} or more")
        self._digest = hashlib.sha256(text.encode()).digest()
        self._session = hmac.new(text.encode(), b"pods dashboard session", hashlib.sha256).hexdigest()
        self.source = source

    def matches(self, text: str) -> bool:
        return hmac.compare_digest(hashlib.sha256(text.encode("utf-8", "replace")).digest(), self._digest)

    @property
    def session(self) -> str:
        """The value of a browser's cookie after it gave the token: proves it, does not tell it."""
        return self._session

    def opens(self, session: str) -> bool:
        return hmac.compare_digest(session.encode("utf-8", "replace"), self._session.encode())

    def __repr__(self) -> str:
        return f"Token({self.source})"


def load_token(root: Path, home: Path | None = None) -> Token:
    """The token of a folder of runs, made on first use with mode 600; in the home folder where that cannot be written.

    Raises DashboardError if others could read it, or no place can hold it.
    """
    home = home or Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    problems: list[str] = []
    for path in (root / FILE, home / "pods" / "token"):
        try:
            text = _read(path) or _create(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
            continue
        return Token(text, str(path))
    raise DashboardError(f"no place for the token ({'; '.join(problems)}); pass one with --token-file")


def read_token(path: Path) -> Token:
    """The token in a file of the user's. Raises DashboardError."""
    try:
        text = _read(path)
    except OSError as error:
        raise DashboardError(f"{path}: the token cannot be read ({error.strerror or error})") from None
    if not text:
        raise DashboardError(f"{path}: holds no token")
    return Token(text, str(path))


def _read(path: Path) -> str:
    """The token of a file; empty if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, encoding="utf-8") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise DashboardError(
                f"{path}: others can read this token (mode {mode:o}); chmod 600 it, or remove it for a new one"
            )
        return file.read(4096).strip()


def _create(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = secrets.token_urlsafe(32)
    # complete before it has its name: another server that starts now reads all of it or makes its own attempt
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        try:
            os.link(temporary, path)
        except FileExistsError:
            return _read(path)
        return text
    finally:
        os.unlink(temporary)
