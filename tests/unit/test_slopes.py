"""The slopes of ALiBi: the ways to write them, and what each of them means."""

from __future__ import annotations

import itertools
import tomllib

import pytest

from pretrain.config import ConfigError, RunConfig, dump_config, parse_config
from pretrain.config.trajectory import differences, settings_hash
from pretrain.positions.alibi import SlopeRange, _values, published_slopes
from tests.conftest import TINY, tiny_config

RANGE = {"first": 0.5, "last": 2.0**-8}


def slopes(value: object, **model: object):
    return tiny_config(position={"slopes": value}, model=model)


def of_heads(config: RunConfig) -> tuple[float, ...]:
    return config.position.head_slopes(config)


def test_a_range_is_geometric_and_its_ends_are_exact():
    # Section 3 of the paper: for 8 heads 1/2, 1/4, ..., 1/256.
    assert of_heads(slopes(RANGE)) == pytest.approx([2.0**-k for k in range(1, 9)], rel=1e-15)
    found = of_heads(slopes({"first": 0.9, "last": 0.0039}, num_attention_heads=12))
    assert (found[0], found[-1], len(found)) == (0.9, 0.0039, 12)
    ratios = [b / a for a, b in itertools.pairwise(found)]
    assert ratios == pytest.approx([(0.0039 / 0.9) ** (1 / 11)] * 11, rel=1e-12)
    assert of_heads(slopes({"first": 0.3, "last": 0.3}, num_attention_heads=1)) == (0.3,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[0.5, 0, 1, 0.25, 100, 1e-3, 0.125, 2]", (0.5, 0, 1, 0.25, 100, 1e-3, 0.125, 2)),
        ("{first = 0.5, last = 0.00390625}", tuple(2.0**-k for k in range(1, 9))),
        ("{bias_max = 16}", tuple(4.0**-k for k in range(1, 9))),
        ("{factor = 0.25}", tuple(2.0 ** -(k + 2) for k in range(1, 9))),
        ("{factor = 4, bias_max = 16}", tuple(4.0 ** (1 - k) for k in range(1, 9))),
        # Of k = 1 to 8, the steepest stays and the flattest is halved 7 times 2/7 octaves.
        (
            "{factor = 0.25, by_head = true}",
            tuple(2.0 ** -(k + 2 * (k - 1) / 7) for k in range(1, 9)),
        ),
        ("published", tuple(2.0**-k for k in range(1, 9))),
        ('"published"', tuple(2.0**-k for k in range(1, 9))),
    ],
)
def test_every_form_is_set_on_the_command_line_and_read_back(text, expected):
    config = parse_config(TINY, "tiny", [f"position.slopes={text}"])
    assert of_heads(config) == pytest.approx(expected, rel=1e-15)
    assert parse_config(tomllib.loads(dump_config(config)), "dumped") == config


def test_slopes_belong_to_alibi():
    with pytest.raises(ConfigError, match=r'position\.method = "rotary" has the keys rotary_base'):
        tiny_config(position={"slopes": RANGE, "method": "rotary"})
    one = {"num_attention_heads": 1}
    with pytest.raises(ConfigError, match="one head has one slope"):
        slopes(RANGE, **one)


def test_other_slopes_are_another_model():
    """Curves of different slopes are no seeds of one run, and a run keeps its slopes."""
    published, other = tiny_config(), slopes({"first": 0.9, "last": 0.01})
    (found,) = differences(published, other)
    assert found.key == "position.slopes"
    assert found.effect == "function"
    assert settings_hash(published, "data") != settings_hash(other, "data")
    # How they are written does not matter.
    same = slopes(list(of_heads(other)))
    assert differences(other, same) == []
    for form in ({"factor": 1.0}, {"bias_max": 8}, RANGE, [2.0**-k for k in range(1, 9)]):
        assert differences(published, slopes(form)) == []
        assert slopes(form).position_name == "alibi"
        assert slopes(form).position.description(published) == "alibi"
    assert other.position_name == same.position_name == "alibi_other_slopes"
    assert settings_hash(other, "data") == settings_hash(same, "data")


def test_the_formula_of_the_papers_text_is_a_range():
    """The authors' code, which "published" follows, has other slopes where n is no power of two."""
    differ = []
    for n in range(2, 67):
        formula = [2 ** (-8 * (h + 1) / n) for h in range(n)]
        assert _values(SlopeRange(first=2 ** (-8 / n), last=2.0**-8), n) == pytest.approx(formula)
        if published_slopes(n) != pytest.approx(formula):
            differ.append(n)
    assert differ == [n for n in range(2, 67) if n & (n - 1)]
