"""Take what a user asks of Slurm for one command, by its options, beside the site file."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import ConfigError
from pretrain.launcher.cluster import Site, parse_site
from pretrain.launcher.slurm_options import option_name, why_refused
from pretrain.rundir.credentials import credential_in, refusal

OWN_OPTIONS = ("nodes", "time", "partition", "account", "qos", "dependency")
"""Options that sbatch and the launcher's commands have in common."""


@dataclass(frozen=True)
class SlurmRequest:
    """The options of one command that say how Slurm should treat its job."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, as "exclude=n1" or "exclusive"."""
    dependency: str | None = None
    """As in sbatch --dependency."""
    mail: str | None = None
    """The address to which Slurm sends a mail when the job has finished or given up."""

    def site(self, site: Site) -> Site:
        """Return the site with what this command asks for. Raises ConfigError for wrong options."""
        for key, value in (("--dependency", self.dependency), ("--mail", self.mail)):
            # An address or a list of jobs has no blank, and sbatch would take it as it is.
            if value is not None and (not value.isprintable() or " " in value or not value):
                raise ConfigError(f"{key} {value!r}: has blanks or control characters, or is empty")
        given = [_argument(text) for text in self.sbatch]
        names = {option_name(argument) for argument in given}
        kept = [a for a in site.sbatch_arguments if option_name(a) not in names]
        chosen = {"partition": self.partition, "account": self.account, "qos": self.qos}
        values = site.model_dump() | {"sbatch_arguments": [*kept, *given]}
        values |= {key: value for key, value in chosen.items() if value is not None}
        return parse_site(values, f"site {site.name} with the options of this command")


NO_REQUEST = SlurmRequest()
"""A command that asks for nothing."""


def _argument(text: str) -> str:
    """Return the option of sbatch that a value of --sbatch is.

    Raises:
        ConfigError: It is none, one that the launcher sets itself, or a secret.
    """
    # First, because the other message repeats the value.
    if what := credential_in(text):
        raise ConfigError(refusal("--sbatch", what))
    argument = f"--{text.removeprefix('--')}"
    if why := why_refused(argument):
        name = option_name(argument)
        own = [option for option in OWN_OPTIONS if option == name]
        remedy = f"Use --{own[0]} of this command" if own else "Leave it out"
        raise ConfigError(f"--sbatch {text!r}: {why}. {remedy}")
    return argument
