"""transformers' own tests on patched models: how many pass, and why the others do not.

    python scripts/transformers_suite.py --checkout DIR [--families llama t5 ...] [--recipes exact flash int8]
        [--work DIR] [--json FILE]
    python scripts/transformers_suite.py --read FILE ...

DIR is a git checkout of transformers (no source distribution has the tests of its models). The installed transformers
is what is tested; a checkout of another version gets the common files of the installed version's source distribution.
Needs pytest, parameterized, pillow and timeout_decorator. Each family's tests run stock, then under
`accelpatch.patch_on_first_use` with each recipe, `verify=False` (verification would run every model some ten times
more). Slow tests, those that need a hub and those that compile are left out, and those that fail stock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from transformers_tests.folder import assemble, version_of
from transformers_tests.plugin import read
from transformers_tests.table import Row, row_of, rows_in, table

from accelpatch import cache

ROOT = Path(__file__).parents[1]
FAMILIES = ("llama", "gemma3", "mixtral", "t5", "bart", "whisper", "bert", "vit", "clip", "qwen2_5_vl")
RECIPES = ("exact", "flash", "int8")
# No network, no accelerator, one thread: a run repeats itself.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error",
    "DISABLE_SAFETENSORS_CONVERSION": "true", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
# Minutes each, or one of two that differ in the back end of torch's attention alone.
LEFT_OUT = "not compil and not overfit and not torch_dtype and not sdpa_kernels"
STARTS = 5  # of pytest, where its process ends in a test


def run(folder: Path, family: str, recipe: str, words: list[str], resume: bool) -> list[dict[str, Any]]:
    """Run a family's tests by a recipe ("" for none); what became of each."""
    records = folder.parent / f"{family}-{recipe or 'stock'}.jsonl"
    if not resume:
        records.unlink(missing_ok=True)
    tests = f"tests/models/{family}/test_modeling_{family}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "--tb=short", "--rootdir", str(folder)]
    command += ["-m", "not torch_compile_test", "-k", LEFT_OUT, "-p", "no:cacheprovider"]
    command += ["-p", "transformers_tests.plugin", "--records", str(records), "--patch-with", recipe, *words, tests]
    paths = os.pathsep.join(str(one) for one in (ROOT / "scripts", ROOT))
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": paths}
    for _ in range(STARTS):
        with (folder.parent / f"{family}-{recipe or 'stock'}.log").open("w") as log:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
        if done.returncode in (0, 1, 5):  # passed, some failed, none left
            return read(records)
        if done.returncode > 0:
            raise SystemExit(f"pytest did not run {tests}: see {log.name}")
    return read(records)


def rows_of(folder: Path, family: str, recipes: list[str], words: list[str], resume: bool) -> list[Row]:
    """A family's line for each recipe."""
    stock = [one["test"] for one in run(folder, family, "", words, resume) if one["outcome"] == "passed"]
    only = folder.parent / f"{family}-stock.txt"
    only.write_text("\n".join(stock))
    found = []
    for recipe in recipes:
        records = run(folder, family, recipe, [*words, "--only", str(only)], resume)
        found.append(row_of(family, recipe, len(stock), records))
        print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="A git checkout of transformers.")
    parser.add_argument("--read", type=Path, nargs="+", help="Run nothing; print what --json wrote, of several runs.")
    parser.add_argument("--families", nargs="+", default=FAMILIES, help="Folders of tests/models.")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="Recipes to patch with.")
    parser.add_argument("--work", type=Path, help="The folder to work in (default: one of accelpatch's cache).")
    parser.add_argument("--resume", action="store_true", help="Go on from the records of the former run in --work.")
    parser.add_argument(
        "--seconds", type=int, default=120, help="Longest time of a test, of the processor (default: %(default)s)."
    )
    parser.add_argument("--json", type=Path, help="A file for all that was found.")
    options = parser.parse_args()
    if options.read:
        print(table([row for file in options.read for row in rows_in(json.loads(file.read_text()))]))
        return
    if options.checkout is None:
        parser.error("name a --checkout, or files to --read")
    work = options.work or cache.root() / "transformers_tests" / "work"
    work.mkdir(parents=True, exist_ok=True)
    checkout = options.checkout.resolve()
    folder = assemble(checkout, work.resolve())
    words = ["--test-seconds", str(options.seconds)]
    words += ["--older-names", str(checkout / "src/transformers/testing_utils.py")]
    rows = [
        row for family in options.families for row in rows_of(folder, family, options.recipes, words, options.resume)
    ]
    versions = {"transformers": transformers.__version__, "tests": version_of(checkout), "torch": torch.__version__}
    if options.json:
        options.json.write_text(json.dumps({"versions": versions, "rows": [row.to_dict() for row in rows]}, indent=1))
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(table(rows))


if __name__ == "__main__":
    main()
