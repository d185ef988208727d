"""Give the resolved configs of earlier releases the values that those releases had.

`dump_config` writes every key with its value, so that a run stays what it is when a default
changes. That does not help with a key that a file cannot have because it is younger: the file's run
had what the code did then, which need not be today's default. A checkpoint of such a run would be
evaluated, exported and continued as another model.
"""

from __future__ import annotations

import math
from typing import Any

METHOD_KEYS = {
    "method",
    "trainable_slopes",
    "rotary_base",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
}
"""Keys of [position] that `dump_config` has always written. A person writes those of one method."""


def with_earlier_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a config file, with the values that an earlier release implied.

    A file was written by `dump_config` if it has keys of several position methods, whichever it
    uses: RUN/config.toml, a checkpoint's, an export's, and copies of them. A config that a person
    wrote is returned as it is.

    Args:
        values: Section name -> its keys and values, not checked yet.
    """
    model, position = values.get("model"), values.get("position")
    if not isinstance(model, dict) or not isinstance(position, dict):
        return values
    if "embedding_scale" in model or not position.keys() >= METHOD_KEYS:
        return values
    width = model.get("hidden_size")
    if not isinstance(width, int) or width < 1:
        # The schema refuses it, and names the key.
        return values
    is_sinusoidal = position["method"] == "sinusoidal"
    # Only sinusoidal positions scaled the embeddings, behind an embedding LayerNorm too.
    scale = math.sqrt(width) if is_sinusoidal else 1.0
    earlier: dict[str, dict[str, Any]] = {
        "model": {"embedding_scale": scale},
        "position": {"sinusoidal_table": "vaswani"} if is_sinusoidal else {},
    }
    if "init_method_std" in model:
        earlier["model"]["embedding_init_method_std"] = model["init_method_std"]
    return values | {name: keys | values[name] for name, keys in earlier.items() if name in values}
