"""Test the benchmark of attention kernels without a GPU: budget, order, report, what is timed."""

import statistics

import pytest
import torch

from pretrain.bench import attention
from pretrain.bench.attention import (
    CALLS_PER_READING,
    Case,
    Contestant,
    cpu_contestants,
    summarize,
)
from pretrain.positions.alibi import alibi_slopes

CASE = Case(length=64, head_dim=64, inputs="gaussian", backward=True, tokens=64)


class FakeTime:
    """A clock that the test moves, in place of time.monotonic and of a device's clock."""

    def __init__(self, compile_seconds, call_seconds):
        self.now = 0.0
        self.compile_seconds, self.call_seconds = compile_seconds, call_seconds
        self.compiled = 0

    def monotonic(self):
        return self.now

    def warm_up(self, call):
        call()
        self.compiled += 1
        self.now += self.compile_seconds
        return 10**6

    def measure(self, call):
        self.now += CALLS_PER_READING * self.call_seconds
        return [self.call_seconds] * CALLS_PER_READING


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs the benchmark with fake contestants and times."""

    def go(contestants, fake, lengths=(64, 128), seconds=400.0):
        monkeypatch.setattr(attention, "time", fake)
        monkeypatch.setattr(attention, "CpuClock", lambda: fake)
        monkeypatch.setattr(attention, "cpu_contestants", lambda dtype: contestants)
        monkeypatch.setattr(attention, "_inputs", lambda *arguments: [])
        path = tmp_path / "report.md"
        text = attention.bench_attention(lengths, seconds, path)
        assert path.read_text() == text
        rows = [
            dict(zip(attention.COLUMNS, (cell.strip() for cell in line.split("|")[1:-1])))
            for line in text.splitlines()
            if line.startswith("| 64") or line.startswith("| 128")
        ]
        return rows

    monkeypatch.setattr(
        attention, "_call", lambda attend, leaves, backward: attend(None, None, None)
    )
    return go


def contestant(name, function=lambda q, k, v: None, **options):
    return Contestant(name, lambda case, slopes: function, **options)


@pytest.mark.parametrize("compile_seconds", [0.1, 8.0, 60.0])
def test_the_budget_includes_compilation(run, compile_seconds):
    """It ends in time, but for what is begun, and what matters most is measured."""
    fake = FakeTime(compile_seconds, call_seconds=0.02)
    rows = run([contestant("a"), contestant("b"), contestant("c", has_bias=False)], fake)
    assert len(rows) == 3 * 2 * 2 * 2
    one_turn = 3 * CALLS_PER_READING * fake.call_seconds
    assert fake.now <= 400 + compile_seconds + len(rows) * one_turn
    assert all(row["ms"] == "20.000" for row in rows[:3])
    out = [row["ms"] == attention.OUT_OF_TIME for row in rows]
    # Whatever is out of time comes last.
    assert out == sorted(out) and (sum(out) > 0) == (compile_seconds == 60)


def test_time_is_shared_and_calls_are_bounded(run):
    fake = FakeTime(compile_seconds=1.0, call_seconds=0.5)
    rows = run([contestant("a"), contestant("b")], fake, lengths=(64,), seconds=100.0)
    calls = [int(row["spread"].rpartition(" of ")[2]) for row in rows]
    assert max(calls) - min(calls) <= 2 * CALLS_PER_READING and max(calls) <= 50
    fast = FakeTime(compile_seconds=0.0, call_seconds=1e-6)
    rows = run([contestant("a")], fast, lengths=(64,), seconds=100.0)
    assert {row["spread"] for row in rows} == {"±0.0 % of 50"} and fast.now < 1


def test_rows_are_written_when_a_case_is_done(run, tmp_path):
    written = []

    def attend(q, k, v):
        written.append((tmp_path / "report.md").read_text().count("\n"))

    run([contestant("a", attend)], FakeTime(0.0, 1.0), lengths=(64,), seconds=1000.0)
    # It is called once a case, since the fake clock calls nothing. The rows of all earlier cases
    # stand in the file by then.
    assert written == [written[0] + number for number in range(4)]


def test_a_failure_is_a_row(run, capsys):
    def fails(q, k, v):
        raise RuntimeError("no kernel | for this\nand more")

    refused = Contestant("refused", lambda case, slopes: "the bias is too large")
    rows = run(
        [contestant("a", fails), refused, contestant("b", missing="it is absent")],
        FakeTime(0.0, 1.0),
        lengths=(64,),
        seconds=1.0,
    )
    assert [row["ms"] for row in rows[:2]] == [
        "RuntimeError: no kernel / for this",
        "the bias is too large",
    ]
    assert {row["kernel"] for row in rows} == {"a", "refused"}
    captured = capsys.readouterr()
    assert "- b: absent, it is absent" in captured.out and "and more" in captured.err


def test_alibi_is_compared_with_the_best_kernel_without_a_bias(monkeypatch):
    entries = [
        attention.Entry(contestant("alibi", visited=lambda qkv, slopes: 0.5), seconds=[3e-3]),
        attention.Entry(contestant("slow", has_bias=False), seconds=[4e-3]),
        attention.Entry(contestant("fast", has_bias=False), seconds=[2e-3]),
    ]
    entries[0].visited, entries[0].allocated = 0.5, 3 * 10**6
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in attention._rows(CASE, entries)
    ]
    assert [row[8] for row in rows] == ["1.50", "2.00", "1.00"]
    assert rows[0][9:] == ["50 %", "3"] and rows[1][9:] == ["", ""]
    # 7 products of 2 x 64 x 16 heads x 64 x 64 tokens, half of them under the causal mask.
    assert float(rows[0][7]) == pytest.approx(7 * 64 * 16 * 64 * 64 / 3e-3 / 1e12, rel=1e-2)


def test_spread_is_half_the_distance_of_the_quartiles():
    seconds = [1.0, 2.0, 3.0, 4.0, 5.0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    assert summarize(seconds) == (middle, (high - low) / 2 / middle, 5)
    assert summarize([2.0]) == (2.0, 0.0, 1)


def test_peaked_inputs_are_timed_where_they_matter(monkeypatch):
    monkeypatch.setattr(attention, "_inputs", lambda *arguments: [])
    monkeypatch.setattr(attention, "_call", lambda attend, leaves, backward: None)
    both = [contestant("fixed"), contestant("skips", visited=lambda qkv, slopes: 0.25)]
    peaked = Case(64, 64, "peaked", True, 64)
    fake = FakeTime(0.0, 1.0)
    monkeypatch.setattr(attention, "time", fake)
    rows = attention.compare(peaked, both, torch.float32, fake, 1.0, 1.0)
    assert len(rows) == 1 and "skips" in rows[0] and "25 %" in rows[0]


@torch.no_grad()
def test_cpu_contestants_compute_attention():
    q, k, v = (torch.randn(64, 1, 16, 64) for _ in range(3))
    slopes = alibi_slopes(16)
    outputs = {
        each.name: each.make(CASE, slopes)(q, k, v)
        for each in cpu_contestants(torch.float32)
        if each.missing is None
    }
    exact = outputs.pop("SDPA flash, no bias")
    assert len(outputs) == 2
    for output in outputs.values():
        assert (output - exact).abs().max() > 0.1
        torch.testing.assert_close(output, next(iter(outputs.values())), rtol=0, atol=1e-5)
