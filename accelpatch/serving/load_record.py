"""What a load showed: times to first token and a token, throughput, failures; as data, a table and a picture."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelpatch.serving.load import Answer, Load

TIMES = {"first_token": "to the first token", "per_token": "a token after it", "request": "a request"}


def record(load: Load, answers: Sequence[Answer]) -> dict[str, Any]:
    """Plain data, ready for JSON. Seconds; rates are of the time from the first request to the last answer."""
    good = [one for one in answers if one.failure is None]
    seconds = max((one.ended for one in answers), default=0.0) - min((one.sent for one in answers), default=0.0)
    times = {
        "first_token": [one.first for one in good if one.first is not None],
        "per_token": [one.per_token for one in good if one.per_token is not None],
        "request": [one.ended - one.sent for one in good],
    }
    tokens = sum(one.tokens for one in good)
    return {
        "url": load.url, "model": load.model, "users": load.users, "rate": load.rate,
        "requests": len(answers), "answered": len(good),
        "failures": dict(Counter(one.failure for one in answers if one.failure is not None)),
        "prompt_tokens": sum(one.prompt_tokens for one in good), "tokens": tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "requests_per_second": len(good) / seconds if seconds else None,
        "times": {name: {"values": values} | quantiles(values) for name, values in times.items()},
    }  # fmt: skip


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 95th and 99th percentile; None each where there is nothing, and the one value where there is one."""
    if len(values) < 2:
        only = values[0] if values else None
        return {"median": only, "p95": only, "p99": only}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"median": statistics.median(values), "p95": cuts[94], "p99": cuts[98]}


def facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows that the command prints."""
    arrivals = "each user sends when answered" if record["rate"] is None else f"{record['rate']:g} requests a second"
    rows = [
        ("server", f"{record['url']}, model {record['model']}"),
        ("load", f"{record['requests']} requests by {record['users']} users; {arrivals}"),
        ("answered", f"{record['answered']} in {record['seconds']:.2f} s; failed {sum(record['failures'].values())}"),
    ]
    rows += [("failed", f"{count} times: {reason}") for reason, count in record["failures"].items()]
    if record["answered"]:
        rows.append(("throughput", f"{record['tokens_per_second']:.1f} tokens/s, "
                                   f"{record['requests_per_second']:.2f} requests/s"))  # fmt: skip
    for name, words in TIMES.items():
        found = record["times"][name]
        if found["median"] is not None:
            milliseconds = ", ".join(f"{label} {1000 * found[label]:.1f}" for label in ("median", "p95", "p99"))
            rows.append((words, f"{milliseconds} ms"))
    return rows


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw how many requests had which times into an image file; its suffix is the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (name, words) in zip(figure.subplots(1, len(TIMES)), TIMES.items(), strict=True):
        values = [1000 * one for one in record["times"][name]["values"]]
        axes.ecdf(values or [0.0], color="#d1495b", linewidth=2)
        axes.set(xlabel=f"ms {words}", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        if name == "first_token":
            axes.set_ylabel("part of the requests")
    rate = record["tokens_per_second"] or 0.0
    figure.suptitle(
        f"{Path(record['model']).name}: {record['users']} users, {record['requests']} requests, {rate:.1f} tokens/s",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
