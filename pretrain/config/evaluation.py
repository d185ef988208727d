"""What an evaluation is asked to measure: by `pretrain evaluate`, and by the launcher for every checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.errors import ConfigError

PROTOCOLS = ("nonoverlapping", "sliding")


@dataclass(frozen=True)
class EvaluationRequest:
    """Window lengths, stride and the most tokens to score, all in tokens; None takes the run's own config."""

    lengths: tuple[int, ...] | None
    protocols: tuple[str, ...]
    stride: int | None
    max_tokens: int | None

    @staticmethod
    def parse(
        lengths: str | None, protocols: str, stride: int | None, max_tokens: int | None
    ) -> EvaluationRequest:
        """From the command line's strings. Raises ConfigError naming the option."""
        try:
            parsed = tuple(int(n) for n in lengths.split(",")) if lengths is not None else None
        except ValueError:
            raise ConfigError(
                f"--lengths {lengths}: want tokens, comma-separated, as in 128,256,512"
            ) from None
        names = tuple(protocols.split(","))
        for name in names:
            if name not in PROTOCOLS:
                raise ConfigError(f"--protocols {name}: there are {' and '.join(PROTOCOLS)}")
        for option, value in (("--stride", stride), ("--max-tokens", max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{option} {value}: want 1 or more")
        return EvaluationRequest(parsed, names, stride, max_tokens)

    def options(self) -> list[str]:
        """The command line that `parse` would read this from."""
        options = ["--protocols", ",".join(self.protocols)]
        if self.lengths is not None:
            options += ["--lengths", ",".join(map(str, self.lengths))]
        for option, value in (("--stride", self.stride), ("--max-tokens", self.max_tokens)):
            options += [option, str(value)] if value is not None else []
        return options

    def overrides(self) -> list[str]:
        """What of a run's config it changes, as --set has it. New lengths bring back the stride's own default."""
        asked = {"lengths": self.lengths, "stride": self.stride, "max_tokens": self.max_tokens}
        settings = [
            f"evaluation.{key}={list(v) if isinstance(v, tuple) else v}"
            for key, v in asked.items()
            if v is not None
        ]
        if self.lengths is not None and self.stride is None:
            settings.append("evaluation.stride=none")
        return settings
