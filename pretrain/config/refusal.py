"""One reason why a run cannot work."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """One reason why a run cannot work: "KEY = VALUE: REASON. REMEDY"."""

    key: str
    """The key that the user would change, with its section."""
    value: object
    """Its value."""
    reason: str
    """What is wrong with the value; starts in lower case, without a full stop."""
    remedy: str
    """What to set instead; a sentence without its full stop."""

    def __str__(self) -> str:
        # As TOML spells it, so that a user finds it in the file.
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key} = {value}: {self.reason}. {self.remedy}"
