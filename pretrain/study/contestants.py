"""Turn the options of a comparison into configs, before anything slow is imported."""

from __future__ import annotations

from pathlib import Path

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.config.overrides import check_beside


def with_methods(file: Path, overrides: list[str], methods: str | None) -> list[RunConfig]:
    """Return a config for each method, alike in all else.

    Args:
        file: The config file.
        overrides: `section.key=value` settings.
        methods: Values of position.method, separated by commas; None for the config's own.

    Raises:
        ConfigError: The config is wrong with one of them.
    """
    check_beside(overrides, {"--methods": (methods, "position.method")})
    settings = [[]] if methods is None else [[f"position.method={m}"] for m in names(methods)]
    return [load_config(file, [*overrides, *each]) for each in settings]


def with_lengths(
    file: Path, overrides: list[str], methods: str, lengths: str | None
) -> list[RunConfig]:
    """Return a config for each method and training length, alike in all else.

    A step and a micro batch keep their tokens: their sequences become fewer as they become longer.

    Args:
        file: The config file.
        overrides: `section.key=value` settings.
        methods: Values of position.method, separated by commas.
        lengths: Training lengths in tokens, separated by commas; None for the config's own.

    Raises:
        ConfigError: The config is wrong, or a length does not divide the tokens of a step or of a
            micro batch.
    """
    options = {
        "--methods": (methods, "position.method"),
        "--lengths": (lengths, "data.sequence_length"),
    }
    # First the config by itself, so that a wrong value is named as such.
    given = load_config(file, overrides)
    check_beside(overrides, options)
    own = given.data.sequence_length
    chosen = parse_lengths(lengths) if lengths is not None else [own]
    configs = []
    for method in names(methods):
        for length in chosen:
            settings = [f"position.method={method}", f"data.sequence_length={length}"]
            for key in ("global_batch_size", "micro_batch_size"):
                tokens = getattr(given.batch, key) * own
                if tokens % length:
                    raise ConfigError(
                        f"--lengths {length}: does not divide the {tokens:,} tokens of "
                        f"batch.{key} = {getattr(given.batch, key)} x {own}. Choose lengths that "
                        f"do, or --set batch.{key}"
                    )
                settings.append(f"batch.{key}={tokens // length}")
            configs.append(load_config(file, [*overrides, *settings]))
    return configs


def names(methods: str) -> list[str]:
    """Return the names of --methods, each once."""
    parsed = list(dict.fromkeys(methods.split(",")))
    # An empty value would remove the key, and measure its default in place of what was asked.
    if not all(parsed):
        raise ConfigError(
            f"--methods {methods}: expected values of position.method separated by commas, as in "
            "--methods alibi,sinusoidal"
        )
    return parsed


def parse_lengths(lengths: str) -> list[int]:
    """Return the numbers of --lengths, each once."""
    try:
        parsed = list(dict.fromkeys(int(length) for length in lengths.split(",")))
    except ValueError:
        parsed = [0]
    if min(parsed) < 1:
        raise ConfigError(
            f"--lengths {lengths}: expected numbers of tokens separated by commas, as in "
            "--lengths 64,128"
        )
    return parsed
