"""Take what a user asks of Slurm for one command: its options, and the SBATCH_ variables.

A site file says what holds for all jobs on a cluster. The options of a command come first, then the
site file, then the variables, which many clusters set for all users. All of it ends up in the site
that the job is made of, so it is shown by --dry-run, recorded, and sent again by `launcher
requeue`. Variables that would change the shape of a job are left out (pretrain.launcher.slurm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.config import ConfigError
from pretrain.launcher.cluster import Site, parse_site
from pretrain.launcher.slurm_options import option_name, why_refused

KEYS = ("partition", "account", "qos", "constraint")
"""Keys of a site for which there is a variable SBATCH_<KEY>."""
ARGUMENTS = ("reservation", "wckey")
"""Options of sbatch that are no key of a site, for which there is such a variable as well."""
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
    """Where Slurm sends a mail when the job has finished or given up."""

    def site(self, site: Site, environment: Mapping[str, str]) -> Site:
        """Return the site with what this command, or the environment, asks for.

        Args:
            site: The cluster.
            environment: The variables of this process.

        Raises:
            ConfigError: An option cannot be passed to sbatch.
        """
        for key, value in (("--dependency", self.dependency), ("--mail", self.mail)):
            # An address or a list of jobs has no blank, and sbatch would take it as it is.
            if value is not None and (not value.isprintable() or " " in value or not value):
                raise ConfigError(f"{key} {value!r}: has blanks or control characters, or is empty")
        variables = {
            key: value
            for key in (*KEYS, *ARGUMENTS)
            if (value := environment.get(f"SBATCH_{key.upper()}"))
        }
        chosen: dict[str, Any] = {
            key: getattr(self, key, None) or getattr(site, key) or variables.get(key)
            for key in KEYS
        }
        given = [_argument(text) for text in self.sbatch]
        names = {option_name(argument) for argument in given}
        kept = [a for a in site.sbatch_arguments if option_name(a) not in names]
        names |= {option_name(argument) for argument in kept}
        inherited = [
            f"--{key}={variables[key]}"
            for key in ARGUMENTS
            if key in variables and key not in names
        ]
        values = site.model_dump() | chosen | {"sbatch_arguments": [*inherited, *kept, *given]}
        return parse_site(values, f"site {site.name} with the options of this command")


NO_REQUEST = SlurmRequest()
"""A command that asks for nothing."""


def _argument(text: str) -> str:
    """Return the option of sbatch that a value of --sbatch is.

    Raises:
        ConfigError: It is none, or one that the launcher sets itself.
    """
    argument = f"--{text.removeprefix('--')}"
    if why := why_refused(argument):
        name = option_name(argument)
        own = [option for option in OWN_OPTIONS if option == name]
        remedy = f"Use --{own[0]} of this command" if own else "Leave it out"
        raise ConfigError(f"--sbatch {text!r}: {why}. {remedy}")
    return argument
