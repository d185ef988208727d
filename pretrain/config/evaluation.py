"""Parse what an evaluation shall measure.

`pretrain evaluate` takes these options on its command line, and the launcher passes them on to the
evaluation job of every checkpoint, so both read and write them here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.errors import ConfigError

PROTOCOLS = ("nonoverlapping", "sliding")


@dataclass(frozen=True)
class EvaluationRequest:
    """The options of an evaluation; a field that is None takes the value of the run's config."""

    lengths: tuple[int, ...] | None
    """Window lengths in tokens."""

    protocols: tuple[str, ...]
    """Names out of PROTOCOLS."""

    stride: int | None
    """Tokens by which a sliding window moves on, which is also how many of its predictions are
    scored."""

    max_tokens: int | None
    """The most tokens of the validation stream to score."""

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
        return EvaluationRequest(parsed, names, stride, max_tokens)

    def options(self) -> list[str]:
        """Return the command-line arguments from which `parse` builds this request again."""
        options = ["--protocols", ",".join(self.protocols)]
        if self.lengths is not None:
            options += ["--lengths", ",".join(map(str, self.lengths))]
        for option, value in (("--stride", self.stride), ("--max-tokens", self.max_tokens)):
            options += [option, str(value)] if value is not None else []
        return options

    def overrides(self) -> list[str]:
        """Return this request as `--set` overrides ("section.key=value") of a run's config."""
        asked = {"lengths": self.lengths, "stride": self.stride, "max_tokens": self.max_tokens}
        settings = [
            f"evaluation.{key}={list(v) if isinstance(v, tuple) else v}"
            for key, v in asked.items()
            if v is not None
        ]
        # The run's own stride was chosen for its own lengths and may be longer than the shortest
        # new one. Removing it brings back the default, which follows the lengths.
        if self.lengths is not None and self.stride is None:
            settings.append("evaluation.stride=")
        return settings
