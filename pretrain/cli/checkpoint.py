"""Define `pretrain checkpoint ...`: one short function per subcommand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from pretrain.config.arguments import Commands, Source
from pretrain.rundir.paths import ExitCode

checkpoint = Commands(no_args_is_help=True, help="List, check, prune and convert checkpoints.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]


@checkpoint.command("list")
def list_(
    run: Annotated[str, typer.Argument(metavar="RUN|URL")],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show a run's checkpoints in a table.

    Shows step, id, branch, time, size and validation loss of each, and if it is damaged. What the
    run has turned away from is listed apart. Only small files are read; `pretrain checkpoint
    verify` reads everything.

    \b
    Example:
      pretrain checkpoint list runs/demo/alibi

    Args:
        run: Directory of a run, or what its checkpoint.upload_to says.
        as_json: Print JSON, for programs.
    """
    from pretrain.checkpoint.tools import format_rows, list_run, list_store
    from pretrain.config.run import is_url

    rows = list_store(run) if is_url(run) else list_run(Path(run))
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        print(format_rows(run, rows))


@checkpoint.command()
def show(source: Source) -> None:
    """Describe one checkpoint.

    Prints its id and ancestry, the changes that were allowed on the way, the hashes of its data,
    what it was made with, the config in a few lines, and its parameters with their shapes.

    \b
    Example:
      pretrain checkpoint show runs/demo/alibi/checkpoints/step-00000100
    """
    from pretrain.checkpoint.tools import show_source

    print(show_source(source))


@checkpoint.command()
def verify(
    sources: Annotated[list[str], typer.Argument(metavar="RUN|CHECKPOINT|URL")],
) -> None:
    """Read every byte and compare it with what was written.

    Names each damaged file. The exit code is 1 if there is one.

    \b
    Example:
      pretrain checkpoint verify runs/demo/alibi

    Args:
        sources: Runs, which mean all of their checkpoints, single checkpoints, or URLs as in
            checkpoint.upload_to.
    """
    from pretrain.checkpoint.tools import verify_sources

    if not verify_sources(sources):
        raise typer.Exit(ExitCode.FAILED)


@checkpoint.command()
def prune(
    run: Run,
    keep: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, metavar="M")] = None,
    keep_best: Annotated[int | None, typer.Option(min=0, metavar="K")] = None,
    yes: bool = False,
) -> None:
    """Delete old checkpoints by the rules that also hold while training.

    The newest one always stays, and so does one that a reader holds or that waits for an
    evaluation. Before anything is deleted every byte of the newest is read: if it is damaged,
    nothing is. A run that is being trained is refused.

    \b
    Example:
      pretrain checkpoint prune runs/demo/alibi --keep 2 --keep-every 1000 --yes

    Args:
        keep: Newest checkpoints to keep. Default: the run's config.
        keep_every: Also keep those whose step is a multiple of this.
        keep_best: Also keep those with the lowest validation loss.
        yes: Delete. Without it the command shows what it would do.
    """
    from pretrain.checkpoint.tools import policy_of, prunable
    from pretrain.checkpoint.tools import prune as delete

    policy = policy_of(run, keep, keep_every, keep_best)
    if yes:
        for path in delete(run, policy):
            print(f"deleted {path}")
        return
    for path in prunable(run, policy)[1]:
        print(f"would be deleted with --yes: {path}")


@checkpoint.command()
def consolidate(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16")] = "fp32",
) -> None:
    """Write the weights as plain safetensors, whole and by name.

    For programs that know nothing of this project. Weights of more than 5 GB become several files
    with an index, as Hugging Face lays them out. The weights are in memory as a whole. `pretrain
    export` writes a model that transformers can load.

    \b
    Example:
      pretrain checkpoint consolidate runs/demo/alibi weights --dtype bf16

    Args:
        out: Directory to make.
        dtype: What the weights are written as.
    """
    from pretrain.checkpoint.tools import consolidate as write

    for path in write(source, out, dtype):
        print(path)


@checkpoint.command()
def upload(
    run: Run,
    to: Annotated[str | None, typer.Option(metavar="URL")] = None,
) -> None:
    """Upload the checkpoints of a run that are not in its object store yet.

    Training uploads by itself when checkpoint.upload_to is set. This command makes up for what
    could not be uploaded when the run ended. The exit code is 1 if one is still missing.

    \b
    Example:
      pretrain checkpoint upload runs/demo/alibi --to s3://bucket/alibi

    Args:
        to: Where to. Default: checkpoint.upload_to of the run's config.
    """
    from pretrain.checkpoint.tools import upload_run

    missing = upload_run(run, to)
    print("\n".join(missing) or f"{run}: every checkpoint is uploaded")
    if missing:
        raise typer.Exit(ExitCode.FAILED)
