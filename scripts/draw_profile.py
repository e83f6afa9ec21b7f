"""Makes docs/profile.png and docs/roofline.png by `accelpatch profile` and a browser (chromium): one run on this CPU.

python scripts/draw_profile.py [--page FILE]     a page that was made before, instead of a new one
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = "1240,980"  # the figures, the steps and the first layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, metavar="FILE", help="A page that was made before, instead of a new one.")
    page = parser.parse_args().page
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"needs a browser: {', '.join(BROWSERS)}")
    accelpatch = [sys.executable, "-m", "accelpatch", "profile"]
    with tempfile.TemporaryDirectory() as folder:
        if page is None:
            subprocess.run([*accelpatch, "trace", "--compare", "--out", folder], check=True)
            page = Path(folder) / "profile.html"
        shot = [f"--screenshot={DOCS / 'profile.png'}", f"--window-size={SIZE}", page.resolve().as_uri()]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        subprocess.run([browser, *options, *shot], check=True, capture_output=True)
    subprocess.run([*accelpatch, "roofline", "--plot", str(DOCS / "roofline.png")], check=True)


if __name__ == "__main__":
    main()
