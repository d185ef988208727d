"""Make and read the names of stores, which are URLs, and of the checkpoints in them."""

from __future__ import annotations

import re

from pretrain.config import ConfigError
from pretrain.rundir.checkpoints import checkpoint_name, checkpoint_step
from pretrain.rundir.lineage import Lineage

NAME = re.compile(r"(step-\d{8,})-([0-9a-f]{16})")


def is_url(text: str) -> bool:
    """Return True for what names a store: "s3://bucket/prefix"."""
    return "://" in text


def stored_name(lineage: Lineage) -> str:
    """Return the name of a checkpoint's folder in a store: two lines may have the same step."""
    return f"{checkpoint_name(lineage.step)}-{lineage.id}"


def check_protocol(url: str) -> None:
    """Check that fsspec speaks a URL's protocol and that the package for it is installed.

    Raises:
        ConfigError: It is not, and names the package; or the URL holds a password.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol, _, rest = url.partition("://")
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        raise ConfigError(
            f"{protocol}://***@...: holds a password, which would be copied to logs. Leave it "
            f"out, and give it to the package for {protocol}:// by its own settings"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        known = known_implementations.get(protocol, {})
        package = str(known.get("class", protocol)).partition(".")[0]
        raise ConfigError(
            f"{url}: {protocol}:// needs the Python package {package}, which is not installed "
            f"({error}). Run: pip install {package}"
        ) from None
    except ValueError:
        raise ConfigError(
            f"{url}: fsspec knows no protocol {protocol}://. Use one like s3://, gs:// or file://"
        ) from None


def split_checkpoint(url: str) -> tuple[str, str | None]:
    """Return the URL of a store, and the name of one checkpoint if the URL goes on to it."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return (parent, name) if NAME.fullmatch(name) else (url.rstrip("/"), None)


def stored_step(name: str) -> int:
    """Return the step of a checkpoint by its folder's name; 0 for another name."""
    match = NAME.fullmatch(name)
    return (checkpoint_step(match[1]) or 0) if match else 0
