"""Test the driver of benchmarks/gpu_day: parts that end, fail or are cut off."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_day import __main__ as gpu_day
from benchmarks.gpu_day.parts import PARTS, Part
from benchmarks.gpu_day.results import state
from benchmarks.gpu_day.sizes import CONFIG, device_name
from benchmarks.gpu_day.step_split import CLASSES, LINES, OTHER
from pretrain.config import load_config
from pretrain.plan.command import read_target
from pretrain.plan.memory import stages_of
from pretrain.plan.timing import time_of_step

ROOT = Path(__file__).parents[2]


def part(tmp_path, name: str, code: str, seconds: int = 60, codes=(0,)) -> Part:
    """Return a part that runs `code`, found as a module of that name."""
    (tmp_path / f"{name}.py").write_text(f"import sys\nout = sys.argv[1]\n{code}")
    return Part(name, f"Does {name} work?", seconds, seconds, (name, "OUT"), codes)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command over parts made of Python code, and return its exit code."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(parts, *arguments) -> int:
        monkeypatch.setattr(gpu_day, "PARTS", parts)
        monkeypatch.setattr(sys, "argv", ["gpu_day", "--out", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as end:
            gpu_day.main()
        return int(end.value.code)

    return run


def test_a_crash_ends_one_part_which_alone_is_repeated(tmp_path, run, capsys):
    """A part that finds a fault is complete, and no success; one that may not end is not begun."""
    parts = [
        part(tmp_path, "breaks", "print('half', flush=True)\nraise RuntimeError('no memory left')"),
        part(tmp_path, "finds", "open(out + '/runs', 'a').write('x'); sys.exit(3)", codes=(0, 3)),
        part(tmp_path, "long", "", seconds=500),
    ]
    assert run(parts, "--budget-seconds", "100") == 1
    assert not state(tmp_path / "out", "breaks")["complete"]
    assert state(tmp_path / "out", "finds")["complete"] and not state(tmp_path / "out", "long")
    assert "no memory left" in capsys.readouterr().out
    summary = (tmp_path / "out/summary.md").read_text()
    assert "half" in summary and "no memory left" in summary
    (tmp_path / "breaks.py").write_text("")
    assert run(parts) == 0 and (tmp_path / "out/runs").read_text() == "x"
    assert "finds: complete at commit" in capsys.readouterr().out


@pytest.mark.parametrize(("share", "first"), [(0.3, 5), (0.5, 4), (0.7, 3)])
def test_fifteen_minutes_show_the_step_and_the_product_and_no_call_is_wasted(
    tmp_path, share, first
):
    """Each part takes this share of its limit; what is cut off keeps half of what it did.

    A machine is lent for 15 minutes in all, of which starting it takes some, and then again.
    """
    now, left = [0.0], {each.name: share * each.seconds for each in PARTS}

    def run(part: Part, seconds: float) -> bool:
        took = min(seconds, left[part.name])
        now[0] += took
        left[part.name] -= took if took == left[part.name] else took / 2
        known = {"complete": not left[part.name], "device": device_name()}
        (tmp_path / f"{part.name}.json").write_text(
            json.dumps({**known, "commit": "", "ending": ""})
        )
        return not left[part.name]

    calls = 0
    while any(left.values()):
        begin, budget = now[0], 240 if calls == 1 else 560
        gpu_day.run_parts(tmp_path, PARTS, budget, run, lambda: now[0])
        calls += 1
        assert begin < now[0] <= begin + budget
        if calls == 2:
            assert not any([left[each.name] for each in PARTS[:first]])
    total = share * sum(each.seconds for each in PARTS)
    assert now[0] <= 1.2 * total and calls <= 1.3 * total / 560 + 1


def test_every_test_that_needs_a_gpu_is_run():
    [arguments] = [each.arguments for each in PARTS if each.name == "cuda-tests"]
    chosen = [ROOT / word for word in arguments if word.startswith("tests/")]
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in p.read_text()]
    assert len(marked) > 2
    assert [p for p in marked if not {p, *p.parents} & {*chosen} and p != Path(__file__)] == []


def test_every_line_of_the_model_belongs_to_one_class():
    config = load_config(CONFIG, ["parallel.world_size=1"])
    layout = config.layout(1)
    lines = time_of_step(config, layout, stages_of(config, layout), read_target(1, "h200", None))
    claimed = [line for group in LINES.values() for line in group]
    assert sorted(claimed) == sorted(lines.lines)
    assert {*LINES} <= {*CLASSES, OTHER, "no kernel at all"}
