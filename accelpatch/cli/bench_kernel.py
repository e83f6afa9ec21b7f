"""``accelpatch bench kernel``: times a user's implementation of the linear operation against ours and torch's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption

NAME = "bench kernel"
_SHAPE = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
LINEAR = re.compile(r"_proj$|^fc[12]$|^head$|^linear$")


def bench_kernel(
    plugin: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, metavar="FILE", help="Python file, as for --plugin.")
    ],
    shapes: Annotated[
        str,
        typer.Option(metavar="MODEL|NxK,...", help="Weight shapes: a list, or a model or folder that has them."),
    ] = options.DEFAULT_MODEL,
    rows: Annotated[int, typer.Option(min=1, help="Rows of x.")] = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    json: JsonOption = False,
) -> None:
    """Time the implementations of linear layers that FILE adds, against accelpatch's and torch's. Each is checked
    first; the exit status is 1 if one is wrong."""
    listed = _listed(shapes)
    options.load_plugins([plugin])
    where = options.torch_device(device)
    import torch

    from accelpatch.bench import linear_kernels
    from accelpatch.bench.read_limit import read_limit

    if not linear_kernels.added_names():
        raise AccelpatchError(
            f"{plugin} adds no implementation of linear: decorate one with @accelpatch.implementation"
        )

    name = dtype if dtype != "auto" else "float32" if where.type == "cpu" else "bfloat16"
    limit, found = read_limit(where), list[linear_kernels.Timed]()
    for one in linear_kernels.timed(listed or _of_model(shapes), getattr(torch, name), where, rows, limit):
        if not found or (one.n, one.k) != (found[-1].n, found[-1].k):
            console.note(f"measuring {one.n} x {one.k}")
        found.append(one)
    if json:
        console.print_json([one.to_dict() for one in found])
    else:
        print(linear_kernels.text(found, limit))
    if any(one.wrong for one in found):
        raise typer.Exit(1)


def _listed(text: str) -> list[tuple[int, int]]:
    """The shapes (N, K) of a list such as 4096x11008,576x1536; none if the text is no such list."""
    found = [_SHAPE.fullmatch(part.strip()) for part in text.split(",")]
    return [(int(one[1]), int(one[2])) for one in found if one] if all(found) else []


def _of_model(name: str) -> list[tuple[int, int]]:
    """The distinct shapes (N, K) of a model's linear layers. Raises AccelpatchError if it has none."""
    from accelpatch import api

    sites = api.plan_from_config(name, {"rules": [{"match": {"name": "*"}, "replace": "keep"}]}).report().sites
    found = [site.shape for site in sites if LINEAR.search(site.role) and site.shape is not None]
    if not found:
        raise AccelpatchError(f"{name} has no linear layers: name another model, or shapes such as 4096x11008")
    return list(dict.fromkeys((n, k) for n, k in found))
