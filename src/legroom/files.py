"""Reading whole files, with errors for the user, replacing them in one step, locks, and where legroom keeps its own."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from legroom.errors import LegroomError


def expanded(path: str) -> Path:
    """The path with `~` or `~NAME` replaced by that home folder; unchanged for a user unknown here."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's raises for an unknown user


def read_text(path: Path | str, hint: str = "", most_bytes: int = 32 << 20) -> str:
    """The text of a file; LegroomError where it cannot be opened, is larger than `most_bytes` or not UTF-8."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise LegroomError(f"{path} cannot be read: {error.strerror}", hint) from error
    if len(raw) > most_bytes:
        raise LegroomError(f"{path} is larger than {most_bytes >> 20} MiB", hint)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise LegroomError(f"{path}, line {line}: not UTF-8 text", hint) from error


def replace_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a file in one step, even in a crash; an existing one keeps its mode and owner, a new one gets `mode`."""
    path = path.resolve()  # a symbolic link stays
    beside = path.with_name(f".{path.name}.legroom")  # one that a killed legroom left is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    present = path.stat() if path.exists() else None
    try:
        beside.unlink(missing_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if present else mode)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            if present is not None:
                with contextlib.suppress(PermissionError):  # the file of another user in a writable folder
                    os.fchown(handle, present.st_uid, present.st_gid)
                os.fchmod(handle, stat.S_IMODE(present.st_mode))
            file.write(text)
            file.flush()
            os.fsync(handle)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # a power failure keeps the rename too
    finally:
        os.close(folder)


def home() -> Path:
    """`$LEGROOM_HOME`, else `$XDG_DATA_HOME/legroom`, else `~/.local/share/legroom`."""
    given = os.environ.get("LEGROOM_HOME")
    if given:
        return expanded(given)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else user_folder() / ".local" / "share") / "legroom"


def user_folder() -> Path:
    """The user's home folder; `/` for a uid without a passwd entry, as in Docker."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def store_path() -> Path:
    """The path of the calibration file: figures of the user's own start-ups."""
    return home() / "calibration.json"


def cards_path() -> Path:
    """The path of the file with `legroom probe`'s measurements."""
    return home() / "cards.json"


def runs_folder(folder: Path | None = None) -> Path:
    """`runs` in `folder` (None: legroom's home), where every `legroom run` writes its state as `<port>.json`."""
    return (folder or home()) / "runs"


@contextlib.contextmanager
def single_process(
    path: Path, say: Callable[[str], None], what_is_kept_away: str, make_refusal: Callable[[str], LegroomError]
) -> Iterator[None]:
    """Context manager: holds the lock file at `path`, or raises `make_refusal(pid)` with the holder's pid. If there can
    be no lock, work goes on and `say` gets "nothing keeps `what_is_kept_away`" (such as "a second sidecar away")."""
    import fcntl  # which a browser has not

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        say(f"{path} cannot be made ({error.strerror}): nothing keeps {what_is_kept_away}")
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        except BlockingIOError:
            raise make_refusal(os.read(lock, 32).decode("ascii", "replace").strip()) from None
        except OSError as error:
            say(f"{path} cannot be held ({error.strerror}): nothing keeps {what_is_kept_away}")
        yield
    finally:
        os.close(lock)
