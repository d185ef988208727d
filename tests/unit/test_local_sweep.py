"""Test `launcher sweep --nproc` with real processes that write what training does, in moments.

They stand in for `pretrain train` as a package of that name, which the ranks find first.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.launcher.status import HEAD
from tests.end_to_end.commands import Done, ended, wait_for

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/demo.toml")
BASE = "runs/demo/alibi-sweep"
RANK = """
import json, os, signal, sys, time
from pathlib import Path
from pretrain.config import dump_config, load_config
from pretrain.rundir.checkpoints import checkpoint_name, newest_checkpoint_step
from pretrain.rundir.files import replace_file
from pretrain.rundir.attempts import Attempt

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
words = sys.argv[2:]
settings = [w for before, w in zip(words, words[1:]) if before == "--set"]
# As `pretrain train` does with the options of its command line.
config = load_config(words[0], settings)
rank, run, last = int(os.environ["RANK"]), config.directory, config.train.num_steps
attempt = Attempt.join(Path(os.environ["PRETRAIN_ATTEMPT"]))
step = newest_checkpoint_step(run) or 0
if config.optimizer.learning_rate == 9.0:
    sys.exit("error: not finite" if rank == 0 else 0)
if config.run.seed == 8:
    print("ready", flush=True)
    # It ends by itself, and not well, when it is asked to stop; seed 9 finishes all the same.
    while not asked:
        time.sleep(0.01)
    sys.exit("error: another fault")
if config.run.seed == 6 and rank == 0:
    # The user goes on with something else while the sweep runs.
    base = Path("base.toml")
    replace_file(base, base.read_text().replace("hidden_size = 128", "hidden_size = 64"))
# Of seed 7 and 9 a run waits to be stopped.
waits = config.run.seed in (7, 9) and step < 3

def save():
    folder = run / "checkpoints" / checkpoint_name(step)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(config))
    lineage = {"id": str(step), "step": step, "parent": None, "branches": [{"id": "b", "since": 0}]}
    (folder / "manifest.json").write_text(json.dumps(lineage))

def write(**record):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss_nats": 1.0, **record}) + chr(10))

if rank == 0:
    (run / "config.toml").write_text(dump_config(config))
    attempt.phase("training", step)
    while step < last and not asked:
        step += 1
        write(step_seconds=0.1)
        while waits and step == 3 and not asked:
            time.sleep(0.01)
        if config.run.seed == 9:
            asked.clear()
    if not asked:
        for length in config.evaluation_lengths:
            write(evaluation=True, protocol="nonoverlapping", stride=length, length=length)
    save()
    attempt.phase("ending", step)
while waits and not asked and config.run.seed == 7:
    time.sleep(0.01)
os._exit(80 if asked else 0)
"""


class Desk:
    """A folder with a built data set, in which `launcher sweep` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "ranks/pretrain"
        package.mkdir(parents=True)
        # The package itself, but for its command.
        (package / "__init__.py").write_text(
            f"__path__ = [{str(package)!r}, {str(ROOT / 'pretrain')!r}]\n"
        )
        (package / "__main__.py").write_text(RANK)
        for split in ("train", "validation"):
            (folder / f"runs/demo/data/{split}").mkdir(parents=True)
            (folder / f"runs/demo/data/{split}/manifest.json").touch()

    def start(self, *words: str, config: str = CONFIG) -> subprocess.Popen[str]:
        code = (
            f"import os; os.environ['PYTHONPATH'] = {str(self.folder / 'ranks')!r}\n"
            "from pretrain.launcher.__main__ import main; main()"
        )
        settings = ["train.num_steps=12", "schedule.lr_warmup_steps=1", "recovery.max_restarts=0"]
        given = {word.partition("=")[0] for word in words}
        own = [setting for setting in settings if setting.partition("=")[0] not in given]
        options = [word for setting in own for word in ("--set", setting)]
        return subprocess.Popen(
            [sys.executable, "-c", code, "sweep", config, *options, *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )

    def sweep(self, *words: str, config: str = CONFIG) -> Done:
        return ended(self.start(*words, config=config))

    def attempts(self) -> dict[str, int]:
        """Return how many attempts each run of the sweep has."""
        runs = (self.folder / BASE).iterdir()
        return {run.name: len(list((run / "attempts").glob("0*"))) for run in runs}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_runs_train_one_after_the_other_and_one_that_fails_keeps_none_from_it(desk: Desk) -> None:
    words = ["--nproc", "2", "--over", "optimizer.learning_rate=1e-3,9.0,2e-3"]
    shown = desk.sweep(*words, "--dry-run")
    assert shown.code == 0 and not (desk.folder / BASE).exists(), shown.text
    assert f"{BASE}/0.001 (optimizer.learning_rate = 0.001): would train\n" in shown.out

    done = desk.sweep(*words)
    assert done.code == 1, done.text
    assert f"run 2 of 3: {BASE}/9.0 (optimizer.learning_rate = 9.0)" in done.err
    assert f"{BASE}/9.0: failed with exit code 1; the other runs go on" in done.err
    *_, head, first, failed, last = done.out.splitlines()
    assert head.split() == HEAD.split()
    assert first.split()[:4] == [f"{BASE}/0.001", "finished", "12/12", "1.000"]
    assert failed.split()[:2] == [f"{BASE}/9.0", "failed"]
    assert last.split()[:4] == [f"{BASE}/0.002", "finished", "12/12", "1.000"]
    assert desk.attempts() == {"0.001": 1, "9.0": 1, "0.002": 1}

    # What is finished is left out, and what is asked for beyond goes on from there.
    more = ["--nproc", "2", "--over", "optimizer.learning_rate=1e-3,2e-3"]
    again = desk.sweep(*more)
    assert again.code == 0 and again.err == "" and "finished" in again.out, again.text
    longer = desk.sweep(*more, "--set", "train.num_steps=14")
    assert longer.code == 0 and longer.out.count("14/14") == 2, longer.text
    assert desk.attempts() == {"0.001": 2, "9.0": 1, "0.002": 2}


def test_ctrl_c_saves_the_present_run_and_stops_the_sweep(desk: Desk) -> None:
    words = ["--nproc", "2", "--over", "position.method=alibi,rotary", "--set", "run.seed=7"]
    metrics = desk.folder / BASE / "alibi/metrics.jsonl"
    process = desk.start(*words)

    def waits() -> bool:
        return metrics.exists() and "3" in metrics.read_text()

    wait_for(lambda: process.poll() is not None or waits())
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = ended(process)
    assert code == 80, out + err
    assert "saving, then stopping; press Ctrl-C again to leave at once, losing 3 steps" in err
    *_, saved, command = err.splitlines()
    assert saved == f"{BASE}/alibi: step-00000003 is saved; go on with:"
    assert command.startswith(
        f"  launcher sweep {CONFIG} --nproc=2 --over position.method=alibi,rotary --set "
    )
    assert f"{BASE}/rotary" not in out, out
    assert desk.attempts() == {"alibi": 1}


@pytest.mark.parametrize(("seed", "signals"), [(8, 2), (9, 1)])
def test_a_sweep_stops_when_asked_however_the_present_run_ends(
    desk: Desk, seed: int, signals: int
) -> None:
    """It failed, was ended by a second signal, or had no step left that it could stop before."""
    words = ["--nproc", "1", "--over", "position.method=alibi,rotary", "--set", f"run.seed={seed}"]
    run = desk.folder / BASE / "alibi"
    process = desk.start(*words)

    def waits() -> bool:
        begun = (run / "metrics.jsonl") if seed == 9 else run / "logs/rank-0.log"
        return begun.exists() and ("3" if seed == 9 else "ready") in begun.read_text()

    wait_for(lambda: process.poll() is not None or waits())
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 80, out + err
    assert "run 2 of 2" not in err and "go on with:" in err, err
    assert desk.attempts() == {"alibi": 1}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --nproc N to train on this machine, or --site SITE"),
        (["--nproc", "2", "--nodes", "2"], "have no effect"),
        (["--nproc", "2", "--set", "data.directory=nowhere"], "no built data set"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_starts(
    desk: Desk, words: list[str], says: str
) -> None:
    done = desk.sweep("--over", "position.method=alibi,rotary", *words)
    assert done.code == 2 and done.err.startswith("error: ") and says in done.err, done.text
    assert not (desk.folder / BASE).exists()


def test_several_configs_are_a_run_each(desk: Desk) -> None:
    other = desk.folder / "rotary.toml"
    text = Path(CONFIG).read_text().replace("runs/demo/alibi", "runs/rotary")
    other.write_text(text.replace('method = "alibi"', 'method = "rotary"'))
    words = (str(other), "--nproc", "1")
    done = desk.sweep(*words)
    assert done.code == 0, done.text
    states = [line.split()[:3] for line in done.out.splitlines() if line.startswith("runs/")]
    runs = ["runs/demo/alibi", "runs/rotary"]
    assert states == [[run, "finished", "12/12"] for run in runs]
    again = desk.sweep(*words)
    assert again.code == 0 and "run 1 of" not in again.text
    for run in runs:
        assert len(list((desk.folder / run / "attempts").glob("0*"))) == 1


def test_an_edit_of_the_config_during_a_sweep_changes_no_run(desk):
    """Nor one of its base: the runs that have not begun train what the sweep was asked for."""
    (desk.folder / "base.toml").write_text(Path(CONFIG).read_text())
    (desk.folder / "mine.toml").write_text('base = "base.toml"\n')
    words = ("--nproc", "2", "--set", "run.seed=6", "--over", "position.method=alibi,rotary,t5")
    done = desk.sweep(*words, config="mine.toml")
    assert done.code == 0, done.text
    assert "hidden_size = 64" in (desk.folder / "base.toml").read_text()
    for method in ("alibi", "rotary", "t5"):
        config = load_config(desk.folder / BASE / method / "config.toml")
        assert (config.position.method, config.model.hidden_size) == (method, 128)
