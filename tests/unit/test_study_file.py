"""Read study files: what they make of their configs, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from pretrain.bench.timing import check_contestants
from pretrain.config import ConfigError, dump_config, load_config
from pretrain.evaluation.records import records_json
from pretrain.positions.base import METHODS
from pretrain.processes import Processes, Stopped
from pretrain.study.command import Request, measured_as, run_study
from pretrain.study.runs import (
    Study,
    asked_of,
    check_directory,
    check_records,
    check_runs,
    is_recorded,
    load_study_file,
    other_differences,
    records_of,
    resolve,
)
from tests.end_to_end.commands import ROOT, wait_for
from tests.unit.report_records import make_record

DEMO = ROOT / "configs/demo.toml"
FIELDS = {
    "title": '"T"',
    "directory": '"s"',
    "config": f'"{DEMO}"',
    "methods": '["alibi", "t5"]',
    "training_lengths": "[64, 256]",
}
CONFIGS = {"title": '"T"', "directory": '"s"', "configs": '["*_*.toml"]'}


def study(folder: Path, keys: dict[str, str], sections: str = "") -> Study:
    """Write a study file into a folder, and resolve it."""
    path = folder / "study.toml"
    lines = [f"{key} = {value}" for key, value in keys.items()]
    path.write_text("\n".join([*lines, sections]) + "\n")
    return resolve(path, load_study_file(path))


def overlays(folder: Path, *names: str) -> None:
    """Write a config METHOD_LENGTH.toml for each name."""
    for name in names:
        method, length = name.split("_")[:2]
        text = DEMO.read_text().replace('method = "alibi"', f'method = "{method}"')
        text = text.replace("sequence_length = 128", f"sequence_length = {length}")
        (folder / f"{name}.toml").write_text(text)


def test_a_config_in_phases_says_its_lengths_itself(tmp_path: Path) -> None:
    staged = DEMO.with_name("demo_staged.toml")
    with pytest.raises(ConfigError, match=r"has \[\[phases\]\], which say the lengths"):
        study(tmp_path, FIELDS | {"config": f'"{staged}"'})
    overlays(tmp_path, "rotary_128")
    found = study(tmp_path, CONFIGS | {"configs": f'["{staged}", "rotary_*.toml"]'})
    assert any(line.startswith("phases: ") for line in other_differences(found))
    # What does not change the training is not compared; positions of earlier phases are.
    path, end = tmp_path / "rotary_64.toml", "[[phases]]\nsteps = 9\n{}\n[[phases]]\n{}\n"
    other = 'position.method = "alibi"', 'position.method = "rotary"'
    overlays(tmp_path, "alibi_64", path.stem)
    texts = {file: file.read_text() for file in tmp_path.glob("*_64.toml")}
    for changes, count in ((("evaluation.stride = 9", ""), 0), (other, 1)):
        for file, text in texts.items():
            file.write_text(text + end.format(*(changes if file == path else ("", ""))))
        found = study(tmp_path, CONFIGS | {"configs": '["*_64.toml"]'})
        assert len(other_differences(found)) == count


def test_a_micro_batch_divides_the_batch_of_each_length(tmp_path: Path) -> None:
    found = study(tmp_path, FIELDS | {"training_lengths": "[96]", "tokens_per_step": "3072"})
    # 21 sequences of 96 tokens would be as many as 16 of 128.
    assert {run.config.batch.micro_batch_size for run in found.runs} == {16}


def test_methods_lengths_and_seeds_are_a_run_each_with_equal_tokens_a_step(tmp_path: Path) -> None:
    found = study(tmp_path, FIELDS | {"seeds": "[1, 2]"}, "[further_seeds]\nalibi-64 = [3, 1]")
    names = [f"{m}-{n}-s{s}" for s in (1, 2) for n in (64, 256) for m in ("alibi", "t5")]
    assert [run.name for run in found.runs] == [*names, "alibi-64-s3"]
    for run in found.runs:
        assert run.name == f"{run.method}-{run.train_length}-s{run.seed}"
        # The demo's, at its own 128 tokens: 32 sequences a step, 16 in a micro batch.
        assert run.config.tokens_per_step == 32 * 128
        assert run.config.batch.micro_batch_size * run.train_length == 16 * 128


def test_a_study_differs_from_its_config_in_what_it_says_and_in_nothing_else(
    tmp_path: Path,
) -> None:
    own = (
        '["train.num_steps=640", "run.directory=x", "run.seed=7", "checkpoint.upload_to=file:///u"]'
    )
    found = study(tmp_path, FIELDS | {"settings": own, "seeds": "[1234]"})
    assert all(run.config.run.directory == f"s/runs/{run.name}" for run in found.runs)
    assert all(run.config.checkpoint.upload_to == f"file:///u/{run.name}" for run in found.runs)
    given = load_config(DEMO).model_dump()
    said = {
        "run": {"directory"},
        "position": {"method"},
        "checkpoint": {"upload_to"},
        "data": {"sequence_length"},
        "batch": {"micro_batch_size", "global_batch_size"},
        "train": {"num_steps"},
    }
    for run in found.runs:
        for section, values in run.config.model_dump(exclude={"phases"}).items():
            # Another method has keys of its own.
            shared = values.keys() & given[section].keys()
            changed = {key for key in shared if values[key] != given[section][key]}
            assert changed <= said.get(section, set()), section


def test_each_size_has_settings_of_its_own_and_is_compared_with_itself_alone(
    tmp_path: Path,
) -> None:
    sizes = '[sizes]\n1m = ["model.hidden_size=64"]\n3m = ["model.hidden_size=96"]'
    keys = FIELDS | {"training_lengths": "[64]", "seeds": "[1, 2]"}
    found = study(tmp_path, keys, sizes)
    names = [f"{n}-{m}-64-s{s}" for s in (1, 2) for n in ("1m", "3m") for m in ("alibi", "t5")]
    assert [run.name for run in found.runs] == names
    widths = {"1m": 64, "3m": 96}
    assert all(run.config.model.hidden_size == widths[run.size] for run in found.runs)
    assert [(part.title, part.report) for part in found.parts] == [
        (f"T: {size}", Path("s/report", size)) for size in widths
    ]
    assert [run.name for run in found.parts[1].runs] == [n for n in names if n.startswith("3m")]
    assert other_differences(found) == []
    with pytest.raises(ConfigError, match=r"sizes\.report"):
        study(tmp_path, FIELDS, "[sizes]\nreport = []")
    with pytest.raises(ConfigError, match=r"sizes and efficiency\.rounds: choose one"):
        study(tmp_path, FIELDS, f"{sizes}\n[efficiency]\nrounds = 1")


def test_config_files_are_a_run_each_the_shortest_first(tmp_path: Path) -> None:
    overlays(tmp_path, "rotary_512", "alibi_512", "alibi_64")
    found = study(tmp_path, CONFIGS)
    assert [run.name for run in found.runs] == [
        "alibi-64-s1234",
        "alibi-512-s1234",
        "rotary-512-s1234",
    ]
    assert found.runs[0].source == tmp_path / "alibi_64.toml"
    # Absolute patterns too.
    again = study(tmp_path, CONFIGS | {"configs": f'["{tmp_path}/alibi_*.toml"]'})
    assert [run.name for run in again.runs] == ["alibi-64-s1234", "alibi-512-s1234"]


def test_what_else_the_runs_differ_in_is_said(tmp_path: Path) -> None:
    overlays(tmp_path, "alibi_64", "sinusoidal_64")
    assert other_differences(study(tmp_path, CONFIGS)) == []
    path = tmp_path / "sinusoidal_64.toml"
    text = path.read_text().replace("hidden_size = 128", "hidden_size = 256")
    path.write_text(text.replace("global_batch_size = 32", "global_batch_size = 64"))
    found = study(tmp_path, CONFIGS)
    assert other_differences(found) == [
        "model.hidden_size: 128 in alibi-64-s1234; 256 in sinusoidal-64-s1234",
        "tokens a step: 2048 in alibi-64-s1234; 4096 in sinusoidal-64-s1234",
    ]
    check_runs(found, 1)
    # Speeds at unequal steps are refused before anything has been trained.
    with pytest.raises(ConfigError, match=r"efficiency\.rounds: tokens a step: 2048 in alibi"):
        check_runs(study(tmp_path, CONFIGS, "[efficiency]\nrounds = 1"), 1)
    path.write_text(text.replace("demo/data", "other"))
    with pytest.raises(ConfigError, match=r"data\.directory: .*one text"):
        check_runs(study(tmp_path, CONFIGS), 1)


def test_the_default_lengths_are_1_to_16_times_every_training_length(tmp_path: Path) -> None:
    assert study(tmp_path, FIELDS).lengths == (64, 128, 256, 512, 1024, 2048, 4096)
    bounded = study(tmp_path, FIELDS, "[evaluation]\nmax_tokens = 600")
    assert bounded.lengths == (64, 128, 256, 512)


@pytest.mark.parametrize(
    ("keys", "sections", "says"),
    [
        ({"config": None}, "", "config: missing. Name a config, methods and training_lengths"),
        ({"configs": '["x.toml"]'}, "", "configs and config: choose one"),
        ({"methods": '["alibi", "alibi"]'}, "", "are both alibi-64-s1234"),
        ({"methods": '[""]'}, "", "methods[0] = '': string should have at least 1"),
        ({"directory": '"-s"'}, "", "directory = '-s': string should match pattern '^[^-]'"),
        ({"methods": '["alibo"]'}, "", "position.method = 'alibo'"),
        ({"training_lengths": "[100]"}, "", "= 100: does not divide the 4,096 tokens of tokens_"),
        ({"published": '"wikitext103"'}, "", "published = wikitext103: its perplexities are of w"),
        ({"metods": "[]"}, "", "metods: no such key"),
        ({}, "[model]\nnum_layers = 1", "model: no such key"),
        ({"title": None}, "", "title: missing, and it has no default"),
        ({"base": '"none.toml"'}, "", "none.toml: no such config file, the base of"),
        ({}, "[evaluation]\nlengths = [64]\nstride = 65", "--stride 65: longer than the shortest"),
        ({"methods": '["learned"]'}, "", "max_position_embeddings"),
        ({}, "[further_seeds]\nalibi-65 = [1]", "further_seeds: alibi-65: the study has no such"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(
    tmp_path: Path, keys: dict[str, str | None], sections: str, says: str
) -> None:
    given = {key: value for key, value in (FIELDS | keys).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        study(tmp_path, given, sections)
    assert says in str(caught.value) and str(tmp_path / "study.toml") in str(caught.value).replace(
        f"{DEMO}:", f"{tmp_path / 'study.toml'}:"
    )


def test_two_configs_of_one_method_length_and_seed_are_refused(tmp_path: Path) -> None:
    overlays(tmp_path, "alibi_64", "alibi_64_b", "alibi_64_c")
    for name, seed in (("b", 7), ("c", 8)):
        path = tmp_path / f"alibi_64_{name}.toml"
        path.write_text(path.read_text().replace("[run]", f"[run]\nseed = {seed}"))
    names = sorted(run.name for run in study(tmp_path, CONFIGS).runs)
    assert names == ["alibi-64-s1234", "alibi-64-s7", "alibi-64-s8"]
    overlays(tmp_path, "alibi_64", "alibi_64_b")
    with pytest.raises(ConfigError, match="are both alibi-64-s1234"):
        study(tmp_path, CONFIGS)
    with pytest.raises(ConfigError, match="no such file"):
        study(tmp_path, CONFIGS | {"configs": '["nothing_*.toml"]'})


def test_a_second_command_on_a_study_is_refused(tmp_path: Path) -> None:
    found = study(tmp_path, FIELDS | {"directory": f'"{tmp_path}/s"'})
    (tmp_path / "s").mkdir()
    with (tmp_path / "s/.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `pretrain study` works on it"):
            run_study(found.file, Request())
    with pytest.raises(ConfigError, match=r"--only t6: matches no run\. The runs are alibi-64-s1"):
        run_study(found.file, Request(only="t6"))
    assert [path.name for path in (tmp_path / "s").iterdir()] == [".lock"]


# ---- what is not the study's ---------------------------------------------------------------------
def test_a_study_never_writes_over_files_of_the_user(tmp_path: Path) -> None:
    """With `directory = "."` a clone's own configs would be in the way."""
    (tmp_path / "configs").mkdir()
    overlays(tmp_path / "configs", "alibi_64", "t5_64")
    keys = CONFIGS | {"configs": '["configs/*.toml"]', "directory": f'"{tmp_path}"'}
    here = study(tmp_path, keys)
    before = {path: path.read_text() for path in tmp_path.rglob("*.toml")}
    with pytest.raises(ConfigError, match=r"study\.toml is there and of no study"):
        check_directory(here)
    other = tmp_path / "other.toml"
    (tmp_path / "study.toml").rename(other)
    with pytest.raises(ConfigError, match=r"configs is there and of no study"):
        check_directory(dataclasses.replace(here, file=other))
    assert {path.read_text() for path in tmp_path.rglob("*.toml")} == set(before.values())


def test_a_clone_with_records_alone_is_a_studys(tmp_path: Path) -> None:
    here = study(tmp_path, FIELDS | {"directory": f'"{tmp_path}/s"'})
    record = tmp_path / "s/records/alibi-64-s1234"
    record.mkdir(parents=True)
    with pytest.raises(ConfigError, match="records is there and of no study"):
        check_directory(here)
    (record / "record.json").write_text("{}")
    check_directory(here)


def test_a_study_removes_no_config_but_those_that_it_wrote(tmp_path: Path) -> None:
    keys = FIELDS | {"directory": f'"{tmp_path}/s"'}
    asked = keys | {"training_lengths": "[64]"}
    run_study(study(tmp_path, keys).file, Request(report_only=True))
    mine = tmp_path / "s/configs/mine.toml"
    mine.write_text("# mine")
    run_study(study(tmp_path, asked).file, Request(report_only=True))
    left = {path.name for path in mine.parent.iterdir()}
    assert left == {"mine.toml", "alibi-64-s1234.toml", "t5-64-s1234.toml"}


@pytest.mark.parametrize(
    ("recorded", "now", "same"),
    [
        ("nonoverlapping sliding", "stride = 64", True),
        ("nonoverlapping sliding", "stride = 32", False),
        # Without sliding windows the stride says nothing.
        ("nonoverlapping", 'protocols = ["nonoverlapping"]\nstride = 32', True),
        ("nonoverlapping sliding", 'protocols = ["nonoverlapping"]', True),
        ("nonoverlapping sliding", "lengths = [64]", True),
        ("nonoverlapping sliding", "lengths = [64, 128, 256]", False),
        # Sliding windows were 64 tokens apart, and would be 128 apart.
        ("nonoverlapping sliding", "lengths = [128]", False),
    ],
)
def test_a_record_is_kept_where_no_more_is_asked_and_is_otherwise_not_trained_again(
    tmp_path: Path, recorded: str, now: str, same: bool
) -> None:
    keys = FIELDS | {"directory": f'"{tmp_path}/s"'}
    lengths = "" if "lengths" in now else "lengths = [64, 128]"
    found = study(tmp_path, keys, f"[evaluation]\n{lengths}\n{now}")
    asked = {"lengths": [64, 128], "protocols": recorded.split()}
    asked |= {"stride": 64 if "sliding" in recorded else None, "max_tokens": None}
    found.runs[0].record.mkdir(parents=True)
    (found.runs[0].record / "record.json").write_text(json.dumps({"asked": asked}))
    assert is_recorded(found, found.runs[0]) == same
    with nullcontext() if same else pytest.raises(ConfigError, match=r"record\.json has \{"):
        check_records(found)


def test_a_record_lacks_no_length_that_is_longer_than_the_text(tmp_path: Path) -> None:
    keys = FIELDS | {"directory": f'"{tmp_path}/s"'}
    found = study(tmp_path, keys, "[evaluation]\nlengths = [64, 128, 256]")
    run = found.runs[0]
    named = {"run": str(run.config.directory), "tokens": 200}
    rows = [make_record(length=length, **named) for length in (64, 128)]
    run.record.mkdir(parents=True)
    (run.record / "record.json").write_text(json.dumps({"asked": asked_of(found)}))
    (run.record / "curve.json").write_bytes(records_json(rows))
    assert [r["length"] for r in records_of(found)] == [64, 128]
    (run.record / "curve.json").write_bytes(records_json(rows[1:]))
    with pytest.raises(ConfigError, match="at 64 tokens, which"):
        records_of(found)


PHASES = """
[[phases]]
steps = {steps}
data.sequence_length = {length}
optimizer.learning_rate = {rate}
position.method = "windowed"
position.window = {window}

[[phases]]
data.sequence_length = 128
position.method = "alibi"
optimizer.learning_rate = 5e-3
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"steps": 81}, "train.num_steps = 81: "),
        ({"length": 32}, "data.sequence_length = 32: "),
        ({"rate": 2e-4}, "optimizer.learning_rate = 0.0002: "),
        # The later phase has another method, which takes none of this one's keys.
        ({"window": 9}, "position.window = 9: "),
        ({}, "phases = 2: "),
    ],
)
def test_a_record_of_other_earlier_phases_is_another_experiment(
    tmp_path: Path, change: dict[str, float], says: str
) -> None:
    def asked(**values: float) -> Study:
        values = {"steps": 80, "length": 64, "rate": 1e-3, "window": 8} | values
        (tmp_path / "a_b.toml").write_text(DEMO.read_text() + PHASES.format(**values))
        return study(tmp_path, CONFIGS | {"directory": f'"{tmp_path}/s"'})

    for run in asked().runs:
        run.record.mkdir(parents=True)
        recorded = run.trained if says == "phases = 2: " else run.config
        (run.record / "config.toml").write_text(dump_config(recorded))
        (run.record / "record.json").write_text('{"asked": {}, "data": {}}')
    found = asked(**change)
    with pytest.raises(ConfigError, match=re.escape(says)) if says else nullcontext():
        check_runs(found, 1)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('data.paths=["b.txt"]', "data.paths (its data is not built here) = ['b.txt']: "),
        ("data.validation_fraction=0.5", "validation_fraction (its data is not built here) = 0.5"),
        ('cleaning.deduplicate="near"', "deduplicate (its data is not built here) = near: "),
        ('data.corpora.a.paths=["b.txt"]', "(its data is not built here) = {'a': {'paths': ['b.t"),
        ("cleaning.max_skipped_documents=9", ""),
        ("data.directory=elsewhere/data", ""),
    ],
)
def test_a_record_of_other_data_is_another_experiment_where_none_is_built(
    tmp_path: Path, setting: str, says: str
) -> None:
    paths = "data.corpora.a.paths" if "corpora" in setting else "data.paths"
    own = ["data.source=", f'{paths}=["a.txt"]', f"data.directory={tmp_path}/data"]
    keys = FIELDS | {"directory": f'"{tmp_path}/s"', "settings": json.dumps(own)}
    for run in study(tmp_path, keys).runs:
        run.record.mkdir(parents=True)
        (run.record / "config.toml").write_text(dump_config(run.config))
        (run.record / "record.json").write_text('{"asked": {}, "data": {"training": "a"}}')
    found = study(tmp_path, keys | {"settings": json.dumps([*own, setting])})
    with pytest.raises(ConfigError, match=re.escape(says)) if says else nullcontext():
        check_runs(found, 1)


def test_a_measurement_of_speed_is_of_all_settings_but_the_seed(tmp_path: Path) -> None:
    def found(*settings: str, seed: int = 7) -> str:
        given = json.dumps(["train.fusion=layers", *settings])
        return measured_as(study(tmp_path, FIELDS | {"settings": given, "seeds": f"[{seed}]"}).runs)

    others = "train.fp8=true train.objective=masked data.per_document_attention=true "
    others += "optimizer.name=nag model.hidden_dropout=0.1 batch.micro_batch_size=1"
    assert len({found(), *map(found, others.split())}) == 7
    assert found() == found("data.num_workers=3", "logging.interval_steps=7", seed=8)


# ---- processes -----------------------------------------------------------------------------------


def test_a_second_signal_interrupts_nothing_that_ends_by_the_first() -> None:
    processes = Processes()
    with processes.listening():
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert processes.stopped
        with pytest.raises(Stopped):
            processes.run([["true"]])


def test_a_failure_ends_the_others_and_is_the_exit_code() -> None:
    processes = Processes()
    assert processes.run([["sleep", "600"], ["sh", "-c", "exit 7"]]) == 7
    assert processes.run([["sh", "-c", "kill -9 $$"]]) == 128 + 9
    assert processes.run([["true"], ["true"]]) == 0 and len(processes.launches) == 5


def test_what_a_study_started_dies_with_it(tmp_path: Path) -> None:
    code = f"""
from pretrain.processes import Processes
Processes().run([["sh", "-c", "echo $$ > {tmp_path}/pid; sleep 600"]])
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    child = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    wait_for(lambda: not child.exists() or child.read_text().split()[2] == "Z")


def test_slopes_that_are_not_the_published_ones_are_a_method_of_their_own(tmp_path: Path) -> None:
    """Claims about ALiBi are judged on the published slopes, and trained ones are compared."""
    overlays(tmp_path, "alibi_64", "alibi_64_trained", "alibi_64_other")
    for name, setting in (("trained", "trainable_slopes = true"), ("other", "slopes = [0.1]")):
        path = tmp_path / f"alibi_64_{name}.toml"
        numbers = setting.replace("[0.1]", str([0.1] * 8))
        path.write_text(path.read_text().replace("[position]", f"[position]\n{numbers}"))
    found = study(tmp_path, CONFIGS | {"configs": '["alibi_*.toml"]'})
    names = [f"{name}-64-s1234" for name in ("alibi", "alibi_other_slopes", "alibi_trained_slopes")]
    assert [run.name for run in found.runs] == names
    assert [f"{run.method}-64-s1234" for run in found.runs] == names
    # Each takes its turn when speed and memory are measured.
    check_contestants([run.config for run in found.runs], 1)


def test_the_study_of_all_methods_has_all_of_them() -> None:
    """But for the learned table, which ends with the training length."""
    path = ROOT / "configs/studies/methods.toml"
    runs = resolve(path, load_study_file(path)).runs
    assert {run.config.position.method for run in runs} == METHODS.keys() - {"learned"}
