"""Keep the directories of compiled kernels private to the user."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from pathlib import Path

from pretrain.config import writing
from pretrain.rundir.trust import check_own_directory, check_place

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Variables that name directories of compiled code."""


def make_caches_private() -> None:
    """Make the directories of compiled kernels, of which each process executes what is in them.

    Also TMPDIR, where it is missing. torch's own default is a fixed name in /tmp, where another
    user may have made it first.

    Raises:
        ConfigError: One of them belongs to another user, or others may write to it.
    """
    if (temporary := os.environ.get("TMPDIR")) and not os.path.lexists(temporary):
        _make_private(Path(temporary))
        # Forget where temporary files went while the directory was missing.
        tempfile.tempdir = None
    # As in torch/_inductor/runtime/cache_dir_utils.py.
    user = re.sub(r'[\\/:*?"<>|]', "_", _user_name())
    own = f"{tempfile.gettempdir()}/torchinductor_{user}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", own)
    for name in CACHES:
        if directory := os.environ.get(name):
            _make_private(Path(directory))
            check_place(Path(directory).parent)
            check_own_directory(Path(directory), entries=False)


def _make_private(directory: Path) -> None:
    with writing(directory):
        directory.parent.mkdir(0o700, parents=True, exist_ok=True)
        directory.mkdir(0o700, exist_ok=True)


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A user id without a name, as in a container.
        return f"uid_{os.getuid()}"
