"""Turn a report in Markdown into one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping

from markdown_it import MarkdownIt

KINDS = {".svg": "image/svg+xml", ".csv": "text/csv", ".json": "application/json"}
"""Ending of a file that a page holds -> its media type."""
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }
h1, h2, h3 { line-height: 1.25; margin-top: 2rem; }
h3 { font-size: 1rem; font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
p, li { overflow-wrap: break-word; }
figure { margin: 1rem 0; overflow-x: auto; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 0.85rem; }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 0.6rem; vertical-align: top; }
th { text-align: left; border-bottom: 2px solid #555; }
pre { background: #f4f4f4; padding: 0.75rem; overflow-x: auto; font-size: 0.85rem; }
@media screen and (max-width: 40rem) {
  body { margin: 1rem auto; }
  th, td { padding: 0.2rem 0.35rem; }
  td:last-child { min-width: 9rem; }
  figure img { max-width: none; min-width: 45rem; }
}
@page { margin: 14mm 12mm; }
@media print {
  body { max-width: none; margin: 0; padding: 0; font-size: 10pt; }
  table { display: table; width: 100%; font-size: 7pt; }
  th, td { padding: 0.15rem 0.25rem; }
  td a { overflow-wrap: anywhere; }
  tr, figure { break-inside: avoid; }
  h1, h2, h3 { break-after: avoid; }
  pre { white-space: pre-wrap; }
}
"""


def to_page(title: str, markdown: str, files: Mapping[str, bytes]) -> str:
    """Return a page with a report's text, and with the files that it shows or links inside.

    What the text holds as HTML is shown as it is written, not run.

    Args:
        title: The page's title.
        markdown: The report.
        files: Path as in the report -> content. A figure that is shown as PNG is put in as SVG.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = parser.render(markdown)
    # The anchors that links in the Markdown name, as GitHub makes them.
    body = re.sub(r"<h3>(\w+)</h3>", lambda m: f'<h3 id="{m[1].lower()}">{m[1]}</h3>', body)
    body = re.sub(
        r'(?<=<img src=")([^"]+)\.png(?=")', lambda m: _inside(m[1] + ".svg", files), body
    )
    # A figure scrolls by itself where the page is narrower than its words can be read at.
    body = re.sub(r"<p>(<img [^>]*>)</p>", r"<figure>\1</figure>", body)
    body = re.sub(r"(?<=<td>|<th>)[^\n]*(?=</t[dh]>)", _breakable, body)
    body = re.sub(r'(?<=right">)[^\n]*(?=</t[dh]>)', _breakable, body)
    # The figure itself is that SVG, so a link to it says nothing new.
    body = re.sub(r'<a href="[^"]+\.svg">SVG</a>, ', "", body)
    body = re.sub(
        r'<a href="([^":#]+)">',
        lambda m: f'<a download="{m[1].rpartition("/")[2]}" href="{_inside(m[1], files)}">',
        body,
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def _breakable(cell: re.Match[str]) -> str:
    """Return a table's cell whose long names may break after each part, and lengths may not.

    Args:
        cell: The cell's content as HTML.
    """

    def parts(match: re.Match[str]) -> str:
        # A number such as 0.868 is no name of parts.
        return re.sub(r"([_.])(?=\w)", r"\1<wbr>", match[0]) if "_" in match[0] else match[0]

    # What stands in a tag, as the target of a link, is left alone.
    words = re.sub(r"(?<![\w#/])\w[\w.]*(?![^<]*>)", parts, cell[0])
    return re.sub(r"(?<=\d) L\b", "&nbsp;L", re.sub(r"\bL = (?=\d)", "L&nbsp;=&nbsp;", words))


def _inside(path: str, files: Mapping[str, bytes]) -> str:
    """Return a file as a URL that holds its content; the path itself where there is no such file.

    Args:
        path: Path as in the report, escaped for HTML.
        files: Path -> content.
    """
    content = files.get(html.unescape(path))
    if content is None:
        return path
    kind = KINDS[path[path.rindex(".") :]]
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def plain(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>#&])", r"\\\1", " ".join(text.split()))


def as_code(text: str, language: str = "") -> str:
    """Return a block of code that nothing in the text can end.

    Args:
        text: The code.
        language: Its language, for colours.
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
