"""The cache folder: private, atomic, and right with many processes, killed ones among them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from accelpatch import cache
from accelpatch.errors import CacheError

FORK = multiprocessing.get_context("fork")
PARTS = 20


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_parts(folder: Path) -> None:
    for index in range(PARTS):
        (folder / f"part{index}").write_bytes(bytes([index]) * 1000)
        time.sleep(0.002)


def complete(entry: Path) -> bool:
    return all((entry / f"part{i}").read_bytes() == bytes([i]) * 1000 for i in range(PARTS))


def partials(root: Path) -> list[Path]:
    return list(root.glob("*/.partial*"))


def publish_and_count(counts: Path) -> None:
    def write(folder: Path) -> None:
        (counts / str(os.getpid())).touch()
        write_parts(folder)

    if not complete(cache.publish("models", "one", write)):
        os._exit(1)


@pytest.mark.smoke
def test_publish_then_entry(root: Path) -> None:
    assert cache.entry("models", "one") is None
    path = cache.publish("models", "one", write_parts)
    assert path == root / "models" / "one"
    assert cache.entry("models", "one") == path
    assert complete(path)
    assert partials(root) == []
    assert root.stat().st_mode & 0o777 == 0o700


def test_second_publish_does_not_write() -> None:
    cache.publish("models", "one", write_parts)
    assert complete(cache.publish("models", "one", lambda folder: pytest.fail("written twice")))


@pytest.mark.parametrize("locks", [True, False], ids=["locks_work", "locks_lie"])
def test_eight_processes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    if not locks:
        monkeypatch.setattr(cache.fcntl, "flock", lambda descriptor, operation: None)
    processes = [FORK.Process(target=publish_and_count, args=(counts,)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    writers = len(list(counts.iterdir()))
    assert writers == 1 if locks else 1 <= writers <= 8
    assert partials(root) == []


def test_unknown_locks_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    assert complete(cache.publish("models", "one", write_parts))


def test_killed_writers_leave_no_entry(root: Path) -> None:
    for index in range(10):
        writer = FORK.Process(target=cache.publish, args=("models", "one", write_parts))
        writer.start()
        deadline = time.monotonic() + 20
        while not any(path.glob("part*") for path in partials(root)) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.003 * index)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(20)
        found = cache.entry("models", "one")
        assert found is None or complete(found)
        assert len(partials(root)) <= 1, "each writer sweeps what the one before it left"
        cache.clear()
        assert partials(root) == []
    assert complete(cache.publish("models", "one", write_parts))


def test_next_writer_sweeps_a_dead_ones_leftover(root: Path) -> None:
    writer = FORK.Process(target=cache.publish, args=("models", "one", lambda folder: os.kill(os.getpid(), 9)))
    writer.start()
    writer.join(20)
    assert len(partials(root)) == 1
    cache.publish("models", "two", write_parts)
    assert partials(root) == []


def test_live_writer_is_not_swept(root: Path) -> None:
    def write(folder: Path) -> None:
        write_parts(folder)
        cache.clear()
        assert complete(folder)

    assert complete(cache.publish("models", "one", write))


def test_loser_of_the_rename_uses_the_winners(root: Path) -> None:
    def write(folder: Path) -> None:
        (root / "models" / "one").mkdir()
        (root / "models" / "one" / "winner").touch()
        (folder / "loser").touch()

    path = cache.publish("models", "one", write)
    assert [file.name for file in path.iterdir()] == ["winner"]
    assert partials(root) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=["disk_full", "quota", "read_only"])
def test_full_disk_leaves_nothing(root: Path, code: int) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(code, os.strerror(code))

    with pytest.raises(CacheError, match=r"cannot be written .* cache clear"):
        cache.publish("models", "one", write)
    assert cache.listing() == []
    assert partials(root) == []


def test_failing_writer_leaves_nothing(root: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.publish("models", "one", write)
    assert cache.entry("models", "one") is None
    assert partials(root) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=["all", "group", "others"])
def test_folder_writable_by_others_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(CacheError, match="writable by others: chmod go-w"):
        cache.root()


def test_link_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="is a link"):
        cache.root()


def test_linked_entry_is_not_an_entry(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (cache.root() / "models").mkdir()
    (root / "models" / "one").symlink_to(tmp_path / "elsewhere")
    assert cache.entry("models", "one") is None


def test_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(root, 12345, -1)
    else:  # only root can give a folder away: pretend to be someone else instead
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        cache.root()


def test_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match="cannot be made"):
        cache.root()


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\0b", "x" * 300], ids=repr)
def test_names_stay_inside(name: str) -> None:
    for kind, key in ((name, "one"), ("models", name)):
        with pytest.raises(CacheError, match="cannot name a cache entry"):
            cache.publish(kind, key, write_parts)


def test_listing_and_clear(root: Path) -> None:
    cache.publish("models", "one", write_parts)
    cache.publish("kernels", "two", write_parts)
    found = [(entry.kind, entry.key, entry.bytes) for entry in cache.listing()]
    assert found == [("kernels", "two", PARTS * 1000), ("models", "one", PARTS * 1000)]
    assert cache.clear("models") == PARTS * 1000
    assert [entry.key for entry in cache.listing()] == ["two"]
    assert cache.clear() == PARTS * 1000
    assert cache.listing() == []
    assert complete(cache.publish("models", "one", write_parts))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/accelpatch"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "{tmp}/home"}, "home/.cache/accelpatch"),
        ({"HOME": "{tmp}/home"}, "home/.cache/accelpatch"),
        ({"ACCELPATCH_CACHE": "{tmp}/own", "XDG_CACHE_HOME": "{tmp}/xdg"}, "own"),
    ],
    ids=["xdg", "relative_xdg", "home", "own"],
)
def test_where_the_root_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("ACCELPATCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert cache.root() == tmp_path / expected
