"""Build a data set from corpora, on one machine or many, and go on where a build was interrupted.

A build has five stages. `plan` lists the corpus and cuts it into tasks, fixed ranges of bytes.
`scan` reads every task and notes the hash of each document, what could be held out, and a sample of
lines for the tokenizer. `merge` chooses the held-out documents, finds duplicates and trains the
tokenizer. `tokenize` reads every task again and writes its shards. `finish` puts the shards of all
tasks together, writes manifests and the report, and gives the data set its name.

Only scan and tokenize work in parallel. What a task writes depends on the plan and on the merge
alone, so the data set is the same for any number of processes, whatever was interrupted.
"""

from pretrain.data.build.command import build, estimate
from pretrain.data.build.tasks import Cluster

__all__ = ["Cluster", "build", "estimate"]
