"""Clean documents, find duplicates and leaked held-out text, and choose the held-out documents."""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from pretrain.config.schema import CleaningSection
from pretrain.data.sources import optional

# ---- Hash texts, and the sequences of words in them, the same way on every machine ----
# Cleaning compares documents by sequences of words: 5-word sequences find near duplicates, 13-word
# sequences find held-out text in training. Words are compared in lower case and without
# punctuation, because editions of a text differ most in these. A word is a maximal run of
# characters that are neither white space, nor ASCII other than letters and digits, nor typographic
# punctuation (quotes, dashes).


Hashes = npt.NDArray[np.uint64]

CHUNK = 1 << 20
"""Characters that are split into words at a time, so that the words of a text of gigabytes are
never all in memory."""

FACTOR = 0x9E3779B97F4A7C15
"""Odd number whose powers are factors of consecutive words' hashes, so that word order counts."""

_SPACE = re.compile(r"\s")
_SEPARATOR = re.compile(
    "[\\s\xa1\xab\xb7\xbb\xbf\u200b\u2010-\u2027\u2030-\u2060\u3001-\u3003\ufeff]"
)
_ASCII = bytes(c if c >= 128 or chr(c).isalnum() else ord(" ") for c in range(256))


def document_hash(text: str) -> int:
    """Return the XXH3-64 of a text's UTF-8.

    A lone surrogate, which JSON can hold, is hashed as the three bytes of its code point.
    """
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


W = TypeVar("W", str, bytes)
V = TypeVar("V")
MAX_WORDS, MAX_WORD_LENGTH = 1 << 18, 64


class WordCache(dict[W, V]):
    """Maps words to what a function returns for them, which is computed when first asked for."""

    def __init__(self, compute: Callable[[W], V]) -> None:
        """Begin with an empty cache, which is emptied again when it has MAX_WORDS words."""
        self._compute: Callable[[W], V] = compute

    def __missing__(self, word: W) -> V:
        value = self._compute(word)
        # Longer words are not kept: they are rare, and would need unbounded memory.
        if len(word) <= MAX_WORD_LENGTH:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = value
        return value


_known: WordCache[bytes, int] = WordCache(xxhash.xxh3_64_intdigest)


def word_hashes(text: str) -> Hashes:
    """Return the 64-bit hash of each word of a text, in order."""
    parts = [
        np.fromiter(map(_known.__getitem__, words), np.uint64, len(words))
        for words in map(_words, chunks(text))
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint64), *parts])


def _words(text: str) -> list[bytes]:
    text = text.lower()
    if not text.isascii():
        text = _SEPARATOR.sub(" ", text)
    # ASCII separators become spaces in one pass over the bytes, five times as fast as with re.
    return text.encode("utf-8", "surrogatepass").translate(_ASCII).split()


def chunks(text: str) -> Iterator[str]:
    """Cut a text at white space into pieces of about CHUNK characters; a word is never cut."""
    return (text[start:end] for start, end in ranges(text, _SPACE, CHUNK))


def ranges(text: str, last: re.Pattern[str], characters: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of parts of a text of `characters` or more that end with a match."""
    start = 0
    while start < len(text):
        found = last.search(text, start + characters)
        end = found.end() if found else len(text)
        yield start, end
        start = end


def sequence_hashes(text: str, length: int) -> Hashes:
    """Return the hash of each run of `length` words of a text, in order.

    A text of fewer words counts as one sequence of all its words; a text without words has none.
    Two different sequences have equal hashes with a probability of about 2^-60.
    """
    hashes = word_hashes(text)
    length = min(length, len(hashes))
    if not length:
        return hashes
    # Sums over n words are built from sums over n/2 words: 13 takes 5 additions instead of 12.
    total = np.zeros(len(hashes) - length + 1, np.uint64)
    power, width, done = hashes, 1, 0
    while True:
        if length & width:
            total += power[done : done + len(total)] * _factor(done)
            done += width
        if width * 2 > length:
            return total
        power = power[:-width] + power[width:] * _factor(width)
        width *= 2


def _factor(exponent: int) -> np.uint64:
    return np.uint64(pow(FACTOR, exponent, 1 << 64))


# ---- Clean documents one at a time, before they are hashed, compared and tokenized ----


# CR, vertical tab, form feed and NEL end a line; removing them would join two words.
_LINE_BREAK = re.compile("\r\n|[\r\v\f\x85]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Cleaner:
    """Apply the steps of [cleaning] that look at one document, in this order:

    1. `repair_unicode`: ftfy undoes wrong decoding (mojibake), line by line, and changes nothing
       else: it keeps quotes, ligatures, HTML entities and normal forms;
    2. `remove_control_characters`: CR LF, CR, vertical tab, form feed and NEL become a newline;
       other control characters (Unicode category Cc) except tab and newline are removed;
    3. `min_document_characters`: a document that is now shorter is left out.

    A document that no step changes is returned as the same object.
    """

    counts: Counter[str]
    """Counts for each step. STEP.documents: documents that the step changed or left out.
    STEP.characters: characters of repaired documents, removed or replaced control characters, or
    characters of documents that were left out."""

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
        # ASCII is never mojibake, so most English documents cost nothing here.
        if text.isascii():
            return text
        ftfy = optional("ftfy", "cleaning.repair_unicode")
        nothing_else = ftfy.TextFixerConfig(
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
        repaired = str(ftfy.fix_text(text, nothing_else))
        if repaired == text:
            return text
        self._count("repair_unicode", len(text))
        return repaired

    def _remove_control_characters(self, text: str) -> str:
        text, breaks = _LINE_BREAK.subn("\n", text)
        text, removed = _CONTROL.subn("", text)
        self._count("remove_control_characters", breaks + removed)
        return text

    def _count(self, step: str, characters: int) -> None:
        self.counts[f"{step}.documents"] += 1
        self.counts[f"{step}.characters"] += characters


# ---- Find documents that repeat an earlier one in the stream, exactly or nearly ----
# The scan computes a few 64-bit keys for each document (`duplicate_keys`) and writes the sorted
# keys of a task to a file (`save_keys`). Equal keys have equal first bits, so the keys of all tasks
# are compared bucket by bucket (`repeated_in_bucket`), independently, on any machine, and without
# any text. `join_repeated` combines the results of the buckets.


Mode = Literal["exact", "near"]

SHINGLE_WORDS = 5
"""Length in words of the sequences that near duplicates share."""

BANDS, ROWS = 10, 12
"""A document has BANDS * ROWS MinHash values. Each is equal in two documents with the probability
J, the Jaccard similarity of their sets of sequences, and one band of ROWS equal values makes them
near duplicates: with the probability 1 - (1 - J ** ROWS) ** BANDS.

|  J |  0.5 |  0.6 | 0.7 | 0.75 | 0.8 | 0.85 | 0.9 | 0.95  |
|----|------|------|-----|------|-----|------|-----|-------|
|    | 0.2% | 2.2% | 13% |  28% | 51% |  78% | 96% | 99.96%|
"""

SEED = 1


def duplicate_keys(text: str, mode: Mode) -> Hashes:
    """Return the keys of a document. Documents that share a key in the same column are duplicates.

    The keys are the same in every process and on every machine. The first is the document's hash.
    For near duplicates BANDS further keys follow, from MinHash (rensa) over the 5-word sequences,
    which ignore case, punctuation and white space. A document of fewer words counts as one
    sequence, and a document without words is never a near duplicate.

    Args:
        text: The cleaned document.
        mode: [cleaning] deduplicate.

    Returns:
        uint64[1] for "exact", uint64[1 + BANDS] for "near".
    """
    exact = document_hash(text)
    if mode == "exact":
        return np.array([exact], np.uint64)
    sequences = sequence_hashes(text, SHINGLE_WORDS)
    if not len(sequences):
        return np.full(1 + BANDS, exact, np.uint64)
    hasher = optional("rensa", 'cleaning.deduplicate = "near"').RMinHash
    document = np.array([0, len(sequences)], np.uint64)
    minima = hasher.digest_matrix_from_flat_token_hashes(sequences, document, BANDS * ROWS, SEED)
    bands = np.array(minima.to_rows()[0], "<u4").reshape(BANDS, ROWS)
    return np.array([exact, *(xxhash.xxh3_64_intdigest(b.tobytes()) for b in bands)], np.uint64)


COMPARED_BYTES = 1_000_000_000
"""Largest memory for comparing a bucket. More keys give more buckets, not larger ones."""

_KEY_BYTES, _FOUND_BYTES, _SORTED_BYTES = 12, 8, 80
"""Bytes of a key: in a file and in memory; additionally if it is repeated; and additionally while
its column is sorted."""


def _columns(mode: Mode) -> int:
    return 1 if mode == "exact" else 1 + BANDS


def save_keys(path: Path, keys: Sequence[Hashes], mode: Mode) -> None:
    """Write the keys of a task's documents for `repeated_in_bucket`.

    The keys of all columns are sorted together, so that a bucket is a contiguous part of the file.
    Each key has an entry: document * columns + column.

    Args:
        path: File to write, uint32[3, documents * columns]: the keys, of two uint32 each, fill the
            first two rows, and their entries the third.
        keys: The result of `duplicate_keys` for each document, in stream order. May be empty.
        mode: The mode with which the keys were made.
    """
    flat = np.array(keys, "<u8").reshape(len(keys) * _columns(mode))
    order = np.argsort(flat, kind="stable")
    halves = flat[order].view("<u4").reshape(2, -1)
    np.concatenate([halves, order.astype("<u4")[None]]).tofile(path)


class Part(NamedTuple):
    """A range of a file."""

    path: Path
    start: int
    size: int
    """In bytes."""


def _load_keys(part: Part) -> tuple[Hashes, npt.NDArray[np.uint32]]:
    """Map the sorted keys of a task and their entries."""
    if not part.size:
        return np.empty(0, "<u8"), np.empty(0, "<u4")
    table = np.memmap(part.path, "<u4", "r", part.start, (3, part.size // _KEY_BYTES))
    return table[:2].reshape(-1).view("<u8"), table[2]


def count_buckets(parts: Sequence[Part], mode: Mode) -> int:
    """Return the number of buckets for the keys of all tasks, from their sizes.

    Args:
        parts: The files that `save_keys` wrote.
        mode: The mode with which the keys were made.
    """
    columns = _columns(mode)
    documents = sum(part.size for part in parts) / (_KEY_BYTES * columns)
    most = (_KEY_BYTES + _FOUND_BYTES) * columns + _SORTED_BYTES
    return math.ceil(documents * most / COMPARED_BYTES)


def repeated_in_bucket(
    files: Sequence[Part], mode: Mode, bucket: int, buckets: int
) -> npt.NDArray[np.uint64]:
    """Return the documents that share a key in this bucket with an earlier document.

    Earlier means earlier in the stream, over all given tasks, so the result does not depend on the
    borders of tasks. The first document of a chain of duplicates stays, and every later one is
    removed, even if it resembles only documents that are removed.

    Memory: 190 to 300 bytes for each document of the corpus, the most if all are duplicates (50 to
    100 for "exact"), divided by the number of buckets. Equal keys are in one bucket, so a text that
    occurs k times in the corpus adds k keys to it. Texts are not compared, so different documents
    can share a key by chance: among 300 million documents this happens with a probability of about
    0.2 % for each column.

    Args:
        files: The files that `save_keys` wrote, in stream order, all of one mode.
        mode: The mode with which the keys were made.
        bucket: Index of the bucket, below `buckets`.
        buckets: Number of equal ranges into which the keys are cut.

    Returns:
        Positions in the stream; a document that shares several keys occurs several times.
    """
    columns, start, parts = _columns(mode), np.uint64(0), []
    low, end = ((place << 64) // buckets for place in (bucket, bucket + 1))
    # Open one file at a time, because a corpus may have more tasks than a process open files.
    for file in files:
        keys, entries = _load_keys(file)
        first = int(np.searchsorted(keys, np.uint64(low)))
        last = int(np.searchsorted(keys, np.uint64(end - 1), "right"))
        if first < last:
            parts.append((start, np.array(keys[first:last]), np.array(entries[first:last])))
        start += np.uint64(len(entries) // columns)
    found = [np.empty(0, np.uint64)]
    # Sort one column at a time, to limit memory.
    for column in range(columns if parts else 0):
        masks = [entries % columns == column for _, _, entries in parts]
        keys = np.concatenate([keys[own] for (_, keys, _), own in zip(parts, masks)])
        documents = [
            first + (entries[own] // columns).astype(np.uint64)
            for (first, _, entries), own in zip(parts, masks)
        ]
        # A stable sort puts equal keys beside each other in stream order: all but the first repeat.
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        found.append(np.concatenate(documents)[order[1:][keys[1:] == keys[:-1]]])
    parts.clear()
    return np.concatenate(found)


def join_repeated(
    files: Sequence[Part], mode: Mode, found: Iterable[npt.NDArray[np.uint64]]
) -> list[npt.NDArray[np.bool_]]:
    """Return, for each document of each task, whether an earlier document shares a key.

    Memory: a byte for each document of the corpus.

    Args:
        files: The files that `save_keys` wrote, in stream order, all of one mode.
        mode: The mode with which the keys were made.
        found: The result of `repeated_in_bucket` for each bucket.

    Returns:
        bool[documents] of each file.
    """
    ends = np.cumsum([file.size // (_KEY_BYTES * _columns(mode)) for file in files])
    repeated = np.zeros(int(ends[-1]), np.bool_)
    for documents in found:
        repeated[documents] = True
    return np.split(repeated, ends[:-1])


# ---- Choose the documents that are held out for validation, by their hashes ----
# The rule, for each corpus: order its different texts by hash, with texts of more than `max_bytes`
# after all others. Hold out texts from the front, at least one, up to `fraction` times the number
# of documents, as long as they have at most `max_bytes` together. The last text is never held out,
# so that at least one is left for training: a corpus of a single text holds out none.
#
# A text is therefore on the same side whatever the order of the files, the number of tasks and how
# often the text occurs, and the choice is spread evenly over the corpus, because hashes are.


_LARGE = 1 << 64
"""Added to the hash of a text of more than max_bytes, to sort it after all others."""


class Candidates:
    """Collect the documents of one task, or of all tasks, that could be held out.

    `choose_held_out` takes texts of at most `max_bytes` from the front of the order. Whatever the
    other tasks hold, its share of this task is therefore at the front of the task's own order, and
    has at most `max_bytes`. Only this much text is kept in memory and written, or one document if
    the first one has more.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start without documents.

        Args:
            max_bytes: Largest number of UTF-8 bytes that the corpus may hold out, its part of
                data.validation_bytes; the same for all tasks of the corpus.
        """
        self.max_bytes, self.documents, self.last = max_bytes, 0, -1
        self.limit = 2 * _LARGE
        """Texts at this place in the order, or after it, are not kept."""
        self._kept: dict[int, bytes] = {}
        # Negated places of the kept texts, so that the last one is at the root of the heap.
        self._heap: list[int] = []
        self._bytes = 0

    def add(self, text: str) -> int:
        """Record a cleaned document and return its `document_hash`."""
        data = text.encode("utf-8", "surrogatepass")
        digest = xxhash.xxh3_64_intdigest(data)
        place = digest + (_LARGE if len(data) > self.max_bytes else 0)
        self.documents += 1
        self.last = max(self.last, place)
        self.keep(place, data)
        return digest

    def keep(self, place: int, data: bytes) -> None:
        """Keep a text if it fits, and drop texts at the end that no longer fit."""
        if place >= self.limit or place in self._kept:
            return
        self._kept[place] = data
        heapq.heappush(self._heap, -place)
        self._bytes += len(data)
        while self._bytes > self.max_bytes and len(self._heap) > 1:
            self.cut(-self._heap[0])

    def cut(self, limit: int) -> None:
        """Drop the texts at `limit` and after it, and accept none there from now on."""
        self.limit = min(self.limit, limit)
        while self._heap and -self._heap[0] >= self.limit:
            self._bytes -= len(self._kept.pop(-heapq.heappop(self._heap)))

    def kept(self) -> list[tuple[int, str]]:
        """Return (place, text) of the kept texts, in order."""
        return [
            (p, data.decode("utf-8", "surrogatepass")) for p, data in sorted(self._kept.items())
        ]

    def save(self, path: Path) -> None:
        """Write the candidates for `choose_held_out`: a summary as a line of JSON, and one each."""
        lines = [(self.max_bytes, self.documents, self.last, self.limit), *self.kept()]
        path.write_text("\n".join(map(json.dumps, lines)))


def choose_held_out(files: Iterable[Iterable[str | bytes]], fraction: float) -> dict[int, str]:
    """Choose the held-out texts of a corpus from the files that `Candidates.save` wrote.

    Args:
        files: The lines of one file of each task of the corpus. Their order does not matter.
        fraction: data.validation_fraction.

    Returns:
        Hash -> held-out text, in the order of the hashes. Every copy of these texts must be left
        out of training. Empty if the corpus does not have two different texts.
    """
    whole = Candidates(0)
    for lines in files:
        head, *texts = map(json.loads, lines)
        whole.max_bytes, documents, last, limit = head
        whole.documents, whole.last = whole.documents + documents, max(whole.last, last)
        whole.cut(limit)
        for place, text in texts:
            whole.keep(place, text.encode("utf-8", "surrogatepass"))
    # The last text is left for training.
    whole.cut(whole.last)
    chosen = whole.kept()[: max(1, int(fraction * whole.documents))]
    return {place % _LARGE: text for place, text in chosen}


LEAK_WORDS = 13


COMMON_TEXTS = 3
"""Number of texts of a sample in which a sequence must occur to be common in the corpus."""


class HeldOut:
    """The 13-word sequences of the held-out documents, and which of them occur in training.

    Words are compared in lower case and without punctuation. A document of fewer than 13 words is
    one sequence of all its words, so it matches only whole documents. Sequences are compared by
    64-bit hashes: by chance, a training sequence equals one of a million held-out sequences with a
    probability of about 2^-40, and a document matches only if half of its sequences do.

    A process needs about 30 bytes for each held-out sequence.
    """

    def __init__(self, sequences: Hashes, documents: npt.NDArray[np.uint32]) -> None:
        """Store (sequence, document) pairs. Call `from_texts` or `load` instead.

        Args:
            sequences: uint64[pairs], the hashes of sequences, ascending.
            documents: uint32[pairs], the number of the held-out document with that sequence.
        """
        self._pairs = sequences
        self._documents = documents
        self._sequences, self._first = np.unique(sequences, return_index=True)
        self._copies = np.diff(np.append(self._first, len(sequences)))
        self._sizes = np.bincount(documents)
        self._seen = np.zeros(len(self._sequences), np.bool_)
        # A table of flags rejects nearly every training sequence with a single look-up. It has 16
        # to 32 flags for each held-out sequence, and at most 2^28.
        bits = min(max(4 + len(self._sequences).bit_length(), 10), 28)
        self._shift = np.uint64(64 - bits)
        self._maybe = np.zeros(1 << bits, np.bool_)
        self._maybe[self._sequences >> self._shift] = True
        self._last: tuple[str, int, npt.NDArray[np.intp]] | None = None

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> HeldOut:
        """Return the sequences of the held-out documents, which are numbered in order."""
        each = [np.unique(sequence_hashes(text, LEAK_WORDS)) for text in texts]
        sequences = np.concatenate([np.empty(0, np.uint64), *each])
        documents = np.repeat(np.arange(len(each), dtype=np.uint32), [len(e) for e in each])
        order = np.argsort(sequences, kind="stable")
        return cls(sequences[order], documents[order])

    def save(self, path: Path) -> None:
        """Write the held-out sequences to a .npz file, without the results of `note`."""
        with path.open("wb") as file:
            np.savez(file, sequences=self._pairs, documents=self._documents)

    @classmethod
    def load(cls, path: Path) -> HeldOut:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls(file["sequences"], file["documents"])

    def common(self, sample: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Return which held-out documents are boilerplate, such as a license or a menu.

        Half of such a document occurs in COMMON_TEXTS or more texts of the sample. Holding it out
        would remove every training document with the same boilerplate.

        Args:
            sample: Texts of the corpus, or parts of them.
        """
        texts = np.zeros(len(self._sequences), np.int64)
        for text in sample:
            texts[self._shared(text)[1]] += 1
        is_common = texts[np.searchsorted(self._sequences, self._pairs)] >= COMMON_TEXTS
        found = np.bincount(self._documents, weights=is_common, minlength=len(self._sizes))
        return (self._sizes > 0) & (2 * found >= self._sizes)

    def is_leaked(self, text: str) -> bool:
        """Return whether a document must be left out of training.

        It must if it has at least half of the different sequences of some held-out document, or if
        at least half of its own different sequences are held out.
        """
        own, shared = self._shared(text)
        if not len(shared):
            return False
        if 2 * len(shared) >= own:
            return True
        return any(2 * n >= self._sizes[d] for d, n in self._by_document(shared).items())

    def note(self, text: str) -> None:
        """Record the held-out sequences in a document that training keeps."""
        self._seen[self._shared(text)[1]] = True

    def save_seen(self, path: Path) -> None:
        """Write which held-out sequences `note` has found, one bit for each."""
        path.write_bytes(np.packbits(self._seen).tobytes())

    def merge_seen(self, content: bytes) -> None:
        """Add the result of `save_seen` of a process that loaded the same held-out sequences."""
        bits = np.frombuffer(content, np.uint8)
        self._seen |= np.unpackbits(bits, count=len(self._seen)).astype(np.bool_)

    @property
    def sequences(self) -> int:
        """Return the number of different sequences in the held-out documents."""
        return len(self._sequences)

    @property
    def leakage(self) -> float:
        """Return the share of the held-out sequences that also occur in a noted document."""
        return float(self._seen.mean()) if len(self._seen) else 0.0

    def _shared(self, text: str) -> tuple[int, npt.NDArray[np.intp]]:
        """Return how many sequences a document has, and the indices of its held-out ones.

        Different sequences are counted; without held-out ones, all, because nobody needs the count.
        """
        # A document is usually checked and then noted, so keep the last result.
        if self._last is None or self._last[0] is not text:
            hashes = sequence_hashes(text, LEAK_WORDS)
            shared = np.unique(self._find(hashes))
            own = len(np.unique(hashes)) if len(shared) else len(hashes)
            self._last = text, own, shared
        return self._last[1:]

    def _find(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        """Return the indices in `self._sequences` of the hashes that are in it."""
        hashes = hashes[self._maybe[hashes >> self._shift]]
        if not len(hashes):
            return np.empty(0, np.intp)
        places = np.searchsorted(self._sequences, hashes)
        places = np.minimum(places, len(self._sequences) - 1)
        found: npt.NDArray[np.intp] = places[self._sequences[places] == hashes]
        return found

    def _by_document(self, shared: npt.NDArray[np.intp]) -> dict[int, int]:
        """Return held-out document -> how many of these sequences it has, if any."""
        first, copies = self._first[shared], self._copies[shared]
        # The pairs of one sequence stand together: first, first + 1, ..., first + copies - 1.
        starts = np.repeat(first - (np.cumsum(copies) - copies), copies)
        pairs = starts + np.arange(copies.sum())
        documents, counts = np.unique(self._documents[pairs], return_counts=True)
        return dict(zip(documents.tolist(), counts.tolist()))
