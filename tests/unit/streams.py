"""Streams of known tokens for tests: token t of a stream is the number t."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pretrain.data.stream import TokenStream
from tests.unit.splits import write_split


def make_stream(root: Path, corpora: Mapping[str, int]) -> TokenStream:
    """Write and open a stream of some corpora.

    Args:
        root: Directory of the data set.
        corpora: Name -> tokens.
    """
    ends = np.cumsum([*corpora.values()])
    write_split(
        root,
        {
            name: [[np.arange(end - tokens, end)]]
            for (name, tokens), end in zip(corpora.items(), ends, strict=True)
        },
    )
    return TokenStream(root / "train")
