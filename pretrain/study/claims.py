"""The claims of "Train Short, Test Long", and how a study's results are judged by them.

Each claim has one threshold for all studies, which stands here with where it comes from. `judge`
gives each claim a verdict: it passes, it fails, or it cannot be judged from these runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.study import predicates
from pretrain.study.evidence import Case, Evidence, Verdict, combined

EQUAL = 1.05
"""A perplexity has held up to this many times its value at L, and has degraded from there on."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    id: str
    statement: str
    source: str
    """Where the paper says it, and which of the tables in published.toml show it."""
    threshold: float
    """The ratio that the measured one is compared with."""
    threshold_source: str
    judge: predicates.Predicate


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict and the cases that it stands on."""

    claim: Claim
    verdict: Verdict
    cases: tuple[Case, ...]

    @property
    def deciding(self) -> list[Case]:
        """Return the cases that made the verdict."""
        return [case for case in self.cases if case.verdict == self.verdict]


def judge(evidence: Evidence) -> list[Judgement]:
    """Return the verdict on every claim.

    A claim fails when it fails at one training length. It cannot be judged when it lies inside the
    noise at one of them, when a run of it predicts no better than token frequencies, or when
    nothing that it needs was measured.
    """
    found = []
    for claim in CLAIMS:
        cases = tuple(map(evidence.checked, claim.judge(evidence, claim.threshold)))
        found.append(Judgement(claim, combined([case.verdict for case in cases]), cases))
    return found


_WIKITEXT = "WikiText-103 tables of the appendix (wikitext103"
CLAIMS = (
    Claim(
        "alibi_falls_to_2L",
        "ALiBi trained at L has a lower perplexity at 2 L than at L (nonoverlapping).",
        f"Figure 1; {_WIKITEXT}.alibi_nonoverlapping)",
        1.0,
        "Equality: any difference that the noise does not hide counts.",
        predicates.falls,
    ),
    Claim(
        "alibi_stays_near_best_to_16L",
        "From 2 L to 16 L, the perplexity of ALiBi trained at L rises at most 3 % above its best "
        "at any shorter length (nonoverlapping).",
        f"Figure 1; {_WIKITEXT}.alibi_nonoverlapping)",
        1.03,
        "The largest published rise above the best is 2.6 %, of the 1.3B model trained at 512 "
        "(9.54 at 2048, 9.30 at 1024; cc100_roberta.equal_updates.alibi_512).",
        predicates.stays,
    ),
    Claim(
        "alibi_is_flat_when_sliding",
        "With sliding windows, ALiBi stays within 3 % of its perplexity at L at every longer "
        "length up to 16 L that was evaluated.",
        f"{_WIKITEXT}.sliding_stride1)",
        1.03,
        "The largest published change is 2.6 %, trained at 1024 (17.92 at 3072, 17.46 at 1024).",
        predicates.is_flat,
    ),
    Claim(
        "alibi_no_worse_than_sinusoidal_at_L",
        "At the training length, ALiBi's perplexity is at most 2 % above that of sinusoidal "
        "positions (nonoverlapping).",
        f"{_WIKITEXT}.same_length_nonoverlapping and .alibi_nonoverlapping)",
        1.02,
        "The largest published excess is 1.5 % (28.46 against 28.03 at L = 64); from L = 256 on "
        "ALiBi is ahead there.",
        predicates.no_worse,
    ),
    Claim(
        "alibi_at_2L_matches_sinusoidal_trained_at_2L",
        "At 2 L, ALiBi trained at L is at most 4 % above sinusoidal positions trained at 2 L "
        "(nonoverlapping).",
        f"Abstract (L = 1024, 1.3B parameters); {_WIKITEXT}.alibi_nonoverlapping and "
        ".same_length_nonoverlapping)",
        1.04,
        "The largest published excess is 3.7 % (24.70 against 23.81 at L = 64); from L = 256 on "
        "ALiBi is ahead in the WikiText-103 tables, and at most 1.6 % behind in the 1.3B models.",
        predicates.short_for_long,
    ),
    Claim(
        "sinusoidal_degrades_at_once",
        "Sinusoidal positions get worse at once: perplexity at 2 L is at least 5 % above that at "
        "L.",
        f"Figure 1; {_WIKITEXT}.sliding_stride1.sinusoidal_512); "
        "cc100_roberta.equal_updates.sinusoidal_512 and .sinusoidal_1024",
        EQUAL,
        "Chosen for small models, which have less to lose; the published perplexities are 3.8 to "
        "11 times those at L.",
        predicates.degrades_at_once,
    ),
    Claim(
        "rotary_holds_for_100_tokens",
        "Rotary positions hold for 100 to 200 tokens beyond L: perplexity at most 5 % above that "
        "at L, at the longest length up to L + 128.",
        "Figure 1; published.toml has no numbers of it",
        EQUAL,
        "Chosen: the same line between holding and degrading for every method.",
        predicates.holds("rotary", 128),
    ),
    Claim(
        "rotary_degrades",
        "Rotary positions degrade beyond that: perplexity at the longest length from L + 400 on is "
        "at least 5 % above that at L.",
        "Figure 1; published.toml has no numbers of it",
        EQUAL,
        "Chosen: the same line between holding and degrading for every method.",
        predicates.rotary_degrades,
    ),
    Claim(
        "t5_holds_for_500_tokens",
        "The T5 bias holds for some hundreds of tokens beyond L: perplexity at most 5 % above that "
        "at L, at the longest length up to L + 512.",
        f"Figure 1; {_WIKITEXT}.sliding_stride1.t5_512)",
        EQUAL,
        "The published rise at L + 512 is 3.3 % (18.51 at 1024, 17.92 at 512).",
        predicates.holds("t5", 512),
    ),
    Claim(
        "order_of_extrapolation",
        "At the longest length from 4 L to 16 L, ALiBi has the lowest perplexity, then the T5 "
        "bias, then rotary and then sinusoidal positions, all trained at L.",
        f"Figure 1; {_WIKITEXT}.sliding_stride1), which has no rotary positions",
        1.0,
        "Equality: any difference that the noise does not hide counts.",
        predicates.in_order,
    ),
    Claim(
        "trained_slopes_extrapolate_worse",
        "At the longest length from 4 L to 16 L, ALiBi with fixed slopes has a lower perplexity "
        "than with trained ones.",
        "The text on trainable slopes; published.toml has no numbers of it",
        1.0,
        "Equality: any difference that the noise does not hide counts.",
        predicates.trained_slopes,
    ),
    Claim(
        "alibi_trains_as_fast",
        "ALiBi trains at 97 % of the tokens per second of sinusoidal positions or more.",
        "Efficiency table (efficiency_v100)",
        0.97,
        "The lowest published share is 99.2 % in training and 98.2 % in evaluation.",
        predicates.as_fast("training"),
    ),
    Claim(
        "alibi_evaluates_as_fast",
        "ALiBi evaluates at 97 % of the tokens per second of sinusoidal positions or more.",
        "Efficiency table (efficiency_v100)",
        0.97,
        "The lowest published share is 99.2 % in training and 98.2 % in evaluation.",
        predicates.as_fast("evaluation"),
    ),
    Claim(
        "alibi_needs_no_more_memory",
        "ALiBi needs at most 0.7 % more memory than sinusoidal positions.",
        "Efficiency table (efficiency_v100)",
        1.007,
        "The published increase is 0 to 0.7 %.",
        predicates.as_small,
    ),
)
"""All claims, in the order of the report."""
