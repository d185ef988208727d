"""Build a data set from files in a format of your own: here CSV, one document per row.

    python examples/data_source.py data build configs/demo.toml --set data.directory=runs/csv \\
        --set data.source=csv --set 'data.paths=["corpus/*.csv"]'

Start it in the clone. The script is `pretrain` with one more source; `pretrain train` reads the
shards like any others. To keep the source, put the class into a new file in
pretrain/data/sources/, where it is found.
"""

import csv
import io
from collections.abc import Iterator

from pretrain.__main__ import main
from pretrain.data.sources import (
    MAX_DOCUMENT_BYTES,
    Corpus,
    Damaged,
    Found,
    Piece,
    Source,
    open_piece,
    register,
)


@register
class Csv(Source):
    """Documents are the column `text_field` (by default "text") of files that have a header."""

    name = "csv"
    endings = (".csv",)
    text_field = "text"

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield each row's text under the row's number, or why it cannot be read."""
        # A stream: memory does not grow with the file. `.csv.gz` is read as well.
        csv.field_size_limit(MAX_DOCUMENT_BYTES)
        with io.TextIOWrapper(open_piece(piece), encoding="utf-8-sig", newline="") as file:
            number = 0
            try:
                for row in csv.DictReader(file):
                    text = row.get(self.field(corpus))
                    fault = "" if text else f'no text in the column "{self.field(corpus)}"'
                    yield Found(number, text or "", fault)
                    number += 1
            except (UnicodeDecodeError, csv.Error) as error:
                # The build names the file and the row, and skips the rest of the file or ends.
                raise Damaged(number, str(error)) from None


if __name__ == "__main__":
    main()
