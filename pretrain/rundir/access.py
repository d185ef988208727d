"""Keep what is made in a shared folder from being opened to all members of its team."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from pathlib import Path

DEFAULT_LIST = "system.posix_acl_default"
"""The attribute of a folder with the access list of what is made in it, acl(5)."""
ACCESS_HEADER, ACCESS_ENTRY, OWNER_ENTRY = 4, "<HHI", 0x01
"""Such a list is a version, then a tag, rights and an id for each entry; the owner's has this tag
(linux/posix_acl_xattr.h)."""


def let_nobody_write(directory: Path) -> None:
    """Take the right to write from the default access list that a folder hands on, if it has one.

    In a project's folder that list opens to all members what Slurm and libraries make: they ask for
    mode 0666, as programs do, and where there is such a list it takes the place of the umask.
    """
    # OSError: there is no list, the file system has none, or the folder is somebody else's.
    with contextlib.suppress(OSError, AttributeError, struct.error):
        given = os.getxattr(directory, DEFAULT_LIST)
        entries = struct.iter_unpack(ACCESS_ENTRY, given[ACCESS_HEADER:])
        kept = [
            (tag, bits if tag == OWNER_ENTRY else bits & ~stat.S_IWOTH, who)
            for tag, bits, who in entries
        ]
        rows = b"".join(struct.pack(ACCESS_ENTRY, *entry) for entry in kept)
        os.setxattr(directory, DEFAULT_LIST, given[:ACCESS_HEADER] + rows)
