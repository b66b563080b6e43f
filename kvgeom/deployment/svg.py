"""The verdict, the last allocator page and the end of a row, as a picture."""

from __future__ import annotations

import textwrap
from xml.sax.saxutils import escape

from kvgeom.deployment.show import settings_line
from kvgeom.deployment.spec import TreePlan
from kvgeom.deployment.verdict import Span, spans, verdict

_WIDTH, _LEFT, _BAR, _LINE = 960, 170, 640, 46
_EXISTS, _MISSING = "#4c8f5a", "#c0392b"


def picture(installed: TreePlan, with_series: TreePlan) -> str:
    """An SVG document; the trees one below the other."""
    parts: list[str] = []
    y = 34
    for name, plan in (("as it is", installed), ("with the series", with_series)):
        y = _tree(parts, y, f"SGLang {plan.release} {name}", plan)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" '
        f'viewBox="0 0 {_WIDTH} {y}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="{_WIDTH}" height="{y}" fill="white"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _tree(parts: list[str], y: int, name: str, plan: TreePlan) -> int:
    found = verdict(plan)
    parts.append(_text(20, y, f"{name}: {found.word}", weight="bold", size=16))
    for line in textwrap.wrap(found.text, 130):
        y += 20
        parts.append(_text(20, y, line))
    if plan.geometry is not None:
        y += 20
        parts.append(_text(20, y, settings_line(plan)))
    y += 30
    for span in spans(plan):
        parts += _bar(y, span)
        y += _LINE
    return y + 20


def _bar(y: int, span: Span) -> list[str]:
    have = max(0, min(span.valid_to, span.end) - span.start) / (span.end - span.start)
    split = round(_BAR * have)
    if span.missing:
        split = min(split, _BAR - 2)
    note = f"{span.missing} missing" if span.missing else "all there"
    made = [_text(20, y + 14, span.name), _rect(_LEFT, y, split, _EXISTS)]
    if span.missing:
        made.append(_rect(_LEFT + split, y, _BAR - split, _MISSING))
    return [
        *made,
        _text(_LEFT, y + 34, str(span.start), size=11),
        _text(_LEFT + _BAR, y + 34, str(span.end), size=11, anchor="end"),
        _text(_LEFT + _BAR + 10, y + 14, note),
    ]


def _rect(x: int, y: int, width: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="20" fill="{colour}"/>'


def _text(
    x: int, y: int, text: str, *, size: int = 13, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
