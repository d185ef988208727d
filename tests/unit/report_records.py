"""Records and losses as an evaluation makes them, and a reader of pages, for tests of reports."""

from __future__ import annotations

import io
import math
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from pretrain.evaluation.records import FIELDS, Binned, Losses


def make_record(method="alibi", protocol="nonoverlapping", length=128, perplexity=20.0, **changes):
    """Return a record; `spread` is half of its interval, in nats."""
    spread = changes.pop("spread", 0.02)
    seed, train_length = changes.get("seed", 1), changes.get("train_length", 128)
    run = changes.pop("run", f"runs/{method}_{train_length}_{seed}")
    step = changes.pop("step", 400)
    loss = math.log(perplexity)
    record = {
        "run": run,
        "step": step,
        "method": method,
        "seed": seed,
        "train_length": train_length,
        "settings": "cccccccccccc",
        "tokenizer": "aaaaaaaaaaaa",
        "validation": "bbbbbbbbbbbb",
        "precision": "fp32",
        "protocol": protocol,
        "stride": 64 if protocol == "sliding" else length,
        "length": length,
        "perplexity": perplexity,
        "loss_nats": loss,
        "loss_low": loss - spread,
        "loss_high": loss + spread,
        "bits_per_byte": loss / math.log(2) * 50_000 / 160_000,
        "tokens": 50_000,
        "bytes": 160_000,
        "checkpoint": f"{run}/checkpoints/step-{step:08d}",
    }
    assert tuple(record) == FIELDS
    return record | changes


def curve_of(method, perplexities, first=128, **changes):
    """Return the records of one checkpoint at first, 2 first, 4 first, ... tokens."""
    return [
        make_record(method, length=first * 2**i, perplexity=value, **changes)
        for i, value in enumerate(perplexities)
    ]


def position_losses(length, windows=10, offset=0.0):
    """Return losses that fall with the position, of this many windows."""
    losses = 4 + offset + 3 / np.sqrt(np.arange(1, length + 1))
    return Binned.of(Losses(losses, np.full(length, windows)))


class Page(HTMLParser):
    """A page's rows, as (data of the body, values of the cells), its tags, script and text."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.script, self.text = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "tbody":
            self.rows.append((given, []))
        if "data-value" in given:
            self.rows[-1][1].append(given["data-value"])

    def handle_data(self, data):
        self.script += data if self.cdata_elem == "script" else ""
        self.text += data


def read_png(content):
    """Return a picture; fail when it is damaged or empty."""
    picture = Image.open(io.BytesIO(content), formats=["PNG"])
    assert len(picture.getcolors(2**20)) > 16
    return picture
