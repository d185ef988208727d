"""Make 193 MB of English text from Debian's documentation packages, the same bytes everywhere.

    python3 configs/debian_text/corpus.py corpora/debian

downloads the packages of packages.txt beside this file, which names each with its version and
SHA-256, with `apt-get download` into corpora/debian/packages, unless they are there, and writes
corpora/debian/train.jsonl and corpora/debian/heldout.jsonl. It runs on Debian 12 and needs no root
and nothing but Python's own library. All packages are of Debian's section main, so the text is
free: /usr/share/doc/PACKAGE/copyright in each states the license.

A document is a manual: all English pages of one folder of a package, in the order of their names,
without markup, scripts, and lines that stand on four of its pages. Dictionaries and
other long documents are cut into documents of about a million characters.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

MIN_CHARACTERS = 2_000
"""Of a document; shorter ones are left out."""
MAX_CHARACTERS = 1_000_000
"""Of a document; a longer one is cut behind the line that passes it."""
HELD_OUT = 12
"""Documents for validation: of those with LONG characters, the first by the hash of their names."""
LONG = 70_000, 200_000
"""About 18,000 to 60,000 tokens. The longest test length of the studies is 16,384."""
NOT_HELD_OUT = (
    *("dict-", "fortunes"),
    *("libreoffice-", "lilypond-", "maxima-", "mit-scheme-", "octave-", "rust-"),
    "racket-doc/usr/share/doc/racket/r5rs/",
)
"""Short entries, in which nothing before an entry helps to predict it, and manuals that have much
of their text in common with others."""
REPEATED = 4
"""A line of more than three characters on so many pages of a manual is navigation or a notice."""

DROPPED = re.compile(
    r"<(script|style|head|nav|svg|math|annotation)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I
)
BREAKS = re.compile(
    r"</?(p|div|br|li|ul|ol|dl|dt|dd|h[1-6]|tr|table|pre|section|hr|title)\b[^>]*>", re.I
)
TAGS = re.compile(r"<[^>]*>")
SPACES = re.compile(r"[ \t\r\f\v\u00a0]+")
LANGUAGES = (
    "ar|bg|ca|cs|da|de|el|es|eu|fa|fi|fr|gl|hr|hu|id|it|ja|ko|lt|lv|nb|nl|nn|pl|pt|pt_BR|pt-BR|ro|"
    "ru|sk|sl|sr|sv|ta|te|tr|uk|vi|zh|zh_CN|zh_TW|[a-z]{2}[-_][A-Z]{2}"
)
FOREIGN = re.compile(rf"[._/-]({LANGUAGES})(?<!en-US)(?=[./])")


def main(folder: Path) -> None:
    """Write both files into a folder."""
    found: list[tuple[str, str]] = []
    for line in (Path(__file__).parent / "packages.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            found += documents(folder / "packages", *line.split(maxsplit=3))
    long = [
        name
        for name, text in found
        # Of a manual that was cut, the first part is longer than this.
        if LONG[0] <= len(text) <= LONG[1] and name.endswith("/0")
        if not name.startswith(NOT_HELD_OUT)
    ]
    texts, held_out = dict(found), sorted(long, key=digest)[:HELD_OUT]
    training = sorted(texts.keys() - set(held_out))
    for file, names in ((folder / "train.jsonl", training), (folder / "heldout.jsonl", held_out)):
        rows = ({"name": name, "text": texts[name]} for name in names)
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        file.write_bytes(content)
        said = f"{len(names):,} documents, {len(content):,} bytes"
        print(f"{file}: {said}, SHA-256 {digest(content)}")


def documents(
    folder: Path, package: str, version: str, sha256: str, pages: str
) -> Iterator[tuple[str, str]]:
    """Yield name and text of every document of a package.

    Args:
        folder: Where the packages are.
        package: Its name.
        version: Its version.
        sha256: That of its file.
        pages: A regular expression: the names of its pages, from the package's root.
    """
    manuals: dict[str, list[tuple[str, list[str]]]] = {}
    for name, text in sorted(read(fetch(package, version, sha256, folder), re.compile(pages))):
        lines = [SPACES.sub(" ", line).strip() for line in text.splitlines()]
        manuals.setdefault(str(PurePath(name).parent), []).append((name, lines))
    for manual, content in sorted(manuals.items()):
        seen = Counter(line for _, lines in content for line in set(lines) if len(line) > 3)
        parts: list[str] = [""]
        for _, lines in content:
            kept = [line for line in lines if seen[line] < REPEATED]
            for line in re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip().splitlines(True):
                if len(parts[-1]) > MAX_CHARACTERS:
                    parts.append("")
                parts[-1] += line
            parts[-1] += "\n\n"
        for number, text in enumerate(parts):
            if len(text) >= MIN_CHARACTERS:
                yield f"{package}/{manual}/{number}", text.strip() + "\n"


def fetch(package: str, version: str, sha256: str, folder: Path) -> Path:
    """Return the file of a package, downloaded where it is missing, and checked."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (files := list(folder.glob(f"{package}_*.deb"))):
        if subprocess.run(["apt-get", "download", f"{package}={version}"], cwd=folder).returncode:
            sys.exit(
                f"apt-get cannot download {package} {version}. Run apt-get update and then this "
                f"again, or put the file from snapshot.debian.org into {folder.resolve()}"
            )
        files = list(folder.glob(f"{package}_*.deb"))
    if digest(files[0].read_bytes()) != sha256:
        sys.exit(
            f"{files[0]}: not {package} {version} with SHA-256 {sha256}. Remove the file, and "
            "run this on Debian 12, or fetch it from snapshot.debian.org"
        )
    return files[0]


def read(package: Path, pages: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the pages of a package that are English."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            name = member.name.removeprefix("./")
            page = archive.extractfile(member) if member.isfile() else None
            if page and pages.search(name) and not FOREIGN.search(name):
                content = page.read()
                if name.endswith((".gz", ".dz")):
                    content = gzip.decompress(content)
                text = content.decode("utf-8", "replace")
                yield name, plain(text) if "<html" in text[:2_000].lower() else text


def plain(page: str) -> str:
    """Return the text of an HTML page."""
    page = BREAKS.sub("\n", DROPPED.sub(" ", page))
    return html.unescape(TAGS.sub("", page))


def digest(content: str | bytes) -> str:
    """Return the SHA-256 of text in UTF-8 or of bytes."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 corpus.py FOLDER")
    main(Path(sys.argv[1]))
