"""Find held-out text in training documents, by sequences of 13 words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pretrain.data.words import document_hash, sequence_hashes

__all__ = ["HeldOut", "document_hash", "sequence_hashes"]


class HeldOut:
    """The 13-word sequences of the held-out documents, and which of them training holds."""

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> HeldOut:
        """Take the sequences of the held-out documents."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write the held-out sequences to a file."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path) -> HeldOut:
        """Read what `save` wrote."""
        raise NotImplementedError

    def is_leaked(self, text: str) -> bool:
        """Return whether a training document holds a held-out document, or is mostly part of one."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        """Take note of the held-out sequences in a document that training keeps."""
        raise NotImplementedError

    def save_seen(self, path: Path) -> None:
        """Write which held-out sequences `note` has found."""
        raise NotImplementedError

    def merge_seen(self, path: Path) -> None:
        """Add what another process's `save_seen` wrote."""
        raise NotImplementedError

    @property
    def leakage(self) -> float:
        """Return the share of the held-out sequences that `note` or `merge_seen` has found."""
        raise NotImplementedError
