"""Child processes for tests: spawned interpreters under the test's command, and what /proc says of them."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Ends a hung test with a message of its own; no test relies on how long anything really takes.
PATIENCE = 60.0
SHM = Path("/dev/shm")


def path_of(engine_id: str) -> Path:
    return SHM / f"vllm_ec_{engine_id}.mmap"


# For a child: what the package logs is kept in `records`, as (level, text).
LOGGED = """
import logging
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.levelname, record.getMessage()))
logging.getLogger("ec_shared_region").addHandler(Keep())
logging.getLogger("ec_shared_region").setLevel(logging.DEBUG)
"""


class ChildError(Exception):
    """A snippet raised in the child: the classes by name, the text, and what an OSError carries."""

    def __init__(
        self, classes: list[str], text: str, errno: int | None, filename: str | None, hint: str | None
    ) -> None:
        super().__init__(f"{classes[0]}: {text}")
        self.classes, self.text, self.errno, self.filename, self.hint = classes, text, errno, filename, hint


class ChildDied(Exception):
    """The child ended while the test waited for an answer."""


class Child:
    """One spawned interpreter. `run` sends a snippet and waits; `start` and `result` do it in two steps."""

    def __init__(
        self,
        region: str | None = "ours",
        *,
        shm: dict[str, Any] | None = None,
        enter: list[tuple[int, bool]] | None = None,
        uid: int | None = None,
        refuse: list[dict[str, Any]] | None = None,
        imports: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        command_reader, self._commands = os.pipe()
        self._answers, answer_writer = os.pipe()
        options = {
            "region": region,
            "shm": shm,
            "enter": enter or [],
            "uid": uid,
            "refuse": refuse or [],
            "imports": imports,
            "answers": answer_writer,
            "commands": command_reader,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), json.dumps(options)],
            pass_fds=(command_reader, answer_writer),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        os.close(command_reader)
        os.close(answer_writer)
        self._pending = b""
        self._owed = 1  # the answer that says that the child is ready
        self._stderr = self._stdout = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> Child:
        while self._owed:
            self._receive(PATIENCE)
        return self

    def start(self, code: str, **names: Any) -> None:
        self.ready()
        self._send(code, names)
        self._owed += 1

    def result(self, timeout: float = PATIENCE) -> Any:
        assert self._owed == 1, "nothing was started"
        return self._receive(timeout)

    def run(self, code: str, timeout: float = PATIENCE, **names: Any) -> Any:
        self.start(code, **names)
        return self.result(timeout)

    def answered(self, timeout: float = 0.0) -> bool:
        """Whether the started snippet has answered yet (or the child has died)."""
        return b"\n" in self._pending or bool(select.select([self._answers], [], [], timeout)[0])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken everything down."""
        self.process.kill()
        self.wait()

    def finish(self) -> int:
        """Lets the script run to its end, as an interpreter that exits normally, and gives the exit status."""
        self.ready()
        self._send(None, {})
        return self.wait()

    def wait(self, timeout: float = PATIENCE) -> int:
        self._stdout, self._stderr = self.process.communicate(timeout=timeout)
        for descriptor in (self._commands, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._commands = self._answers = -1
        return self.process.returncode

    @property
    def stderr(self) -> str:
        return self._stderr.decode()

    @property
    def stdout(self) -> str:
        return self._stdout.decode()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        if self._commands >= 0:
            self.process.kill()
            self.wait()

    def _send(self, code: str | None, names: dict[str, Any]) -> None:
        os.write(self._commands, json.dumps({"code": code, "names": repr(names)}).encode() + b"\n")

    def _receive(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"no answer from child {self.pid} within {timeout} s")
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                status = self.wait()
                raise ChildDied(f"child ended with {status}: {self.stderr}")
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        self._owed -= 1
        answer = ast.literal_eval(line.decode())
        if "refused" in answer:
            pytest.skip(f"not permitted here: {answer['refused']}")
        if "error" in answer:
            raise ChildError(**answer["error"])
        return answer["value"]


class SmallShm:
    """A /dev/shm of its own, in a mount namespace that lives as long as one anchor process."""

    def __init__(self, options: str | None, read_only: bool = False) -> None:
        self._with_user = os.geteuid() != 0
        self.anchor = Child(None, shm={"options": options, "read_only": read_only})
        self._children: list[Child] = []

    def spawn(self, region: str | None = "ours", **options: Any) -> Child:
        self.anchor.ready()
        child = Child(region, enter=[(self.anchor.pid, self._with_user)], **options)
        self._children.append(child)
        return child

    def free_bytes(self) -> int:
        return self.anchor.run("s = os.statvfs('/dev/shm'); s.f_bavail * s.f_frsize")

    def names(self) -> list[str]:
        return self.anchor.run("sorted(os.listdir('/dev/shm'))")

    def close(self) -> None:
        for child in [*self._children, self.anchor]:
            child.close()


def error_of(child: Child, code: str, timeout: float = PATIENCE, **names: Any) -> ChildError:
    """The error that the snippet raises in the child; a test fails where it raises none."""
    with pytest.raises(ChildError) as caught:
        child.run(code, timeout, **names)
    return caught.value


def is_mapped(address: int, pid: int | str = "self") -> bool:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def shm_mappings() -> list[str]:
    """Mappings of files under /dev/shm in this process. A file published from O_TMPFILE has an odd name here."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if " /dev/shm/" in line]


def descriptors(pid: int | str = "self") -> dict[int, str]:
    table = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            table[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return table


def wait_until(condition: Any, what: str) -> None:
    """For states that nobody announces (a child has reached a wait inside one call): looks again and again."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.002)


def try_lock_exclusive(path: Path) -> bool:
    """Whether the file has no live holder, by the lock that regions hold (`flock`, shared)."""
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def address_of(exporter: Any) -> int:
    """Address of a writable buffer, without keeping it exported."""
    view = memoryview(exporter).cast("B")
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


__all__ = [
    "PATIENCE",
    "SHM",
    "Child",
    "ChildDied",
    "ChildError",
    "SmallShm",
    "address_of",
    "descriptors",
    "error_of",
    "is_mapped",
    "path_of",
    "shm_mappings",
    "signal",
    "try_lock_exclusive",
    "wait_until",
]
