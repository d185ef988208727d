"""Add to the site what lies outside docs/: the generated reference, and every file a page links to.

mkdocs calls these functions (mkdocs.yml, hooks). The pages in docs/ are written for readers of the
repository, so they link to files beside docs/ too. Each such file becomes a page of its own below
source/, so that the site is complete without a network and no link has to name a host.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "license.md": "LICENSE",
}
"""Page of the site -> the file of the repository that is its text."""
LINK = re.compile(r"(!?\[[^][]*\]\()([^()\s]+)(\))")
"""A Markdown link or image; the target is the second group."""
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml"}
MOST_BYTES = 200_000
"""Larger files are named on their page, and not shown."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of docs/, the reference, and the files that pages link to."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))
    from docs.hooks import reference

    texts = {
        file.src_uri: Path(file.abs_src_path).read_text()
        for file in files.documentation_pages()
        if file.abs_src_path
    }
    texts |= {page: (ROOT / path).read_text() for page, path in OUTSIDE.items()}
    texts["license.md"] = f"# License\n\n```text\n{texts['license.md']}```\n"
    texts |= {
        "reference/config.md": reference.config_page(),
        **{f"reference/{name}.md": reference.file_page(name) for name in reference.FILES},
        **{f"reference/{name}.md": reference.commands_page(name) for name in reference.COMMANDS},
    }
    known = set(texts) | {file.src_uri for file in files}
    added: dict[str, str] = {}
    for page in list(texts):
        texts[page] = relinked(page, texts[page], known, added)
    for page, text in {**texts, **added}.items():
        if (old := files.get_file_from_path(page)) is not None:
            files.remove(old)
        files.append(File.generated(config, page, content=text))
    return files


def relinked(page: str, text: str, known: set[str], added: dict[str, str]) -> str:
    """Return a page's text with its links to the repository led to pages of the site.

    Args:
        page: The page, below docs/.
        text: Its text.
        known: The pages and files of the site.
        added: Pages of files of the repository, by name; grows.
    """

    def led(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        place = ((ROOT / OUTSIDE.get(page, f"docs/{page}")).parent / path).resolve()
        where = place.relative_to(ROOT).as_posix()
        to = _page_of(where, known)
        if to is None:
            to = f"source/{where}.md"
            added.setdefault(to, source_page(where))
        return f"{before}{_relative(to, page)}{mark}{anchor}{after}"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(led, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(led, text[end:])])


def source_page(where: str) -> str:
    """Return the page that shows a file of the repository, or lists a folder's files."""
    path = ROOT / where
    # Of the pages that search finds, none should be a source file's.
    front = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.is_dir():
        listed = subprocess.run(
            ["git", "ls-files", where], cwd=ROOT, capture_output=True, text=True
        ).stdout
        return f"{front}# {where}/\n\n```text\n{listed}```\n"
    text = path.read_text(errors="replace") if path.stat().st_size <= MOST_BYTES else "(large)\n"
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    language = LANGUAGES.get(path.suffix, "text")
    end = "" if text.endswith("\n") else "\n"
    return f"{front}# {where}\n\n{fence}{language}\n{text}{end}{fence}\n"


def _page_of(where: str, known: set[str]) -> str | None:
    """Return the page or file of the site that is a file of the repository; None without one."""
    for page, path in OUTSIDE.items():
        if path == where:
            return page
    inside = where.removeprefix("docs/")
    return inside if inside != where and inside in known else None


def _relative(to: str, page: str) -> str:
    """Return the link from a page to another."""
    up = "../" * (len(PurePosixPath(page).parts) - 1)
    return f"{up}{to}"
