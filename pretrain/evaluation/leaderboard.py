"""Keep a leaderboard: a directory of evaluations by several people, and one page that ranks them.

DIR/NAME.json is an entry: the records that one call of `pretrain evaluate --out` wrote about one
checkpoint, and the other keys of `Entry`. DIR/index.html is the page. It loads nothing from a
network, and shows whatever an entry says as text. DIR/verified/NAME.json is the mark that the
maintainer of the directory has evaluated that checkpoint again with the same results. A mark names
the SHA-256 of the entry, so that an entry cannot verify itself, and an entry that is edited later
is no longer verified. It holds the records of the entry with the losses that the maintainer found
(NUMBERS). The page ranks and shows those, so that no entry gains a rank from the tolerance of the
comparison. What it took, LongPPL and the commit in a record remain those of whoever made the entry.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jinja2
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrain.config import ConfigError, EvaluationRequest, RunFailed, writing
from pretrain.config.errors import first_problem
from pretrain.config.run import STREAM
from pretrain.evaluation import records as rec
from pretrain.evaluation.figures import draw, lines_by_length
from pretrain.evaluation.report import records_of, write_files
from pretrain.evaluation.windows import SLIDING
from pretrain.rundir.files import read_json, replace_file

VERIFIED = "verified"
"""Folder of the marks."""

# ---- Read and write entries ----
Words = Annotated[str, Field(max_length=500)]
# With ends, because a figure cannot show every number that a file can hold.
Count = Annotated[int, Field(gt=0, le=10**15)]
Nats = Annotated[float, Field(ge=-(10**15), le=10**15)] | None


class Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Measured(Checked, extra="allow"):
    """A record; `records.FIELDS` says what the keys mean. The code relies on the keys below."""

    __pydantic_extra__: dict[str, int | float | Words | None]
    method: Words
    checkpoint: Words
    protocol: Literal["nonoverlapping", "sliding", "stream"]
    length: Count
    stride: Count
    tokens: Count
    train_length: Count
    bytes: Count | None
    perplexity: float | None
    loss_nats: Nats
    loss_low: Nats
    loss_high: Nats
    bits_per_byte: Nats
    text: Words | None = None
    parameters: Count | None = None
    trained_tokens: Count | None = None
    training_flop: float | None = None
    blocks: dict[Literal["losses", "tokens"], list[Nats]] | None = None
    step: Annotated[int, Field(ge=0)]
    seed: int

    @model_validator(mode="after")
    def _fit(self) -> Measured:
        if missing := {*rec.FIELDS} - self.model_fields_set:
            raise ValueError(f"{min(missing)}: missing")
        blocks = self.blocks or {"losses": [], "tokens": []}
        is_odd = any(count is None or count < 0 for count in blocks.get("tokens", ()))
        if is_odd or len(blocks) < 2 or len(blocks["losses"]) != len(blocks["tokens"]):
            raise ValueError("blocks: needs losses and numbers of tokens, equally many")
        return self


class Entry(Checked):
    """The keys of an entry's file."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    authors: Words = ""
    link: Annotated[Words, Field(pattern=r"^(https?://\S+)?$")] = ""
    equal: Literal["tokens", "FLOP", "time"] | None = None
    """The quantity of which its training used as much as that of the entries it compares with."""
    records: Annotated[list[Measured], Field(min_length=1)]

    @model_validator(mode="after")
    def _fit(self) -> Entry:
        calls = {(r.checkpoint, r.tokens, r.protocol == STREAM) for r in self.records}
        strides = {r.stride for r in self.records if r.protocol == SLIDING}
        rows = {(r.protocol, r.length) for r in self.records}
        if len(calls) > 1 or len(strides) > 1 or len(rows) < len(self.records):
            raise ValueError(
                "records: of several checkpoints, texts or strides, or one row twice. Make an "
                "entry from what one call of `pretrain evaluate` has written about one checkpoint"
            )
        return self

    def request(self) -> EvaluationRequest:
        """Return the request that `pretrain evaluate` was given."""
        tokens = self.records[0].tokens
        names = tuple(dict.fromkeys(r.protocol for r in self.records))
        if names == (STREAM,):
            return EvaluationRequest(None, names, None, tokens)
        lengths = tuple(sorted({r.length for r in self.records}))
        stride = next((r.stride for r in self.records if r.protocol == SLIDING), None)
        return EvaluationRequest(lengths, names, stride, tokens)


def parse(content: bytes, path: Path) -> Entry:
    """Return the entry that a file holds. Raises ConfigError, which names the file and the key."""
    try:
        return Entry.model_validate_json(content)
    except ValueError as error:
        problem = first_problem(error).removeprefix("Value error, ")
        raise ConfigError(f"{path}: not an entry of a leaderboard: {problem}") from None


def read_entry(path: Path) -> tuple[Entry, list[dict[str, Any]], str]:
    """Return an entry, its records, and the SHA-256 of its file. Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return parse(content, path), rec.read_records(path), hashlib.sha256(content).hexdigest()


def add(directory: Path, curve: Path, **about: str | None) -> Path:
    """Write an entry, and return its path.

    Args:
        directory: The leaderboard; created if it is missing.
        curve: The file that `pretrain evaluate --out` wrote about one checkpoint.
        about: The other keys of `Entry`; None for keys that are not given.

    Raises:
        ConfigError: `curve` is another kind of file, or there is already an entry of that name.
    """
    path = directory / f"{re.sub(r'[^a-z0-9]+', '-', str(about['name']).lower()).strip('-')}.json"
    if path.exists() or path.stem.startswith("."):
        raise ConfigError(f"--name {about['name']}: {path} cannot be a new file. Choose another")
    records = records_of(curve)
    # Rows that training wrote may stand beside those of the call; they name no code.
    rows = [record for record in records if record.get("code")] or records
    # Losses by position are not shown.
    kept = ({key: r[key] for key in r if key != rec.POSITIONS} for r in rows)
    content = _json({key: value for key, value in about.items() if value is not None}, kept)
    parse(content, curve)
    with writing(path):
        write_files(directory, {path.name: content})
    return path


def _json(about: Mapping[str, Any], records: Iterable[rec.Record]) -> bytes:
    """Return a JSON object with the keys of `about`, and "records" with a line for each."""
    return json.dumps(about)[:-1].encode() + b", " + rec.records_json(records)[1:]


# ---- Rank ----
class Row(NamedTuple):
    """One evaluation of an entry."""

    entry: Entry
    file: str
    record: dict[str, Any]
    bits: rec.Value
    """Bits per byte, with the 95 % interval; nan where they are not known."""
    mark: Mapping[str, Any]
    """What `verify` wrote about this content; empty if the entry is not verified."""
    rank: int | None = None

    @property
    def group(self) -> dict[str, Any]:
        """Return the values that rows must share to be ranked together; text "" if unknown."""
        protocol, length = rec.protocol_name(self.record), self.record["length"]
        text, equal = self.record.get("text") or "", self.entry.equal or ""
        return {"text": text, "protocol": protocol, "equal": equal, "length": length}


def read_rows(directory: Path) -> list[Row]:
    """Return the evaluations of all entries with their ranks, the best of each group first.

    A rank is one more than the number of rows of the group that are better by more than rounding
    and the noise of the text, so that rows which the text cannot tell apart share a rank. A row
    without an interval has no rank.

    Raises:
        ConfigError: There is no entry, or a file is not an entry.
    """
    rows = []
    for path in sorted(directory.glob("*.json")):
        entry, records, digest = read_entry(path)
        verified = directory / VERIFIED / path.name
        mark = read_json(verified)
        # Earlier versions wrote marks without records, which verify no number.
        mark = mark if mark.get("entry") == digest and "records" in mark else {}
        records = rec.read_records(verified) if mark else records
        for record in records:
            [curve] = rec.make_curves([record])
            bits = curve.value(record["length"], rec.BITS_PER_BYTE)
            rows.append(Row(entry, path.name, record, bits, mark))
    if not rows:
        raise ConfigError(f"{directory}: holds no entry. `pretrain leaderboard add` creates one")
    ranked = []
    for members in _grouped(rows):
        for row in members:
            is_known = row.group["text"] and math.isfinite(row.bits.low)
            better = sum(is_better(other, row) for other in members)
            ranked.append(row._replace(rank=1 + better if is_known else None))
    return sorted(ranked, key=lambda row: (*row.group.values(), row.rank is None, row.bits))


def _grouped(rows: Iterable[Row]) -> list[list[Row]]:
    return list(rec.grouped(rows, lambda row: tuple(row.group.values())).values())


def is_better(a: Row, b: Row) -> bool:
    """Return True if the loss of `a` is lower by more than rounding and the noise of the text.

    Compared block by block if both have the same tokens; else their intervals must not overlap.
    """
    paired = rec.paired_interval([a.record], [b.record])
    is_sure = paired[1] < 0 if paired is not None else a.bits.high < b.bits.low
    return is_sure and a.bits.value < b.bits.value * (1 - TOLERANCE)


# ---- Verify an entry by evaluating its checkpoint again ----
SAME = (
    *("method", "train_length", "step", "seed", "settings", "tokenizer", "validation", "text"),
    *("precision", "tokens", "bytes", "parameters", "trained_tokens", "training_flop"),
)
"""Keys of a record whose values must be equal. What one of the two lacks is unequal."""
NUMBERS = "perplexity", "loss_nats", "loss_low", "loss_high", "bits_per_byte", rec.BLOCKS
TOLERANCE, OF_OTHER_DEVICE = 1e-6, 1e-3
"""Largest relative difference that rounding may cause if both evaluations ran on the same kind of
device (CPU or GPU), and if they ran on different kinds."""


def verify(
    directory: Path,
    name: str,
    source: Path,
    overrides: list[str],
    text: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> float:
    """Evaluate the checkpoint of an entry again, and mark the entry as verified. Collective.

    Args:
        directory: The leaderboard.
        name: Name of the entry's file, without .json.
        source: The run, checkpoint or Hugging Face folder that the entry is about.
        overrides, text, trust_remote_code: As in `evaluation.command.evaluate_sources`.

    Returns:
        The largest relative difference between a number of the entry and the new evaluation.

    Raises:
        ConfigError: There is no such entry, or the source cannot be evaluated as the entry says.
        RunFailed: The new evaluation disagrees with the entry. The message names the row and key.
    """
    # Not at the top: importing Megatron takes seconds, and the page does not need it.
    from pretrain.evaluation.command import evaluate_sources, is_main

    path = directory / f"{name}.json"
    entry, claimed, digest = read_entry(path)
    request = entry.request()
    found = evaluate_sources([source], request, overrides, None, None, text, trust_remote_code)
    again = {(rec.protocol_name(r), r["length"]): r for r in found}
    largest, measured = 0.0, []
    for record in claimed:
        protocol, length = rec.protocol_name(record), record["length"]
        ours = again.get((protocol, length), {})
        is_same_kind = all(cost in ours for cost in rec.COSTS if cost in record)
        for key in (*SAME, *NUMBERS):
            difference = _difference(key, record, ours)
            largest = max(largest, difference)
            if difference > (TOLERANCE if is_same_kind else OF_OTHER_DEVICE):
                raise RunFailed(
                    f"{path}: {protocol} at {length} tokens: {key} = {record.get(key)!s:.60}, and "
                    f"{source} has {ours.get(key)!s:.60}. The entry is not verified"
                )
        measured.append({**record, **{key: ours[key] for key in NUMBERS}})
    if is_main():
        date, code = time.strftime("%Y-%m-%d", time.gmtime()), found[0].get("code")
        mark = {"entry": digest, "date": date, "code": code, "difference": largest}
        with writing(directory / VERIFIED):
            write_files(directory / VERIFIED, {path.name: _json(mark, measured)})
    return largest


def _difference(key: str, claimed: rec.Record, ours: rec.Record) -> float:
    """Return the relative difference of a key in two records; inf for unequal non-numbers."""
    a, b = claimed.get(key), ours.get(key)
    if a is None or b is None or key in SAME:
        return 0.0 if a == b else math.inf
    a, b = (np.atleast_1d(each.losses if key == rec.BLOCKS else each) for each in (a, b))
    if a.shape != b.shape:
        return math.inf
    # A value that is not finite is null in a file, and nan once it is read.
    a, b = (np.where(np.isfinite(each), each, 0.0) for each in (a, b))
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-300)))


# ---- The page ----
def build(directory: Path) -> Path:
    """Write DIR/index.html, and return its path. Equal entries give an equal page, byte for byte.

    Raises:
        ConfigError: There is no entry, or a file is not an entry.
    """
    rows = read_rows(directory)
    # The page first shows the group with the most entries, at the longest length among those.
    shown = max(_grouped(rows), key=lambda group: (len(group), group[0].record["length"]))[0].group
    template = Path(__file__).with_name("leaderboard.html.jinja").read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    values = {
        "rows": [(row, _command(row)) for row in rows],
        "shown": shown,
        "choices": {name: sorted({row.group[name] for row in rows}) for name in shown},
        "figures": dict(_figures(rows)),
        # With this digest, a browser runs no script but the page's own.
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(values)
    path = directory / "index.html"
    with writing(path):
        replace_file(path, page.encode())
    return path


def _command(row: Row) -> str:
    """Return the command that evaluates the checkpoint of a row as its entry says."""
    options = row.entry.request().options()
    return shlex.join(["pretrain", "evaluate", row.record["checkpoint"], *options])


def _figures(rows: Sequence[Row]) -> Iterable[tuple[str, str]]:
    """Yield each known text with its figure, an SVG in base64: a line for each entry."""
    known = [row for row in rows if row.group["text"] and math.isfinite(row.bits.value)]
    for text, members in rec.grouped(known, lambda row: row.group["text"]).items():
        # A curve is colored by its method, with which its name must begin. The entry's name follows
        # because entries of one method are not seeds of one curve.
        named = [
            {**row.record, "method": f"{row.record['method']}, {row.entry.name}", "run": row.file}
            for row in members
        ]
        lines, frame = lines_by_length(rec.make_curves(named), rec.BITS_PER_BYTE)
        yield text, base64.b64encode(draw(lines, frame)["svg"]).decode()
