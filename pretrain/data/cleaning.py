"""Clean documents one at a time, before they are hashed, compared and tokenized."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from pretrain.config.data_schema import CleaningSection

if TYPE_CHECKING:
    import ftfy

# CR, vertical tab, form feed and NEL end a line; taking them out would join two words.
_LINE_BREAK = re.compile("\r\n|[\r\v\f\x85]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Cleaner:
    """Apply the steps of [cleaning] that look at one document, in this order:

    1. `repair_unicode`: ftfy undoes wrong decoding (mojibake), line by line, and nothing else: it
       leaves quotes, ligatures, HTML entities and normal forms as they are;
    2. `remove_control_characters`: CR LF, CR, vertical tab, form feed and NEL become a newline;
       the other control characters (Unicode category Cc) but tab and newline are removed;
    3. `min_document_characters`: a document that is shorter by now is left out.

    A document that no step changes is returned as the same object.
    """

    counts: Counter[str]
    """By step: STEP.documents is how many documents the step changed or left out, STEP.characters
    the characters of those that were repaired, the control characters that were removed or
    replaced, and the characters of documents that were left out."""

    def __init__(self, section: CleaningSection) -> None:
        self._section = section
        self.counts = Counter()

    def clean(self, text: str) -> str | None:
        """Return the cleaned text, or None if the document is left out."""
        if self._section.repair_unicode:
            text = self._repair(text)
        if self._section.remove_control_characters and _CONTROL.search(text):
            text = self._remove_control_characters(text)
        if len(text) < self._section.min_document_characters:
            self._count("min_document_characters", len(text))
            return None
        return text

    def _repair(self, text: str) -> str:
        # ASCII is never mojibake, and most English documents are ASCII: this costs nothing there.
        if text.isascii():
            return text
        import ftfy

        repaired = ftfy.fix_text(text, _repair_config())
        if repaired == text:
            return text
        self._count("repair_unicode", len(text))
        return str(repaired)

    def _remove_control_characters(self, text: str) -> str:
        text, breaks = _LINE_BREAK.subn("\n", text)
        text, removed = _CONTROL.subn("", text)
        self._count("remove_control_characters", breaks + removed)
        return text

    def _count(self, step: str, characters: int) -> None:
        self.counts[f"{step}.documents"] += 1
        self.counts[f"{step}.characters"] += characters


def _repair_config() -> ftfy.TextFixerConfig:
    """Return ftfy's settings with everything off but the repair of encodings."""
    import ftfy

    return ftfy.TextFixerConfig(
        unescape_html=False,
        remove_terminal_escapes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        remove_control_chars=False,
        normalization=None,
        explain=False,
    )
