"""Each step of cleaning, its counts, and text that no step may change."""

import sys
import unicodedata

import pytest

from pretrain.config.schema import CleaningSection
from pretrain.data.clean import Cleaner


def cleaner(**keys: object) -> Cleaner:
    return Cleaner(CleaningSection(**keys))


CONTROLS = {chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) == "Cc"}


def test_short_documents_are_left_out_and_counted() -> None:
    ours = cleaner(min_document_characters=4)
    assert [ours.clean(text) for text in ("éé", "ééé", "éééé")] == [None, None, "éééé"]
    assert ours.counts == {
        "min_document_characters.documents": 2,
        "min_document_characters.characters": 5,
    }


def test_control_characters_are_those_that_unicode_names() -> None:
    """Every character of Unicode: only category Cc changes, and of that neither tab nor newline."""
    for start in range(0, sys.maxunicode + 1, 4096):
        text = "".join(map(chr, range(start, start + 4096)))
        kept = "".join(c for c in text if c not in CONTROLS or c in "\n\t")
        # The breaks that become newlines stand among the first 256 characters.
        cleaned = cleaner(remove_control_characters=True).clean(text)
        assert cleaned is not None
        breaks = "\n" * sum(text.count(c) for c in "\r\v\f\x85")
        assert sorted(cleaned) == sorted(kept + breaks)


@pytest.mark.parametrize(
    ("text", "expected", "characters"),
    [
        ("one\r\ntwo\r\n", "one\ntwo\n", 2),
        ("one\rtwo", "one\ntwo", 1),
        ("one\n\rtwo", "one\n\ntwo", 1),
        ("page\fpage\vline\x85line", "page\npage\nline\nline", 3),
        ("a\x00\x01b\x7fc\x9bd\te\n", "abcd\te\n", 4),
        ("\r\r\n\n", "\n\n\n", 2),
    ],
)
def test_lines_stay_apart(text: str, expected: str, characters: int) -> None:
    ours = cleaner(remove_control_characters=True)
    assert ours.clean(text) == expected
    assert ours.counts == {
        "remove_control_characters.documents": 1,
        "remove_control_characters.characters": characters,
    }


def test_repair_undoes_a_wrong_decoding() -> None:
    """The oracle makes the damage: UTF-8 that was read as Windows-1252."""
    good = "The café’s “menu” — déjà vu\nplain line\n"
    bad = good.encode().decode("windows-1252", "replace")
    ours = cleaner(repair_unicode=True)
    assert "\ufffd" in bad  # a byte that Windows-1252 lacks is lost for good
    bad = good.replace("”", "“").encode().decode("windows-1252")
    assert ours.clean(bad) == good.replace("”", "“")
    assert ours.counts == {"repair_unicode.documents": 1, "repair_unicode.characters": len(bad)}


@pytest.mark.parametrize(
    "text", ["ﬁne “quotes” ＡＢＣ", "e\u0301 &amp; &lt;b&gt;", "x\x00y\r\nz\u2028é", "\x1b[31mé"]
)
def test_repair_changes_nothing_else(text: str) -> None:
    ours = cleaner(repair_unicode=True)
    assert ours.clean(text) is text
    assert ours.counts == {}
