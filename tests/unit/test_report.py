"""The evaluation report: files read back as written, and its sentences state the numbers."""

import csv
import json
import math
import struct
import zlib

import numpy as np
import pytest

from pretrain.config import ConfigError
from pretrain.evaluate.report import FIELDS, format_table, write_report

# Of the shape that a real run shows.
PERPLEXITIES = {
    ("alibi", "nonoverlapping"): [183.1, 182.5, 182.2, 181.9, 182.0],
    ("alibi", "sliding"): [181.0, 180.5, 180.6, 180.9, 181.2],
    ("sinusoidal", "nonoverlapping"): [248.8, 293.8, 363.8, 477.1, 604.6],
}


def make_record(method, protocol, length, perplexity, checkpoint=None):
    return {
        "method": method,
        "protocol": protocol,
        "stride": 64 if protocol == "sliding" else length,
        "length": length,
        "perplexity": perplexity,
        "loss_nats": math.log(perplexity),
        "tokens": 50_000,
        "checkpoint": checkpoint or f"runs/demo/{method}/checkpoints/step-00000400",
    }


def make_records():
    return [
        make_record(*key, 128 * 2**i, value)
        for key, values in PERPLEXITIES.items()
        for i, value in enumerate(values)
    ]


def read_png(content):
    """Return (width, height, decompressed pixel rows); fail when a chunk's checksum is wrong."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    offset, chunks = 8, {}
    while offset < len(content):
        (size,) = struct.unpack(">I", content[offset : offset + 4])
        kind = content[offset + 4 : offset + 8]
        data = content[offset + 8 : offset + 8 + size]
        (checksum,) = struct.unpack(">I", content[offset + 8 + size : offset + 12 + size])
        assert checksum == zlib.crc32(kind + data)
        chunks[kind] = chunks.get(kind, b"") + data
        offset += 12 + size
    return *struct.unpack(">II", chunks[b"IHDR"][:8]), zlib.decompress(chunks[b"IDAT"])


def test_json_and_csv_read_back(tmp_path):
    records = make_records()
    write_report(tmp_path / "report" / "curve.json", 128, records)
    assert json.loads((tmp_path / "report" / "curve.json").read_text()) == {
        "train_length": 128,
        "records": records,
    }
    with (tmp_path / "report" / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    typed = [{k: type(record[k])(row[k]) for k in FIELDS} for row, record in zip(rows, records)]
    assert typed == records
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == [
        "curve.csv",
        "curve.json",
        "curve.png",
        "report.md",
    ]


def test_pictures_are_pictures(tmp_path):
    losses = {
        ("alibi", 2048): np.linspace(7, 5, 2048),
        ("sinusoidal", 2048): np.linspace(7, 6, 2048),
    }
    write_report(tmp_path / "curve.json", 128, make_records(), losses)
    for name in ("curve.png", "positions.png"):
        content = (tmp_path / name).read_bytes()
        width, height, pixels = read_png(content)
        assert 800 <= width <= 1600 and 400 <= height <= 1000 and len(content) < 300_000
        # RGBA rows, each after one filter byte.
        assert len(pixels) == height * (4 * width + 1)
        # Something is drawn.
        assert len(set(pixels)) > 16


def test_table_shows_the_numbers():
    lines = format_table(128, make_records()).splitlines()
    assert lines[0].endswith("L = 128)")
    assert lines[1].split("  ")[-1].strip() == "2048 = 16 L"
    cells = [line.split("  ") for line in lines[3:]]
    found = {
        (row[0], row[1].strip()): [float(x) for x in row[2:] if x.strip()]
        for row in ([c for c in row if c.strip()] for row in cells)
    }
    expected = {
        (m, p.replace("sliding", "sliding by 64")): values
        for (m, p), values in PERPLEXITIES.items()
    }
    assert found == expected


def test_report_says_what_the_numbers_say(tmp_path):
    write_report(tmp_path / "curve.json", 128, make_records())
    text = (tmp_path / "report.md").read_text()
    assert "![perplexity by length](curve.png)" in text
    assert "| alibi | nonoverlapping | 183.10 | 182.50 | 182.20 | 181.90 | 182.00 |" in text
    # 182.0 / 181.9 = 1.00055, 183.1 / 181.9 = 1.0066, 604.6 / 248.8 = 2.4301
    assert (
        "- alibi, nonoverlapping: best perplexity 181.90 at 1024 tokens (8 L); 1.001 times that at "
        "2048 tokens (16 L), the longest length; 1.007 times that at L.\n"
    ) in text
    assert (
        "- sinusoidal, nonoverlapping: best perplexity 248.80 at 128 tokens (L); 2.430 times that "
        "at 2048 tokens (16 L), the longest length.\n"
    ) in text


def test_numbers_that_are_not_finite(tmp_path):
    records = [
        make_record("rotary", "nonoverlapping", 128, 20.0),
        make_record("rotary", "nonoverlapping", 256, math.inf),
        {
            **make_record("none", "nonoverlapping", 128, 1.0),
            "perplexity": math.nan,
            "loss_nats": math.nan,
        },
    ]
    write_report(tmp_path / "curve.json", 128, records)

    def refuse(literal):
        raise AssertionError(f"{literal} is not JSON")

    curve = json.loads((tmp_path / "curve.json").read_text(), parse_constant=refuse)
    assert [r["perplexity"] for r in curve["records"]] == [20.0, None, None]
    assert [r["loss_nats"] for r in curve["records"]] == [math.log(20), None, None]
    report = (tmp_path / "report.md").read_text()
    assert (
        "- rotary, nonoverlapping: best perplexity 20.00 at 128 tokens (L); not finite at 256 "
        "tokens (2 L), the longest length.\n"
    ) in report
    assert "none, nonoverlapping: no finite perplexity." in report
    table = format_table(128, records)
    assert "inf" in table and "nan" in table
    # The method "none" was not evaluated at 256 tokens.
    assert table.splitlines()[-1].endswith("-")


def test_two_checkpoints_of_one_method_stay_apart():
    runs = ("runs/a/checkpoints/step-00000100", "runs/b/checkpoints/step-00000100")
    table = format_table(
        128,
        [make_record("alibi", "nonoverlapping", 128, p, run) for p, run in zip((9.5, 8.5), runs)],
    )
    rows = [line.split() for line in table.splitlines()[-2:]]
    assert rows == [
        ["alibi", "(a/step-00000100)", "nonoverlapping", "9.50"],
        ["alibi", "(b/step-00000100)", "nonoverlapping", "8.50"],
    ]


def test_positions_are_averaged_over_every_position_once(tmp_path):
    losses = np.arange(300, dtype=np.float64)
    # No token was scored at position 7.
    losses[7] = math.nan
    write_report(tmp_path / "curve.json", 128, make_records(), {("alibi", 300): losses})
    with (tmp_path / "positions.csv").open() as file:
        rows = list(csv.DictReader(file))
    ranges = [range(int(row["first_position"]), int(row["last_position"]) + 1) for row in rows]
    assert [position for r in ranges for position in r] == list(range(300))
    for row, r in zip(rows, ranges):
        scored = [position for position in r if position != 7]
        expected = sum(scored) / len(scored) if scored else math.nan
        # A float's repr reads back exactly, and the mean of small integers is rounded once.
        np.testing.assert_allclose(float(row["loss_nats"]), expected, rtol=1e-15)
    assert "positions.png" in (tmp_path / "report.md").read_text()


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"curve\.csv: the file name must end in \.json"):
        write_report(tmp_path / "curve.csv", 128, make_records())
    with pytest.raises(ConfigError, match="nothing was evaluated"):
        write_report(tmp_path / "curve.json", 128, [])
    assert list(tmp_path.iterdir()) == []
