"""The page of a profile: whole, small, safe whatever a kernel is called, and shown by a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from accelpatch.profiling import page as pages
from accelpatch.profiling.summary import Summary, summary
from accelpatch.profiling.trace import Record

HOSTILE = "</title><script>document.title='owned'</script><img src=x onerror=alert(1)> & \"'"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "rect"}


def profiled(device: str = "cuda", kernels: int = 6, name: str = HOSTILE) -> Summary:
    """Of steps of two layers, which overlap a little."""
    records, at = [], 0.0
    for _ in range(6):
        for place in range(kernels):
            part = f"layer {place * 2 // kernels}"
            records.append(
                Record(f"{name} {place % 50}", at, at + 12, 10, 2, "7", part=part, operation=name, region=part)
            )
            at += 10
        records.append(Record("copy", at, at + 5, 5))
        at += 30
    return summary(records, 1e-4, device)


class Strict(HTMLParser):
    """Collects tags, and fails where they do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_names_are_text() -> None:
    made = pages.page(HOSTILE, HOSTILE, [(HOSTILE, profiled()), ("patched", profiled())])
    read = Strict()
    read.feed(made)
    assert read.open == []
    assert not {"script", "img", "iframe", "link", "object"} & set(read.tags)
    assert "<script" not in made
    assert not re.search(r"https?://", made)
    assert "default-src 'none'" in made


def test_size_with_as_many_kernels_as_an_eager_model_has() -> None:
    long = "void at::native::vectorized_elementwise_kernel<4, " + "x" * 3000
    made = pages.page("m", "s", [("original", profiled(kernels=4000, name=long)), ("patched", profiled(name=long))])
    assert len(made.encode()) < 2_000_000


def test_one_side_alone() -> None:
    made = pages.page("m", "s", [("patched", profiled("cpu"))])
    assert made.count("<svg") == 1
    assert "waited" not in made
    assert "waited" in pages.page("m", "s", [("patched", profiled("cuda"))])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    (tmp_path / "profile.html").write_text(
        pages.page(HOSTILE, "s", [("original", profiled()), ("patched", profiled())])
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    address = (tmp_path / "profile.html").as_uri()
    shot = tmp_path / "shot.png"
    assert BROWSER is not None
    subprocess.run([BROWSER, *options, f"--screenshot={shot}", address], check=True, capture_output=True, timeout=120)
    assert shot.read_bytes().startswith(b"\x89PNG")
    dumped = subprocess.run(
        [BROWSER, *options, "--dump-dom", address], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    (title,) = re.findall(r"<title>([^<]*)</title></?\w", dumped.partition("</head>")[0] + "<x") or [""]
    assert "owned&#39;" in title or "owned'" in title  # as text: the script did not run
    assert dumped.count("<rect") == 2 * 7
