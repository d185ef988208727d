"""Ask the ranks' torch, before a job is sent, whether it was built for the cluster's GPUs."""

from __future__ import annotations

import subprocess
import sys

from pretrain.config import ConfigError
from pretrain.config.architectures import is_supported, not_supported
from pretrain.launcher.cluster import Site

ASK_SECONDS = 120
"""The longest time for the answer: an import of torch from a slow file system may take a minute."""
_QUESTION = (
    # The list of architectures is compiled in. The public torch.cuda.get_arch_list() returns none
    # where there is no GPU, as on a login node.
    "import torch; print(torch.__version__);"
    "print(getattr(torch._C, '_cuda_getArchFlags', lambda: '')() or '')"
)


def check_build(site: Site) -> None:
    """Check that the ranks' torch has code for the GPUs that a site names.

    Nothing is asked where the site does not name their compute capability, or where the ranks run
    in a container, which a login node may not have: the job's own preflight then finds it out.

    Raises:
        ConfigError: It has none.
    """
    if site.gpu_compute_capability is None or site.is_contained:
        return
    python = site.ranks_python or sys.executable
    try:
        asked = subprocess.run(
            # -P: no module of the current directory is imported.
            [python, "-P", "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=True,
        )
        version, architectures = asked.stdout.splitlines()[-2:]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # The job may load modules that this Python needs.
        print(
            f"warning: {python}: cannot be asked here for which GPUs its torch is built ({error}). "
            "The job's preflight will",
            file=sys.stderr,
        )
        return
    capability = [int(part) for part in site.gpu_compute_capability.split(".")]
    if is_supported(architectures.split(), capability):
        return
    gpu = not_supported(site.gpu or "the site's GPU", capability, architectures.split())
    raise ConfigError(
        f"gpu_compute_capability = {site.gpu_compute_capability}: {gpu} (torch {version} of "
        f"{python}). Install the build of torch for this GPU (docs/v100.md for V100s), or name "
        "another Python in the site's `python`"
    )
