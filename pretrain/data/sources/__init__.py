"""Find the files of corpora, divide them into tasks, and read the documents of a task.

`corpora` names the corpora of a config, `plan` divides their files into tasks, and `read` yields
the documents of one task. Every document of a file is read exactly once, whatever the tasks.
"""

from pretrain.data.manifest import Split
from pretrain.data.sources.base import Corpus, Piece, Task, corpora
from pretrain.data.sources.reading import plan, read

__all__ = [
    "Corpus",
    "Piece",
    "Split",
    "Task",
    "corpora",
    "plan",
    "read",
]
