"""The report of a run's evaluated checkpoints: each number from its own folder, in step order."""

import json
import math

import pytest

from pretrain.config import ConfigError
from pretrain.evaluation import report
from pretrain.evaluation.figures import lines_by_step
from pretrain.evaluation.records import make_curves, records_json
from pretrain.evaluation.report import combine, report_run
from tests.unit.report_records import make_record

# (step, protocol, length) -> perplexity. Not in the order of the steps: jobs end in any order.
PERPLEXITIES = {
    (400, "nonoverlapping", 128): 20.0,
    (400, "nonoverlapping", 512): 22.0,
    (400, "sliding", 512): 19.5,
    (100, "nonoverlapping", 128): 90.0,
    (100, "nonoverlapping", 512): 99.0,
    (100, "sliding", 512): 88.25,
    (300, "nonoverlapping", 128): 24.0,
    (300, "nonoverlapping", 512): 21.0,
    (300, "sliding", 512): 25.0,
}


def evaluate(run, step, perplexities, **changes):
    """Write the result of a checkpoint, without its figures; `perplexities` by (protocol, length).

    Figures take half a second each, and a run's report reads none.
    """
    records = [
        make_record("alibi", *key, value, **{"run": str(run), "step": step, **changes})
        for key, value in perplexities.items()
    ]
    folder = run / f"evaluations/step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curve.json").write_bytes(records_json(records))


def evaluate_all(run):
    for step in dict.fromkeys(step for step, _, _ in PERPLEXITIES):
        evaluate(run, step, perplexities_of(step))


def perplexities_of(step):
    """Return {(protocol, length): perplexity} of one step."""
    return {key[1:]: value for key, value in PERPLEXITIES.items() if key[0] == step}


def curve(run):
    return json.loads((run / "evaluations/curve.json").read_text())


def test_every_number_stands_in_the_order_of_training(tmp_path):
    evaluate_all(tmp_path)
    report_run(tmp_path)
    found = [
        ((r["step"], r["protocol"], r["length"]), r["perplexity"])
        for r in curve(tmp_path)["records"]
    ]
    keys = [
        (step, *rest)
        for step in (100, 300, 400)
        for rest in (("nonoverlapping", 128), ("nonoverlapping", 512), ("sliding", 512))
    ]
    assert found == [(key, PERPLEXITIES[key]) for key in keys]
    for record in curve(tmp_path)["records"]:
        assert record["checkpoint"] == f"{tmp_path}/checkpoints/step-{record['step']:08d}"
        assert record["loss_nats"] == math.log(record["perplexity"])


def test_a_line_of_the_figure_is_a_length_over_the_steps():
    curves = make_curves(
        [make_record("alibi", *k[1:], p, step=k[0]) for k, p in PERPLEXITIES.items()]
    )
    lines, _ = lines_by_step(curves)
    found = {
        (line.panel, line.name): dict(zip(line.xs, (value.value for value in line.values)))
        for line in lines
    }
    assert found == {
        ("L = 128, nonoverlapping windows", "alibi, 128 = L"): {100: 90.0, 300: 24.0, 400: 20.0},
        ("L = 128, nonoverlapping windows", "alibi, 512 = 4 L"): {100: 99.0, 300: 21.0, 400: 22.0},
        ("L = 128, sliding by 64 tokens", "alibi, 512 = 4 L"): {100: 88.25, 300: 25.0, 400: 19.5},
    }
    assert [list(line.xs) for line in lines] == [[100, 300, 400]] * 3


def test_what_could_not_be_evaluated_is_named_and_holds_up_nothing(tmp_path):
    evaluate(tmp_path, 100, {("nonoverlapping", 128): 30.0})
    for name, file, content in (
        ("step-00000200", "failed.json", '{"reason": "3 jobs ended without a result"}'),
        ("step-00000300", "curve.json", '{"train_length": 128, "rec'),
    ):
        (tmp_path / "evaluations" / name).mkdir()
        (tmp_path / "evaluations" / name / file).write_text(content)
    (tmp_path / "evaluations/.step-00000400.partial").mkdir()
    report_run(tmp_path)
    assert [r["step"] for r in curve(tmp_path)["records"]] == [100]
    text = (tmp_path / "evaluations/report.md").read_text()
    assert (
        "## Not evaluated\n\n- step-00000200: 3 jobs ended without a result\n- step-00000300: "
        in text
    )
    assert "00000300 cannot be read" in text and "00000400" not in text


def test_nothing_evaluated_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint has been evaluated yet"):
        report_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_lands_meanwhile_is_not_lost(tmp_path, monkeypatch):
    evaluate(tmp_path, 100, {("nonoverlapping", 128): 30.0})
    write, landed = report._write, []

    def write_late(*arguments):
        # Another job ends between our reading and our writing.
        if not landed:
            landed.append(evaluate(tmp_path, 200, {("nonoverlapping", 128): 20.0}))
        write(*arguments)

    monkeypatch.setattr(report, "_write", write_late)
    assert report_run(tmp_path).count("20.00") == 1
    assert [r["step"] for r in curve(tmp_path)["records"]] == [100, 200]


def test_runs_that_were_evaluated_are_combined(tmp_path, capsys):
    for name, trained in (("a", 128), ("b", 256)):
        for step, perplexity in ((100, 30.0), (200, 20.0)):
            run = tmp_path / name
            evaluate(run, step, {("nonoverlapping", 256): perplexity}, train_length=trained)
    (tmp_path / "c").mkdir()
    table = combine([tmp_path / "a", tmp_path / "b"], tmp_path / "report/curve.json")
    assert "20.00" in table and "30.00" not in table and "L = 128, 256" in table
    assert f"{tmp_path / 'a'}: step 200, the newest evaluated\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="none of its checkpoints has been evaluated"):
        combine([tmp_path / "a", tmp_path / "c"], None)
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"report\.md would be overwritten"):
        combine([tmp_path / "a", tmp_path / "b"], tmp_path / "curve.json")
