"""Write a study's final curves for TensorBoard, with the window length as the step."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

# TensorBoard's modules have no types.
from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from pretrain.evaluate.curves import Curve
from pretrain.study.evidence import SLIDING

NAME = "events.out.tfevents.0.study"
"""Name of an event file. TensorBoard takes every file with "tfevents" in its name."""


def event_files(curves: Sequence[Curve]) -> dict[str, bytes]:
    """Return the event files, by their paths below TensorBoard's log directory.

    Each curve is a run of TensorBoard's with the tag perplexity/PROTOCOL. Equal curves give equal
    files, which have no times in them.

    Args:
        curves: The study's curves. Those of one model under both protocols share a run.
    """
    events: dict[str, list[Event]] = {}
    for curve in curves:
        folder = "".join(c if c.isalnum() or c in "-_." else "-" for c in curve.name)
        tag = "perplexity/" + (SLIDING if curve.protocol.startswith(SLIDING) else curve.protocol)
        for length in curve.records:
            value = curve.value(length).value
            if math.isfinite(value):
                found = Summary.Value(tag=tag, simple_value=value)
                event = Event(wall_time=0.0, step=length, summary=Summary(value=[found]))
                events.setdefault(f"{folder}-{curve.train_length}/{NAME}", []).append(event)
    return {path: _file(found) for path, found in events.items()}


def _file(events: Sequence[Event]) -> bytes:
    """Return an event file."""
    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in (Event(wall_time=0.0, file_version="brain.Event:2"), *events):
        writer.write(event.SerializeToString())
    return content.getvalue()
