"""Another program as ``__main__`` of this process, next to python itself; without the command, and so without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import environment

DRIVER = """
import sys
from accelpatch.cli import script
as_module = sys.argv[1] == "-m"
script.run(sys.argv[2:] if as_module else sys.argv[1:], as_module=as_module)
"""


def _run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _driven(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return _run("-c", DRIVER, *arguments, folder=folder)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("import sys; sys.exit(3)", id="status"),
        pytest.param("import sys; print('out'); sys.exit('a message')", id="message"),
        pytest.param("raise SystemExit", id="bare exit"),
        pytest.param("def f():\n    raise ValueError('wrong')\nf()", id="exception"),
        pytest.param("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('b') from e", id="chain"),
        pytest.param("import json\njson.loads('{')", id="exception in a library"),
        pytest.param("x = (1,", id="syntax error"),
        pytest.param("raise BrokenPipeError('mine')", id="broken pipe"),
        pytest.param("raise MemoryError('mine')", id="out of memory"),
        pytest.param("import sys\nsys.excepthook = lambda *e: print('hook', e[0].__name__)\n1 / 0", id="excepthook"),
        pytest.param("import atexit\natexit.register(lambda: print('bye', __name__))", id="atexit"),
        pytest.param("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", id="pickle"),
        pytest.param("raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])", id="group"),
    ],
)
def test_ends_as_python_ends_it(tmp_path: Path, body: str) -> None:
    (tmp_path / "script.py").write_text(body)
    expected = _run("script.py", folder=tmp_path)
    found = _driven("script.py", folder=tmp_path)
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, expected.stderr, expected.returncode)


def test_an_exception_in_a_module(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f():\n    raise ValueError('wrong')\nf()\n")
    found = _driven("-m", "broken", folder=tmp_path)
    assert found.returncode == 1
    lines = found.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'File "{tmp_path / "broken.py"}", line 3, in <module>' in lines[1]
    assert lines[-1] == "ValueError: wrong"
    assert "accelpatch" not in found.stderr
    assert "runpy" not in found.stderr


def test_interrupt(tmp_path: Path) -> None:
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    (tmp_path / "script.py").write_text(text)
    found = _driven("script.py", folder=tmp_path)
    assert found.returncode == 130
    assert found.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "accelpatch" not in found.stderr
    assert f'File "{tmp_path / "script.py"}", line' in found.stderr
