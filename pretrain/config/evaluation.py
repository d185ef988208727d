"""Parse what an evaluation shall measure.

`pretrain evaluate` takes these options on its command line, and the launcher passes them on to the
evaluation job of every checkpoint, so both read and write them here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.errors import ConfigError
from pretrain.config.load import parse_config
from pretrain.config.run import RunConfig

PROTOCOLS = ("nonoverlapping", "sliding")
MASKED = "masked"
"""What records call the protocol of a model that predicts masked tokens: windows that do not
overlap, of whose tokens those of fixed masks are predicted, from both sides. It has a name of its
own, so that no table or plot puts these perplexities beside those of a language model."""


def recorded_protocol(config: RunConfig, name: str) -> str:
    """Return what the records of a run call a protocol that is asked for by a name of PROTOCOLS."""
    return MASKED if config.is_masked and name == "nonoverlapping" else name


@dataclass(frozen=True)
class EvaluationRequest:
    """The options of an evaluation.

    Lengths and stride that are None are those of the run's config.
    """

    lengths: tuple[int, ...] | None
    """Window lengths in tokens."""

    protocols: tuple[str, ...]
    """Names out of PROTOCOLS."""

    stride: int | None
    """Tokens by which a sliding window moves on, which is also how many of its predictions are
    scored."""

    max_tokens: int | None
    """The most tokens of the validation stream to score; None scores all of them, whatever the
    run's config says about the evaluations in its training loop."""

    @staticmethod
    def parse(
        lengths: str | None, protocols: str, stride: int | None, max_tokens: int | None
    ) -> EvaluationRequest:
        """Build a request from the values of the command-line options.

        Args:
            lengths: --lengths, for example "128,256,512"; None when the option is not given.
            protocols: --protocols, for example "nonoverlapping,sliding".
            stride: --stride in tokens.
            max_tokens: --max-tokens.

        Raises:
            ConfigError: When a value is not valid. The message names the option.
        """
        try:
            parsed = tuple(int(n) for n in lengths.split(",")) if lengths is not None else None
        except ValueError:
            raise ConfigError(
                f"--lengths {lengths}: expected numbers of tokens separated by commas, "
                "as in --lengths 128,256,512"
            ) from None
        if any(length < 1 for length in parsed or ()):
            raise ConfigError(f"--lengths {lengths}: expected lengths of 1 or more tokens")
        names = tuple(protocols.split(","))
        for name in names:
            if name not in PROTOCOLS:
                raise ConfigError(
                    f"--protocols {name}: unknown protocol. Choose {' or '.join(PROTOCOLS)}, "
                    "or both separated by a comma"
                )
        for option, value in (("--stride", stride), ("--max-tokens", max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{option} {value}: expected 1 or more tokens")
        if parsed and stride is not None and stride > min(parsed):
            raise ConfigError(
                f"--stride {stride}: longer than the shortest window of --lengths, {min(parsed)} "
                f"tokens, so that windows would leave tokens out. Choose {min(parsed)} or less"
            )
        longest = max(parsed or (0,))
        if max_tokens is not None and longest > max_tokens:
            raise ConfigError(
                f"--lengths {longest}: more than the {max_tokens:,} tokens of --max-tokens, so not "
                "one window could be scored. Raise --max-tokens, or choose shorter lengths"
            )
        return EvaluationRequest(parsed, names, stride, max_tokens)

    def options(self) -> list[str]:
        """Return the command-line arguments from which `parse` builds this request again."""
        options = ["--protocols", ",".join(self.protocols)]
        if self.lengths is not None:
            options += ["--lengths", ",".join(map(str, self.lengths))]
        for option, value in (("--stride", self.stride), ("--max-tokens", self.max_tokens)):
            options += [option, str(value)] if value is not None else []
        return options

    def applied_to(self, config: RunConfig, origin: str) -> RunConfig:
        """Return a run's config with this request in its [evaluation], checked like any other.

        `evaluation.max_tokens` of the run bounds the evaluations in its training loop and is
        dropped: what the command scores is all of the text, or what --max-tokens says.

        Args:
            config: The run's config.
            origin: The file that it comes from, for messages.

        Raises:
            ConfigError: The run's model cannot be evaluated so, for example at a length beyond its
                position embeddings.
        """
        values = config.model_dump(mode="json", exclude_none=True)
        section = values["evaluation"]
        section.pop("max_tokens", None)
        if self.lengths is not None:
            section["lengths"] = list(self.lengths)
        if self.shortened_stride(config) is not None:
            # Without the key, the stride is the shortest of the new lengths.
            del section["stride"]
        asked = {"stride": self.stride, "max_tokens": self.max_tokens}
        section |= {key: value for key, value in asked.items() if value is not None}
        return parse_config(values, origin)

    def shortened_stride(self, config: RunConfig) -> int | None:
        """Return the stride in place of the run's own, where that is longer than --lengths allow.

        None where the run's own stays, or --stride names one.
        """
        own = config.evaluation.stride
        if self.lengths is None or self.stride is not None or own is None:
            return None
        shortest = min(self.lengths)
        return shortest if own > shortest else None
