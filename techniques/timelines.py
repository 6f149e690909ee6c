"""Draw when each rank of a pipeline computes what (schedules.py): as text, or as a picture."""

import itertools
from html import escape

from techniques.schedules import Timeline, end_of


def draw_text(timeline: Timeline) -> str:
    """Return a line for each rank, with a column for each tick."""
    last_stage = max(span.action.stage for span in itertools.chain(*timeline))
    rows = []
    for spans in timeline:
        cells = ["."] * int(end_of(timeline))
        for action, start, end in spans:
            name = f"{action.kind}{action.microbatch}"
            if last_stage >= len(timeline):  # ranks have several stages
                name = str(action)
            cells[int(start) : int(end)] = [name] * int(end - start)
        rows.append(cells)
    width = max(map(len, itertools.chain(*rows)))
    lines = []
    for rank, cells in enumerate(rows):
        padded = [cell.ljust(width) for cell in cells]
        lines.append(" ".join([f"rank {rank}", *padded]).rstrip())
    return "\n".join(lines)


FILLS = {"F": "#4c8dd6", "B": "#dd8435", "W": "#46a568"}


def draw_svg(timeline: Timeline, title: str) -> str:
    """Return a picture: forwards blue, backwards orange, W green, and nothing where ranks wait."""
    width, row = 900, 26
    left, right, top, bottom = 60, 10, 34, 8  # margins
    scale = (width - left - right) / end_of(timeline)
    height = top + row * len(timeline) + bottom
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        "<style>text { fill: #1f2328 } @media (prefers-color-scheme: dark) "
        "{ text { fill: #e6edf3 } } .inside { fill: #ffffff }</style>",
        f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for rank, spans in enumerate(timeline):
        y = top + row * rank
        parts.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
        for action, start, end in spans:
            x = left + start * scale
            w = (end - start) * scale
            # Later stages of a rank are paler.
            opacity = 1 / (1 + 0.4 * (action.stage // len(timeline)))
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(w - 1, 0.5):.1f}" height="{row - 4}" '
                f'fill="{FILLS[action.kind]}" fill-opacity="{opacity:.2f}"/>'
            )
            if w > max(14, 7 * len(str(action.microbatch))):
                parts.append(
                    f'<text class="inside" x="{x + w / 2:.1f}" y="{y + 16}" '
                    f'text-anchor="middle">{action.microbatch}</text>'
                )
    return "\n".join([*parts, "</svg>"]) + "\n"
