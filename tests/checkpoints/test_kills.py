"""A save that is killed, runs out of space or meets another leaves the old folder or the new one."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

import accelpatch.api
from accelpatch.checkpoints import replaced_folder, save
from accelpatch.errors import SaveError
from tests.support.checkpoints import digests, logits, opened
from tests.support.packed import plain

POINTS = 200
WRITES = {"open", "os.rename", "os.link", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree",
          "tempfile.mkdtemp", "fcntl.flock"}  # fmt: skip


class Steps:
    """Calls `at` before each step of a save that changes a file: what Python audits, writes, fsync, the exchange."""

    def __init__(self, at: Callable[[int], None]):
        self.count, self._at = 0, at

    def step(self, *_: Any) -> None:
        self.count += 1
        self._at(self.count)

    def audit(self, event: str, arguments: Any) -> None:
        if event in WRITES and (event != "open" or self._writes(arguments)):
            self.step()

    @staticmethod
    def _writes(arguments: Any) -> bool:
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    def watch(self) -> None:
        """For the rest of this process."""
        from accelpatch.checkpoints import writing

        sys.addaudithook(self.audit)
        os.fsync = self._before(os.fsync)
        replaced_folder._exchanged = self._before(replaced_folder._exchanged)
        writing.Shard._write = self._before(writing.Shard._write)  # type: ignore[method-assign]
        stock = writing.bytes_of

        def halves(tensor: Any) -> Any:
            self.step()
            return stock(tensor)

        writing.bytes_of = halves  # type: ignore[assignment]

    def _before(self, stock: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.step()
            found = stock(*arguments)
            self.step()
            return found

        return call


def _forked(act: Callable[[], Any]) -> int:
    """The exit status of a child that acts; of one that was killed, the signal's number below zero."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except SaveError:
            status = 3
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Two models that differ, patched."""
    one, other = plain("llama"), plain("llama")
    with torch.no_grad():
        other.model.norm.weight.fill_(2.0)
    return accelpatch.patch(one, "int4", verify=False), accelpatch.patch(other, "int8", verify=False)


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")


@pytest.fixture(scope="module")
def versions(models: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Digests of the folder of each model, over the same other file."""
    found = []
    for place, model in enumerate(models):
        folder = tmp_path_factory.mktemp("version") / str(place)
        folder.mkdir()
        (folder / "README.md").write_text("mine")
        _save(model, folder)
        found.append(digests(folder))
    return found


@pytest.fixture
def old(models: Any, tmp_path: Path) -> Path:
    """A folder with the first model."""
    (tmp_path / "patched").mkdir()
    (tmp_path / "patched" / "README.md").write_text("mine")
    _save(models[0], tmp_path / "patched")
    return tmp_path / "patched"


def _steps_of_a_save(model: Any, folder: Path) -> int:
    """How many there are."""
    read, write = os.pipe()

    def act() -> None:
        steps = Steps(lambda _: None)
        steps.watch()
        _save(model, folder)
        os.write(write, str(steps.count).encode())

    assert _forked(act) == 0
    os.close(write)
    with os.fdopen(read) as file:
        return int(file.read())


def _killed_at(model: Any, folder: Path, step: int) -> None:
    def act() -> None:
        Steps(lambda at: os.kill(os.getpid(), signal.SIGKILL) if at == step else None).watch()
        _save(model, folder)

    assert _forked(act) == -signal.SIGKILL


@pytest.mark.parametrize(
    "points", [pytest.param(20, id="20"), pytest.param(POINTS, id=str(POINTS), marks=pytest.mark.nightly)]
)
def test_a_kill_at_any_write(old: Path, models: Any, versions: Any, tmp_path: Path, points: int) -> None:
    shutil.copytree(old, counted := tmp_path / "counted")
    steps = _steps_of_a_save(models[1], counted)
    assert steps > 60
    assert digests(counted) == versions[1]
    seen = []
    for point in range(points):
        _killed_at(models[1], old, 1 + point * (steps - 1) // (points - 1) if points < steps else 1 + point % steps)
        seen.append(versions.index(digests(old)))
        if seen[-1] == 1:
            _save(models[0], old)
    assert {0, 1} == set(seen)
    assert torch.equal(logits(opened(old)), logits(models[0]))
    _save(models[1], old)
    assert digests(old) == versions[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counted", "patched"]  # nothing is left behind


def test_a_kill_of_the_first_save(models: Any, versions: Any, tmp_path: Path) -> None:
    """There is no folder, or the whole one."""
    steps = _steps_of_a_save(models[0], tmp_path / "counted")
    for step in (1, steps // 2, steps - 8):
        _killed_at(models[0], tmp_path / "patched", step)
        assert not (tmp_path / "patched").exists()
    _save(models[0], tmp_path / "patched")
    assert digests(tmp_path / "patched").items() >= {**versions[0], "README.md": None}.items() - {("README.md", None)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counted", "patched"]


def test_without_the_exchange(old: Path, models: Any, versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that cannot exchange folders."""
    monkeypatch.setattr(replaced_folder, "_exchanged", lambda made, target: False)
    _save(models[1], old)
    assert digests(old) == versions[1]
    assert [path.name for path in old.parent.iterdir()] == ["patched"]


def test_a_kill_between_the_two_renames_loses_nothing(old: Path, versions: Any) -> None:
    old.rename(old.with_name(f"{replaced_folder._prefix(old)}killed{replaced_folder.ASIDE}"))
    with pytest.raises(ZeroDivisionError), replaced_folder.replaced_folder(old, lambda name: True):
        raise ZeroDivisionError
    assert digests(old) == versions[0]


@pytest.mark.parametrize("size", [0, 100, 10_000, 24_000], ids=lambda size: f"{size} bytes")
def test_a_full_disk(old: Path, models: Any, versions: Any, size: int) -> None:
    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        _save(models[1], old)

    assert (_forked(act), digests(old)) == (3, versions[0])
    assert [path.name for path in old.parent.iterdir()] == ["patched"]


def test_the_error_of_a_full_disk(old: Path, models: Any, versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match=r"patched cannot be written \(No space left .*\), and is as it was: free some"):
        _save(models[1], old)
    assert digests(old) == versions[0]


def test_two_writers(old: Path, models: Any, versions: Any) -> None:
    """The second is refused while the first writes, and changes nothing of it."""
    context = get_context("fork")
    begun, end = context.Event(), context.Event()

    def slow(model: Any, folder: Path) -> None:
        stock = save.write_weights

        def waiting(*arguments: Any) -> None:
            begun.set()
            end.wait(20)
            stock(*arguments)

        save.write_weights = waiting
        _save(model, folder)

    first = context.Process(target=slow, args=(models[1], old))
    first.start()
    assert begun.wait(20)
    with pytest.raises(SaveError, match=r"another process is saving into .*patched: wait for it"):
        _save(models[0], old)
    end.set()
    first.join()
    assert first.exitcode == 0
    assert digests(old) == versions[1]
    assert [path.name for path in old.parent.iterdir()] == ["patched"]


def test_many_writers(old: Path, models: Any, versions: Any) -> None:
    """Without waiting for each other: those that are not refused leave a whole folder."""
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            status = 1
            try:
                until = time.monotonic() + 0.5
                while time.monotonic() < until:
                    with contextlib.suppress(SaveError):
                        _save(models[1], old)
                        status = 0
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert 0 in statuses
    assert digests(old) == versions[1]
    assert [path.name for path in old.parent.iterdir()] == ["patched"]


def _quantising(floats: Path, out: Path, after: float) -> int:
    """The exit status of a child that quantises over `out` and is killed some time after it began."""

    def act() -> None:
        tqdm.set_lock(threading.RLock())  # its own is shared by processes: a killed child would hold it for ever
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, after)
        accelpatch.api.quantize(str(floats), "int8", out, overwrite=True, max_shard_size="20KB")

    return _forked(act)


def test_a_kill_at_any_time_of_quantize(floats: Path, tmp_path: Path) -> None:
    """The model that was there, or the new one, and what else was there; what is half done serves the next run."""
    out = tmp_path / "out"
    accelpatch.api.quantize(str(floats), "int8", tmp_path / "due", max_shard_size="20KB")
    accelpatch.api.quantize(str(floats), "int4", out)
    (out / "README.md").write_text("mine")
    copy, start = shutil.copytree(out, tmp_path / "copy"), time.monotonic()
    assert _quantising(floats, copy, 600) == 0
    whole = time.monotonic() - start
    versions = [digests(out), digests(tmp_path / "due") | {"README.md": digests(out)["README.md"]}]
    killed = 0
    for point in range(8):
        killed += _quantising(floats, out, whole * (point + 0.5) / 8) == -signal.SIGKILL
        assert digests(out) in versions
    assert killed >= 3
    accelpatch.api.quantize(str(floats), "int8", out, overwrite=True, max_shard_size="20KB")
    assert digests(out) == versions[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "due", "floats", "out"]
