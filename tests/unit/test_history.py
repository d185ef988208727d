"""Lines of descent, what is set aside, the fence before publication, holds and retention."""

import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.config import ConfigError, NoSpace, RunFailed
from pretrain.config.errors import refused
from pretrain.rundir import checkpoints
from pretrain.rundir.attempts import Attempt, AttemptRecord, Ended, Owner, poisoned
from pretrain.rundir.checkpoints import (
    MANIFEST,
    Branch,
    Lineage,
    Superseded,
    begin_partial,
    check_room,
    check_still_holds,
    checkpoint_directory,
    checkpoints_awaiting_evaluation,
    checkpoints_to_resume,
    complete_checkpoints,
    find_checkpoint,
    hold,
    publish_checkpoint,
    read_lineage,
    unheld,
    writing_as_holder,
)
from pretrain.rundir.history import (
    Policy,
    begins_branch,
    old_checkpoints,
    recover,
    removable,
    remove_old,
    settle,
)
from pretrain.rundir.metrics import WarnOnce
from pretrain.rundir.paths import RunPaths
from tests.end_to_end.commands import ROOT, TIMEOUT_SECONDS, wait_for

TRUNK = (Branch("trunk", 0),)


def write(path: Path, step: int, branches: tuple[Branch, ...] = TRUNK, **keys: object) -> Path:
    """Make a checkpoint whose manifest holds only its ancestry."""
    path.mkdir(parents=True)
    listed = [{"id": branch.id, "since": branch.since} for branch in branches]
    manifest = {"id": f"{branches[-1].id}-{step}", "step": step, "parent": None}
    (path / MANIFEST).write_text(json.dumps({**manifest, "branches": listed, **keys}))
    return path


def run_of(tmp_path: Path, *steps: int) -> Path:
    for step in steps:
        write(checkpoint_directory(tmp_path, step), step)
    return tmp_path


def names(paths) -> list[int]:
    return [int(path.name[5:]) for path in paths]


def lineage(step: int, *branches: Branch) -> Lineage:
    return Lineage(f"{branches[-1].id}-{step}", step, None, branches)


# ---- ancestry ------------------------------------------------------------------------------------
def test_ancestry_against_a_tree_that_is_walked():
    """A random tree of checkpoints, whose ancestors are found by following parents."""
    numbers = random.Random(5)
    nodes = [(lineage(1, Branch("0", 0)), None)]
    for number in range(1, 60):
        parent, _ = nodes[numbers.randrange(len(nodes))]
        step = parent.step + numbers.randrange(1, 4)
        is_tip = not any(other is parent for _, other in nodes)
        branches = parent.branches
        if not is_tip:
            branches = (*branches, Branch(str(number), parent.step))
        nodes.append((Lineage(f"n{number}", step, parent.id, branches), parent))
    parents = {node.id: parent for node, parent in nodes}

    def ancestors(node: Lineage) -> list[Lineage]:
        above = parents[node.id]
        return [node, *(ancestors(above) if above else [])]

    for node, _ in nodes:
        for other, _ in nodes:
            assert node.is_ancestor_of(other) == (node in ancestors(other)), (node, other)
            common = [a.step for a in ancestors(node) if a in ancestors(other)]
            assert node.last_common_step(other) == max(common)


# ---- setting aside -------------------------------------------------------------------------------
def test_whatever_moment_a_kill_comes_at_the_run_has_one_line_and_loses_nothing(
    tmp_path, monkeypatch
):
    """Every rename and every write of the move is the last one of some killed process."""
    kills = 0
    for last in range(100):
        run = run_of(tmp_path / str(last), 2, 4, 6, 8)
        for name in ("step-00000004", "step-00000008"):
            (run / "evaluations" / name).mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 10)))
        path = checkpoint_directory(run, 4)
        found = read_lineage(path)
        renames = []

        def rename(self, target, real=Path.rename, renames=renames, last=last):
            if len(renames) == last:
                raise KeyboardInterrupt
            renames.append(target)
            return real(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            patch.setattr(Path, "replace", lambda self, target, f=rename: f(self, target))
            try:
                settle(run, path, found)
            except KeyboardInterrupt:
                kills += 1
                # It goes on from the checkpoint that it had, or all of them have moved.
                [newest, *_] = names(checkpoints_to_resume(run))
                assert newest == 8 or names(complete_checkpoints(run)) == [2, 4]
        settle(run, path, found)
        assert settle(run, path, found) is None
        assert names(complete_checkpoints(run)) == [2, 4]
        aside = run / "abandoned"
        assert names(sorted(aside.glob("*/step-*"))) == [6, 8]
        assert list(aside.glob("*/evaluations/step-00000008"))
        assert (run / "evaluations/step-00000004").exists()
        lines = [path.read_text() for path in aside.glob("*/metrics.jsonl")]
        assert "".join(f'{{"step": {n}}}\n' for n in range(5, 10)) in lines
        kept = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
        assert kept == [1, 2, 3, 4]
        if len(renames) < last:
            break
    assert kills >= 6
    (path / "manifest.json").unlink()
    assert names(checkpoints_to_resume(run)) == [4, 2]


def test_a_branch_begins_where_its_checkpoints_could_be_taken_for_others(tmp_path):
    run = run_of(tmp_path, 2, 4)
    newest = checkpoint_directory(run, 4)
    assert not begins_branch(run, newest, read_lineage(newest))
    old = checkpoint_directory(run, 2)
    assert begins_branch(run, old, read_lineage(old))
    assert begins_branch(run, write(tmp_path / "copy/step-00000004", 4), read_lineage(newest))
    # What was set aside counts too, unless it left the branch before.
    left = write(run / "abandoned/0001/step-00000009", 9, (*TRUNK, Branch("b", 3)))
    assert not begins_branch(run, newest, read_lineage(newest))
    write(run / "abandoned/0002/step-00000006", 6)
    assert begins_branch(run, newest, read_lineage(newest))
    assert left.exists()


def test_evaluations_follow_the_line_of_the_newest(tmp_path):
    run = run_of(tmp_path, 2, 4)
    RunPaths(run).evaluations.mkdir()
    RunPaths(run).evaluation_plan.write_text("{}")
    write(checkpoint_directory(run, 3), 3, (Branch("other", 0),))
    assert names(checkpoints_awaiting_evaluation(run)) == [2, 4]
    write(run / "abandoned/0001/step-00000001", 1)
    assert names(checkpoints_awaiting_evaluation(run)) == [2, 4]
    # Paused by `launcher cancel`, no job is sent for them, and none is deleted.
    paths = RunPaths(run)
    paths.evaluation_plan.rename(paths.paused_evaluation_plan)
    write(checkpoint_directory(run, 6), 6)
    assert checkpoints_awaiting_evaluation(run) == []
    assert old_checkpoints(run, checkpoint_directory(run, 6), Policy(keep=1)) == []
    paths.paused_evaluation_plan.unlink()
    old = old_checkpoints(run, checkpoint_directory(run, 6), Policy(keep=1))
    assert names(old) == [2]
    with pytest.raises(ConfigError, match="cannot be known"):
        find_checkpoint(run)


# ---- publication ---------------------------------------------------------------------------------
def saving(attempt: Attempt, step: int) -> tuple[Path, Path]:
    partial = begin_partial(attempt.run, step, attempt.directory)
    (partial / MANIFEST).write_text("{}")
    return partial, checkpoint_directory(attempt.run, step)


def test_a_publisher_that_was_suspended_after_the_check_publishes_nothing(tmp_path, monkeypatch):
    """The new holder has taken the run, and saved the same step, between check and rename."""
    first = Attempt.begin(tmp_path)
    partial, final = saving(first, 8)
    passed = []

    def check(attempt):
        check_still_holds(attempt)
        if not passed:
            passed.append(attempt)
            first.end("failed", 1, "", 0)
            second = Attempt.begin(tmp_path)
            recover(tmp_path, second.directory)
            own, _ = saving(second, 8)
            (own / "whose").write_text("the second's")
            publish_checkpoint(own, final, second.directory)

    monkeypatch.setattr(checkpoints, "check_still_holds", check)
    with pytest.raises(Superseded):
        publish_checkpoint(partial, final, first.directory)
    assert (final / "whose").read_text() == "the second's"


def test_a_writer_that_was_suspended_names_the_new_holder_and_not_the_disk(tmp_path):
    """The new holder has removed the folder to which the old one goes on to write."""
    first = Attempt.begin(tmp_path)
    partial, final = saving(first, 8)
    refused = pytest.raises(RunFailed, match="cannot be written")
    with refused, writing_as_holder(final, first.directory):
        (partial / "none/tokenizer.model").write_bytes(b"")
    first.end("failed", 1, "", 0)
    recover(tmp_path, Attempt.begin(tmp_path).directory)
    superseded = pytest.raises(Superseded, match="attempt 2 has taken this run over")
    with superseded, writing_as_holder(final, first.directory):
        (partial / "tokenizer.model").write_bytes(b"")


def test_a_save_that_still_writes_loses_its_folder_at_once(tmp_path):
    """An orphaned writer of an old attempt makes files while its folder is removed."""
    first = Attempt.begin(tmp_path)
    partial, _ = saving(first, 8)
    code = (
        "import sys, itertools\n"
        "for n in itertools.count():\n"
        "    open(f'{sys.argv[1]}/{n}', 'w').close()\n"
        "    n or print('writes', flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(partial)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"writes\n"
    first.end("failed", 1, "", 0)
    recover(tmp_path, Attempt.begin(tmp_path).directory)
    _, errors = writer.communicate(timeout=TIMEOUT_SECONDS)
    assert b"FileNotFoundError" in errors
    recover(tmp_path, None)
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_checkpoint_without_room_is_refused(tmp_path):
    check_room(tmp_path / "not/yet/there", 1)
    with pytest.raises(NoSpace, match=r"takes 1000000000.0 GB \(10{18} bytes\), but .* are free"):
        check_room(tmp_path / "not/yet/there", 10**18)
    assert issubclass(NoSpace, RunFailed) and os.listdir(tmp_path) == []
    # As NumPy says it.
    assert isinstance(refused(OSError("262144 requested and 41952 written")), NoSpace)


# ---- holds ---------------------------------------------------------------------------------------
HOLDER = """
import sys, time
from pathlib import Path
from pretrain.rundir.checkpoints import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_what_a_process_reads_is_passed_over_until_it_ends(tmp_path):
    run = run_of(tmp_path, 2, 4, 6, 8)
    command = [sys.executable, "-c", HOLDER, str(checkpoint_directory(run, 2))]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    newest, warn = checkpoint_directory(run, 8), WarnOnce()
    # Two readers at once, and one that has ended.
    with hold(checkpoint_directory(run, 2)), hold(checkpoint_directory(run, 4)):
        pass
    remove_old(run, newest, Policy(keep=1), warn)
    assert names(complete_checkpoints(run)) == [2, 6, 8]
    holder.kill()
    holder.wait()
    holder.stdout.close()
    remove_old(run, newest, Policy(keep=1), warn)
    # The newest is on probation, so the one before it stays as well.
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000006", "step-00000008"]


def test_a_reader_that_comes_while_a_checkpoint_is_deleted_is_told(tmp_path):
    path = checkpoint_directory(run_of(tmp_path, 2, 4), 2)
    told = multiprocessing.get_context("fork").SimpleQueue()

    def read():
        try:
            with hold(path):
                told.put("held")
        except ConfigError as error:
            told.put(str(error))

    with unheld(path) as is_unheld:
        assert is_unheld
        reader = multiprocessing.get_context("fork").Process(target=read)
        reader.start()
        # proc_locks(5): a line of who waits for a lock has an arrow.
        waits = rf"-> .* {reader.pid} "
        wait_for(lambda: re.search(waits, Path("/proc/locks").read_text()))
        path.rename(path.with_name(".gone"))
    assert "deleted a moment ago" in told.get()
    reader.join()


# Of each attempt: the step and the line of the newest checkpoint when it began, and its exit code.
FROM_4 = (4, "trunk", 83)


@pytest.mark.parametrize(
    ("steps", "ends", "code", "is_passed_over"),
    [
        ((2, 4), [FROM_4, FROM_4], None, True),
        # The supervisor decides before it records how the last attempt ended.
        ((2, 4), [FROM_4, (4, "trunk", None)], 83, True),
        ((2, 4), [FROM_4, (4, "trunk", None)], None, False),
        # Other failures say nothing about the checkpoint.
        ((2, 4), [FROM_4, (4, "trunk", 1)], None, False),
        # Another save proves it.
        ((2, 4, 6), [FROM_4, FROM_4], None, False),
        # Trained from step 2 again it is poisoned as well, so the cause is not in the checkpoint.
        ((2, 4), [(4, "before", 83), (4, "before", 83), FROM_4, FROM_4], None, False),
        # There is nothing to go back to.
        ((4,), [FROM_4, FROM_4], None, False),
    ],
)
def test_a_checkpoint_on_probation_is_poisoned_by_two_attempts(
    tmp_path, steps, ends, code, is_passed_over
):
    run = run_of(tmp_path, *steps)
    attempts = [
        AttemptRecord(
            number,
            run,
            Owner(checkpoint_step=step, checkpoint_id=f"{line}-{step}"),
            ended=None if end is None else Ended(0.0, end, "poisoned", "", step),
        )
        for number, (step, line, end) in enumerate(ends, 1)
    ]
    expected = [checkpoint_directory(run, 4)] * is_passed_over
    assert list(poisoned(run, attempts, code)) == expected


def test_what_is_of_another_line_or_damaged_is_never_deleted(tmp_path):
    run = run_of(tmp_path, 1, 2, 4, 6)
    write(checkpoint_directory(run, 3), 3, (Branch("other", 0),))
    write(checkpoint_directory(run, 5), 2)
    write(checkpoint_directory(run, 7), 7, (Branch("other", 0),))
    (checkpoint_directory(run, 2) / MANIFEST).write_text("{")
    remove_old(run, checkpoint_directory(run, 6), Policy(keep=1), WarnOnce())
    assert names(complete_checkpoints(run)) == [2, 3, 4, 5, 6, 7]


# ---- retention -----------------------------------------------------------------------------------
def test_retention_keeps_what_it_must():
    """Random runs and policies: every rule is checked by itself, and nothing else is kept."""
    numbers = random.Random(11)
    for _ in range(3000):
        steps = numbers.sample(range(1, 60), numbers.randrange(1, 12))
        loss = {s: numbers.choice([None, float("nan"), numbers.random()]) for s in steps}
        policy = Policy(
            numbers.choice([None, 1, 2, 5]),
            numbers.choice([None, 3, 10]),
            numbers.choice([0, 1, 3]),
        )
        wanted = set(numbers.sample(steps, numbers.randrange(0, 2)))
        gone = removable(loss, policy, wanted)
        kept = set(steps) - set(gone)
        assert gone == sorted(gone) and set(gone) <= set(steps) and kept
        assert max(steps) in kept and wanted <= kept
        if policy.keep is None:
            assert not gone
            continue
        newest = set(sorted(steps)[-max(policy.keep, 2) :])
        regular = {s for s in steps if policy.keep_every and s % policy.keep_every == 0}
        finite = [s for s in steps if loss[s] is not None and loss[s] == loss[s]]
        best = set(sorted(finite, key=lambda s: (loss[s], -s))[: policy.keep_best])
        assert kept == newest | regular | best | wanted
