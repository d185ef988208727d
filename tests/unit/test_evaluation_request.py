"""What an evaluation is asked to measure, applied to a run's config."""

from __future__ import annotations

import pytest

from pretrain.config import ConfigError, EvaluationRequest, load_config
from pretrain.evaluation.windows import choose_protocols
from tests.changed import ROOT
from tests.conftest import tiny_config

DEMO = ROOT / "configs/demo.toml"


def request(lengths=None, stride=None, max_tokens=None) -> EvaluationRequest:
    return EvaluationRequest(lengths, ("nonoverlapping", "sliding"), stride, max_tokens)


def test_max_tokens_of_the_run_is_not_the_requests():
    demo = load_config(DEMO)
    assert demo.evaluation.max_tokens == 16_384
    assert request().applied_to(demo, "demo").evaluation.max_tokens is None
    assert request(max_tokens=9).applied_to(demo, "demo").evaluation.max_tokens == 9
    # All else of the run stays.
    applied = request().applied_to(demo, "demo")
    assert applied.evaluation.lengths == demo.evaluation.lengths
    assert applied.evaluation.stride == 64 and applied.model == demo.model


@pytest.mark.parametrize(
    ("lengths", "stride", "expected"),
    [((64, 256), None, 64), ((32, 256), None, 32), ((32, 256), 16, 16), (None, None, 64)],
)
def test_the_stride_of_the_run_stays_where_no_length_is_shorter(lengths, stride, expected):
    asked = request(lengths, stride).applied_to(load_config(DEMO), "demo")
    assert asked.evaluation_stride == expected


@pytest.mark.parametrize("lengths", ["0", "32,0", "-1"])
def test_no_length_of_no_tokens_is_asked_for(lengths):
    """The config of the checkpoint is not to blame."""
    with pytest.raises(ConfigError, match=r"^--lengths .*: expected 1 or more tokens"):
        EvaluationRequest.parse(lengths, "sliding", None, None)


def test_what_the_model_cannot_is_refused_with_the_file():
    learned = load_config(DEMO, ["position.method=learned", "evaluation.lengths=[128]"])
    with pytest.raises(ConfigError, match=r"demo: evaluation\.lengths = 256: learned positions"):
        request((256,)).applied_to(learned, "demo")
    with pytest.raises(ConfigError, match=r"demo: evaluation\.stride = 200: longer than"):
        request(stride=200).applied_to(load_config(DEMO), "demo")


def test_protocols_at_lengths_that_repeat_are_measured_once():
    repeated = "evaluation.lengths=[128, 64, 128]"
    both = 'evaluation.protocols=["nonoverlapping", "sliding", "sliding"]'
    chosen, notes = choose_protocols(load_config(DEMO, [repeated, both]), 1000)
    assert [p.key for p in chosen] == [
        ("nonoverlapping", 128, 128),
        ("nonoverlapping", 64, 64),
        ("sliding", 64, 128),
    ]
    assert len(notes) == 1 and "64 tokens by 64 do not overlap" in notes[0]
    # Alone, the sliding protocol keeps its shortest length.
    alone = load_config(DEMO, [repeated, 'evaluation.protocols=["sliding"]'])
    chosen, notes = choose_protocols(alone, 1000)
    assert [p.key for p in chosen] == [("sliding", 64, 128), ("sliding", 64, 64)] and not notes


def test_a_text_shorter_than_the_training_length_is_refused():
    """The default lengths cannot be cut to none: nothing would be measured, and nothing said."""
    config = tiny_config(data={"sequence_length": 128}, evaluation={"lengths": None})
    assert config.evaluation_lengths == (128, 256, 512, 1024, 2048)
    words = r"128: the 100 tokens .* less than one .* up to 100 \(--lengths, .* a longer --text;"
    with pytest.raises(ConfigError, match=words):
        choose_protocols(config, 100)
