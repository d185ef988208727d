"""The evaluation report: nothing dropped, nothing replaced, and its sentences state the numbers."""

import csv
import json

from pretrain.evaluate.report import format_table, write_report
from tests.unit.report_records import curve_of, make_record, position_losses


def test_position_curves_of_two_runs_of_one_method_both_stand(tmp_path):
    records = [make_record(seed=seed) for seed in (1, 2)]
    positions = {(r["checkpoint"], 128): position_losses(128, offset=r["seed"]) for r in records}
    write_report(tmp_path / "curve.json", records, positions)
    with (tmp_path / "positions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {r["run"] for r in records}


def test_runs_of_several_training_lengths_stand_in_one_report(tmp_path):
    records = [
        *curve_of("alibi", [20.0, 19.0], train_length=128),
        *curve_of("alibi", [21.0, 18.0], train_length=256),
    ]
    write_report(tmp_path / "curve.json", records)
    assert json.loads((tmp_path / "curve.json").read_text()) == {
        "train_length": None,
        "records": records,
    }
    assert "training lengths L = 128, 256" in format_table(records)


def test_perplexities_of_two_tokenizers_never_stand_in_one_table():
    tables = format_table(
        [
            make_record("alibi", perplexity=20.25),
            make_record("rotary", perplexity=33.75, tokenizer="cccccccccccc"),
        ]
    ).split("\n\n")
    assert not any("20.25" in table and "33.75" in table for table in tables)
