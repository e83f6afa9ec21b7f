"""One HTML page that compares two profiles, of the original and of the patched model: no script, no other file, nothing
fetched.

Every name comes from a trace and is escaped: a kernel may be called anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from accelpatch.profiling.recorder import LAYER
from accelpatch.profiling.summary import Row, Summary
from accelpatch.profiling.trace import Record

MOST_ROWS, MOST_BARS = 40, 2500
NAME = 96  # characters of a kernel's name in a table; all of it is in the title
COLOURS = ("#2a6f97", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#5c677d", "#bc6c25", "#468faf", "#9a031e", "#5f0f40")
REST = "#b8bfc6"
WIDTH, LINE = 1160, 26
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1180px;color:#1f2933;padding:0 12px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 8px}p{margin:4px 0 10px;color:#52606d}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:3px 8px;text-align:right;border-bottom:1px solid #e4e7eb;white-space:nowrap}
th:first-child,td:first-child{text-align:left;overflow:hidden;text-overflow:ellipsis;max-width:420px}
th{color:#52606d;font-weight:600}.pair{display:grid;grid-template-columns:1fr 1fr;gap:28px}
.bar{display:inline-block;height:9px;border-radius:2px;background:#2a6f97;vertical-align:middle}
.bar.first{background:#9aa5b1}.bar.second{background:#d1495b}
svg{width:100%;height:auto;background:#f5f7fa}.key span{margin-right:14px}.key i{display:inline-block;width:10px;
height:10px;margin-right:4px;border-radius:2px}
"""


def page(title: str, setting: str, sides: Sequence[tuple[str, Summary]]) -> str:
    """The HTML of one or two profiles. title: the model. setting: one line on how it was recorded. sides: (name, of the
    profile), the original first."""
    colours = _colours([summary for _, summary in sides])
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(setting)}</p>", _facts(sides), "<h2>One step</h2>",
        "<p>Time runs to the right, on one scale for both. Point at a bar for its name, layer and time; what is empty "
        "are gaps, in which nothing ran.</p>",
        _timelines(sides, colours), "<h2>By layer</h2>", _layers(sides), "<h2>By operation</h2>",
        _pair(sides, "by_operation"), "<h2>By kernel</h2>", _pair(sides, "by_kernel"),
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>{escape(title)}: profile</title><style>{STYLE}</style>'
    guard = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    return f'<!doctype html><html lang="en"><head>{guard}{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(sides: Sequence[tuple[str, Summary]]) -> str:
    gpu = sides[0][1].device != "cpu"
    rows = [
        ("time of a step, not recorded", [f"{one.unprofiled:,.0f} us" for _, one in sides]),
        ("while recorded", [f"{one.recorded:,.0f} us ({one.cost:+.1%})" for _, one in sides]),
        ("kernels ran" if gpu else "operations ran", [f"{one.busy:,.0f} us" for _, one in sides]),
        ("gaps, in which none ran", [f"{one.gaps:,.0f} us ({one.gaps / one.recorded:.1%})" for _, one in sides]),
        *([("kernels waited for the one before", [f"{one.waited:,.0f} us" for _, one in sides])] if gpu else []),
        (_launches_of(gpu), [f"{one.launches:,.0f}" for _, one in sides]),
        ("kernels a token" if gpu else "operations a token", [f"{one.kernels:,.0f}" for _, one in sides]),
        *([("with the name of a layer or operation", [f"{one.named:.1%}" for _, one in sides])] if gpu else []),
    ]  # fmt: skip
    return _table(["", *(name for name, _ in sides)], [[escape(name), *cells] for name, cells in rows])


def _launches_of(gpu: bool) -> str:
    return "launches a token (a graph is one)" if gpu else "calls a token"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; heads are text."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _name(text: str) -> str:
    short = text if len(text) <= NAME else f"{text[: NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
    return f'<span title="{escape(text[:2000])}">{escape(short)}</span>'


def _pair(sides: Sequence[tuple[str, Summary]], what: str) -> str:
    made = "".join(f"<div><b>{escape(name)}</b>{_rows(getattr(one, what), one.device)}</div>" for name, one in sides)
    return f'<div class="pair">{made}</div>'


def _rows(rows: Sequence[Row], device: str) -> str:
    shown, rest = rows[:MOST_ROWS], rows[MOST_ROWS:]
    most = max((row.share for row in rows), default=1.0) or 1.0
    waited = device != "cpu"
    cells = [
        [_name(row.name), f"{row.count:,.1f}".removesuffix(".0"), f"{row.microseconds:,.1f}",
         *([f"{row.waited:,.1f}"] if waited else []),
         f'{row.share:.1%} <span class="bar" style="width:{60 * row.share / most:.0f}px"></span>']
        for row in shown
    ]  # fmt: skip
    if rest:
        total, share = sum(row.microseconds for row in rest), sum(row.share for row in rest)
        cells.append(
            [f"{len(rest)} others", "", f"{total:,.1f}", *([""] if waited else []), f"{share:.1%}"]
        )  # fmt: skip
    return _table(["name", "a token", "us", *(["waited"] if waited else []), "of the step"], cells)


def _layers(sides: Sequence[tuple[str, Summary]]) -> str:
    """One row a layer, with a bar for each side on one scale."""
    known = [{row.name: row for row in one.by_layer} for _, one in sides]
    names = list(dict.fromkeys(name for one in known for name in one))
    names.sort(key=lambda name: int(found[1]) if (found := LAYER.match(name)) else 1 << 30)
    most = max((row.microseconds for one in known for row in one.values()), default=1.0) or 1.0
    rows = []
    for name in names:
        cells = [_name(name)]
        for place, one in enumerate(known):
            if name not in one:
                cells.append("")
                continue
            time = one[name].microseconds
            colour = "second" if place else "first"
            bar = f'<span class="bar {colour}" style="width:{220 * time / most:.0f}px"></span>'
            cells.append(f"{bar} {time:,.1f}")
        rows.append(cells)
    return _table(["layer", *(f"{name}, us" for name, _ in sides)], rows)


def _colours(summaries: Sequence[Summary]) -> dict[str, str]:
    """Colours of the operations, or kernels, that take most time."""
    times: dict[str, float] = {}
    for summary in summaries:
        for one in summary.one:
            times[_kind(one)] = times.get(_kind(one), 0.0) + one.own
    return dict(zip(sorted(times, key=lambda name: -times[name]), COLOURS, strict=False))


def _kind(record: Record) -> str:
    return (record.operation or record.name).split(" ")[0][:60]


def _timelines(sides: Sequence[tuple[str, Summary]], colours: dict[str, str]) -> str:
    spans = [one.one[-1].end - one.one[0].start for _, one in sides]
    scale, made = WIDTH / (max(spans) or 1.0), []
    for (name, summary), span in zip(sides, spans, strict=True):
        bars = "".join(_bars(summary.one, scale, colours))
        made.append(
            f'<p><b>{escape(name)}</b>, {span:,.0f} us</p><svg viewBox="0 0 {WIDTH} {LINE}" role="img">{bars}</svg>'
        )
    key = "".join(f'<span><i style="background:{colour}"></i>{escape(kind)}</span>' for kind, colour in colours.items())
    return "".join(made) + f'<p class="key">{key}<span><i style="background:{REST}"></i>others</span></p>'


def _bars(records: Sequence[Record], scale: float, colours: dict[str, str]) -> list[str]:
    """A rectangle for each record that has time of its own; the shortest are left out where there are too many."""
    shown = [one for one in records if one.own > 0]
    if len(shown) > MOST_BARS:
        least = sorted((one.own for one in shown), reverse=True)[MOST_BARS]
        shown = [one for one in shown if one.own > least]
    begin, bars = records[0].start, list[str]()
    for one in shown:
        at = (one.end - one.own if one.waited else one.start) - begin
        colour, width = colours.get(_kind(one), REST), max(0.3, one.own * scale)
        said = f"{escape(one.name[:160])}\n{escape(one.region)}\n{one.own:,.1f} us"
        bars.append(
            f'<rect x="{at * scale:.2f}" width="{width:.2f}" y="3" height="20" fill="{colour}">'
            f"<title>{said}</title></rect>"
        )
    return bars
