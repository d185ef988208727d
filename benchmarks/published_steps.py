"""Compare the step model of `pretrain plan` with training speeds that others published.

    python -m benchmarks.published_steps

prints every row of published_steps.toml, and the two speeds of each GPU that fit the rows named
there best: the part of the peak that matrix products reach, and attention's backward pass. The
tables of docs/performance.md are of this command, and a test holds `pretrain.plan.timing` to it.

The published code is not ours. Its sharding hides behind the passes as ours does at ZeRO 1, which
is how each row is planned; what it spends beyond the model's lines is in the fitted speeds.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pretrain.config import load_config
from pretrain.plan.command import read_target
from pretrain.plan.memory import stages_of
from pretrain.plan.timing import Target, Timing, time_of_step

FILE = Path(__file__).with_suffix(".toml")
BASE = Path(__file__).parents[1] / "configs/cc100_roberta/alibi_1024.toml"


@dataclass(frozen=True)
class Row:
    """A published speed, and what the model says of the same step."""

    name: str
    target: Target
    timing: Timing
    ends: tuple[Timing, Timing]
    """With all speeds slow, and with all fast, as `pretrain plan` prints them."""
    tokens_per_second: float
    """Published, of one GPU."""
    is_fitted: bool

    @property
    def error(self) -> float:
        """Modelled time over measured time, minus 1."""
        return self.tokens_per_second * self.timing.gpus / self.timing.tokens_per_second - 1

    @property
    def is_within(self) -> bool:
        """True if the measured time lies between those of the ends."""
        slow, fast = (each.tokens_per_second / each.gpus for each in self.ends)
        return slow <= self.tokens_per_second <= fast


def rows() -> Iterator[Row]:
    """Yield the rows of the file, modelled."""
    for source in tomllib.loads(FILE.read_text())["sources"]:
        fitted = source.get("fitted")
        for values in source["rows"]:
            row = dict(zip(source["columns"], values, strict=False))
            gpus, batch = row["gpus"], row["micro_batch"]
            config = load_config(
                BASE,
                [
                    *source["keys"],
                    *(
                        f"model.{key}={value}"
                        for key, value in source["models"][row["model"]].items()
                    ),
                    "train.precision=bf16",
                    f"train.recompute_granularity={row['recompute']}",
                    f"data.sequence_length={row['length']}",
                    f"evaluation.lengths=[{row['length']}]",
                    f"parallel.world_size={gpus}",
                    f"batch.micro_batch_size={batch}",
                    f"batch.global_batch_size={batch * gpus * row['accumulation']}",
                ],
            )
            target = read_target(gpus, row["gpu"], row.get("network_gbit"))
            # The rows are of other code than ours.
            target = replace(target, device=target.device.fitted or target.device)
            layout = config.layout(gpus)
            stages = stages_of(config, layout)
            slow, fast = (
                time_of_step(config, layout, stages, target.moved(end))
                for end in target.device.ends
            )
            yield Row(
                f"{source['name']} {row['model']}, L = {row['length']:,}, {gpus} x {row['gpu']}"
                + ", recomputed" * (row["recompute"] == "full"),
                target,
                time_of_step(config, layout, stages, target),
                (slow, fast),
                row["tokens_per_second_per_gpu"],
                fitted is not None
                and row["model"] in fitted["models"]
                and gpus == fitted["gpus"]
                and row["recompute"] == fitted["recompute"],
            )


def fit(found: Sequence[Row]) -> tuple[float, float]:
    """Return the part of the peak of products and TFLOP/s of attention's backward pass.

    Least squares of relative errors over the fitted rows of one GPU. A row's time is linear in the
    inverse of both speeds: products take p / x, the backward pass a / y, and the rest stays.
    """
    xx = xy = yy = xz = yz = 0.0
    for row in found:
        device, lines = row.target.device, row.timing.lines
        forward, backward = device.attention_tflops
        # Without recomputation: two products forward and five backward.
        part = 2.5 / backward / (1 / forward + 2.5 / backward)
        to_relative = (1 + row.error) / row.timing.milliseconds
        products = lines["matrix products"] * to_relative
        attention = lines["attention"] * part * to_relative
        rest = (1 + row.error) - products - attention
        xx += products * products
        xy += products * attention
        yy += attention * attention
        xz += products * (1 - rest)
        yz += attention * (1 - rest)
    determinant = xx * yy - xy * xy
    slower = (xz * yy - yz * xy) / determinant, (yz * xx - xz * xy) / determinant
    return device.gemm_fraction / slower[0], backward / slower[1]


def summary(found: Sequence[Row]) -> tuple[float, float, float]:
    """Return the mean error, the root of the mean square, and the largest in size."""
    errors = [row.error for row in found]
    return (
        round(statistics.fmean(errors), 3) + 0.0,
        math.sqrt(statistics.fmean(error**2 for error in errors)),
        max(errors, key=abs),
    )


def main() -> None:
    found = list(rows())
    for row in found:
        part = "fitted" if row.is_fitted else "held out"
        measured_us = 1e6 / row.tokens_per_second
        times = f"{measured_us:>8.1f} us {(1 + row.error) * measured_us:>8.1f}"
        outside = "" if row.is_within else "  outside the interval"
        print(f"{row.name:<60} {part:<9}{times} {row.error:>+7.1%}{outside}")
    for name in dict.fromkeys(row.target.device.name for row in found):
        fitted, held_out = (
            [row for row in found if row.target.device.name == name and row.is_fitted == is_fitted]
            for is_fitted in (True, False)
        )
        fraction, backward = fit(fitted)
        print(
            f"\n{name}: products at {fraction:.3f} of the peak, attention backward {backward:.0f}"
        )
        for title, part in (("fitted", fitted), ("held out", held_out)):
            mean, root, largest = summary(part)
            numbers = f"mean {mean:+.1%}, rms {root:.1%}, largest {largest:+.1%}"
            print(f"  {len(part)} rows {title}: {numbers}")


if __name__ == "__main__":
    main()
