"""Parse what `pretrain evaluate-tasks` shall measure. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import ConfigError, EvaluationRequest

TASKS = ("needle", "induction", "documents")
"""The names of the tasks, in the order of reports."""


@dataclass(frozen=True)
class TasksRequest:
    """The options of the command."""

    tasks: tuple[str, ...]
    """Names out of TASKS, in their order."""
    lengths: tuple[int, ...] | None
    """Context lengths in tokens; None for the config's."""
    samples: int
    """Samples of every task at every length; fewer where the text has no more."""

    @staticmethod
    def parse(tasks: str, lengths: str | None, samples: int) -> TasksRequest:
        """Build a request from the values of the command-line options.

        Args:
            tasks: --tasks, for example "needle,induction".
            lengths: --lengths, for example "128,2048"; None when the option is not given.
            samples: --samples.

        Raises:
            ConfigError: When a value is not valid. The message names the option.
        """
        names = tasks.split(",")
        for name in names:
            if name not in TASKS:
                raise ConfigError(
                    f"--tasks {name}: unknown task. Choose out of {','.join(TASKS)}, separated by "
                    "commas"
                )
        if samples < 1:
            raise ConfigError(f"--samples {samples}: expected 1 or more")
        found = EvaluationRequest.parse(lengths, "nonoverlapping", None, None).lengths
        for length in found or ():
            if length < 1:
                raise ConfigError(f"--lengths {length}: expected 1 or more tokens")
        unique = None if found is None else tuple(dict.fromkeys(found))
        return TasksRequest(tuple(name for name in TASKS if name in names), unique, samples)

    def evaluation(self) -> EvaluationRequest:
        """Return what an evaluation at these lengths would be asked for."""
        return EvaluationRequest(self.lengths, ("nonoverlapping",), None, None)
