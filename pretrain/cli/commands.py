"""Define the `pretrain` command: one short function per subcommand, which parses, builds and calls.

The docstring of such a function is the text of its --help, so it addresses the user of the command
and describes its parameters. torch, Megatron and DeepSpeed are imported inside the functions, after
the config has been checked, because these imports take seconds and a wrong config should be refused
at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from pretrain.cli.groups import bench, leaderboard
from pretrain.config import (
    ConfigError,
    RunConfig,
    dump_config,
    load_config,
    writing,
)
from pretrain.config.arguments import (
    AllowChanged,
    Commands,
    Config,
    Count,
    Evaluations,
    JsonFile,
    Numbers,
    OutFile,
    Overrides,
    Source,
    Sources,
    print_and_exit,
    version_flag,
)
from pretrain.config.load import list_shipped
from pretrain.config.run import STREAM, describe
from pretrain.config.schema import WORDS
from pretrain.config.trajectory import allow_options, check_allowed
from pretrain.processes import leave
from pretrain.rundir.paths import ExitCode
from pretrain.startup import lasting_imports
from pretrain.training.reporter import Requests

app = Commands()
data = Commands(help="Build, verify and look at a data set.")
checkpoint = Commands(help="List, check, prune and upload checkpoints.")
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
app.add_typer(leaderboard, name="leaderboard")
app.add_typer(checkpoint, name="checkpoint")


@app.callback()
def pretrain(
    version: Annotated[bool, version_flag("pretrain")] = False,
) -> None:
    """Pretrain GPTs with ALiBi attention at a short length, and test them at longer lengths.

    The `launcher` command starts `pretrain train` on several GPUs or on a Slurm cluster.

    \b
    Example, on a machine without a GPU:
      pretrain data build configs/demo.toml
      launcher local configs/demo.toml --nproc 2
      pretrain evaluate runs/demo/alibi --out runs/demo/report/curve.json
      pretrain export runs/demo/alibi runs/demo/hf
    """


@app.command()
def config(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    # Eager, so that it takes effect before typer reports a missing CONFIG.
    list_files: Annotated[
        bool, typer.Option("--list", is_eager=True, callback=print_and_exit(list_shipped))
    ] = False,
) -> None:
    """Check a config and print it in full.

    Prints every key with its value, then the parameter count, the layout, and the class and
    precisions in which the trained model can be exported, or why it cannot be exported.

    A config may build on another config: base = "other.toml" at its top, relative to its folder.

    A config that cannot work is refused, and the message names the key to change. The output is
    itself a valid config file.

    \b
    Examples:
      pretrain config --list
      pretrain config configs/demo.toml --set model.num_layers=8

    Args:
        list_files: List the configs and example sites that are installed with this package.
    """
    from pretrain.huggingface.consumers import describe_export

    run = load_config(config, overrides)
    # Checked for the fewest processes that can hold the model: a batch that does not fit these fits
    # no other number.
    if run.parallel.world_size is None:
        run.layout(run.parallel.ranks_per_copy)
    print(dump_config(run))
    # Exports contain the model of the last phase.
    last = run.parts[-1].config
    print(describe(run, describe_export(last, tokenizer_obstacles(run))))


def tokenizer_obstacles(run: RunConfig) -> list[str]:
    """Return why the tokenizer that data.tokenizer names could not be exported with the model."""
    from pretrain.data.tokenizer import load_tokenizer

    # `pretrain data build` refuses a missing file and names the remedy.
    given = run.data.tokenizer
    if given is None or given == WORDS or not Path(given).is_file():
        return []
    try:
        load_tokenizer(given).check_exportable()
    except ConfigError as error:
        return [str(error)]
    return []


@data.command("build")
def data_build(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    dry_run: bool = False,
) -> None:
    """Train the tokenizer and write the token shards.

    Writes the train and validation splits to data.directory, which appears only when it is
    complete. Until then the build is in a hidden folder beside it, .building-NAME. If the build is
    interrupted, the same command continues it. Does nothing if the data set already exists and the
    corpus has not changed.

    \b
    Examples:
      pretrain data build configs/demo.toml --dry-run
      pretrain data build configs/demo.toml --workers 8
      sbatch --nodes 1 --exclusive --wrap "pretrain data build mine.toml"

    Args:
        workers: Number of processes. Default: the number of cores that this process may use. The
            result does not depend on it.
        dry_run: Print the files to read and the place to write to; write nothing.
    """
    run = load_config(config, overrides)
    from pretrain.data.build import build, show_plan

    if dry_run:
        show_plan(run)
    else:
        build(run, workers or len(os.sched_getaffinity(0)))


@data.command("verify")
def data_verify(config: Config, overrides: Overrides = []) -> None:  # noqa: B006
    """Read every byte of a data set and name every damaged file.

    Compares with the digests that `pretrain data build` records when it writes the files.

    \b
    Example:
      pretrain data verify configs/demo.toml
    """
    from pretrain.data.stream import verify

    run = load_config(config, overrides)
    verify(run.data.directory)
    print(f"{run.data.directory}: every file is as it was written")


@data.command("stats")
def data_stats(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Show the size of each corpus, what was removed from it, and its share of training.

    \b
    Example:
      pretrain data stats configs/demo.toml
    """
    run = load_config(config, overrides)
    from pretrain.data import view

    for line in view.stats(run):
        print(line)


@data.command("show")
def data_show(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    split: Literal["train", "validation"] = "train",
    corpus: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    num: Count = 3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    characters: Annotated[int, typer.Option(min=20)] = 400,
) -> None:
    """Print samples as text, with the corpus, file and offset of every document in them.

    A sample is data.sequence_length + 1 tokens: the inputs, and the targets shifted by one.

    \b
    Example:
      pretrain data show configs/demo.toml --num 5 --corpus shakespeare

    Args:
        split: The split to draw from.
        corpus: Draw only from this corpus.
        num: Number of samples.
        seed: Seed of the random choice of samples.
        characters: The most characters to print of a document.
    """
    run = load_config(config, overrides)
    from pretrain.data.view import shown_samples

    for line in shown_samples(
        run, split, corpus=corpus, count=num, seed=seed, characters=characters
    ):
        print(line)


@app.command()
def train(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    resume: Annotated[str, typer.Option(metavar="auto|none|PATH|URL")] = "auto",
    allow_changed: AllowChanged = [],  # noqa: B006
) -> None:
    """Train a run, or resume it from its newest checkpoint.

    This command is a single process. `launcher local`, torchrun and srun start one process per GPU.

    A resume prints every key that differs from the checkpoint's config, and differences in the
    data. Layout, logging, evaluation, saving and the number of steps may change. A change to
    training (data, seed, batch, optimizer, schedule, dropout, precision) or positions is refused
    unless --allow-changed names the key. The rest of the model cannot change.

    \b
    Signals, to any of the processes:
      SIGINT    (Ctrl-C) the same as SIGTERM during training; a second SIGINT exits immediately,
                with code 130
      SIGTERM   save, then exit with code 80
      SIGUSR1   save, then exit with code 75, which asks for a restart
      SIGUSR2   write the stack traces of all threads to stderr and continue

    \b
    Example:
      pretrain train configs/demo.toml --set run.directory=runs/try --set train.num_steps=100
      pretrain train configs/demo.toml --set optimizer.learning_rate=5e-4 \\
          --allow-changed optimizer.learning_rate

    Args:
        resume: Start from the run's newest checkpoint if there is one (auto), from step 0 (none),
            from this checkpoint, or from an object store: s3://bucket/run.
    """
    # Before the slow imports, so that a signal that comes during them is not lost.
    requests = Requests()
    requests.listen()
    settings = [word for override in overrides for word in ("--set", override)]
    words = ["pretrain", "train", str(config), *settings, *allow_options(allow_changed)]
    requests.command = shlex.join(words)
    # Also before the slow imports, so that a typing mistake shows at once.
    run = load_config(config, overrides)
    check_allowed(allow_changed)
    with lasting_imports():
        from pretrain import topology
        from pretrain.training.loop import train as run_training

    code = run_training(run, resume, requests, frozenset(allow_changed))
    # After success all ranks are here and can close the process group together. After a failure
    # some may never come, and the launcher of the ranks ends those that wait.
    if not code:
        topology.finish()
    # All files are closed. A normal exit would take seconds to unload the imported libraries.
    leave(code)


@app.command()
def evaluate(
    sources: Sources,
    evaluations: Evaluations,
    stream: Annotated[bool, typer.Option("--stream")] = False,
    longppl: Annotated[int | None, typer.Option(metavar="K", min=1)] = None,
    out: JsonFile = None,
    text: Annotated[list[str], typer.Option(metavar="FILE|PATTERN")] = [],  # noqa: B006
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Measure perplexity at several window lengths.

    The lengths may go far beyond the training length, up to the length of the text. Both protocols
    score every token exactly once. Sliding windows that do not overlap (stride = length) are
    measured once, as nonoverlapping. Each result has its number of tokens, bits per byte, and a
    95 % confidence interval over blocks of text. Under torchrun or srun, all processes share the
    work. --set position.KEY=VALUE evaluates with positions other than those of training; the
    results say so.

    A Hugging Face model runs in transformers, complete on each process, with its own tokenizer. It
    needs --text, or the validation split of a data set: --set data.directory=DIR. Use bits per byte
    to compare models with different tokenizers.

    \b
    Example:
      pretrain evaluate runs/demo/alibi runs/demo/sinusoidal --lengths 128,512,2048 \\
          --out runs/demo/report/curve.json
      pretrain evaluate runs/demo/alibi --text 'papers/*.txt' --stream
      pretrain evaluate runs/demo/alibi downloads/gpt2 --text book.txt --lengths 128,1024

    Args:
        stream: Read the whole text in one pass instead of in windows: the context of a token is
            every token before it, and memory does not grow with the text. Only for ALiBi, whose
            heads see no farther than their weights allow (pretrain reach).
        longppl: Also measure LongPPL (arXiv 2410.23771) against a short context of K tokens: the
            perplexity of the tokens that the first model predicts much better with more context.
        out: Write the results to this file, and plots and report.md beside it.
        text: Score this text instead of the validation split; can be repeated. Each file is one
            document. Needs only the run, not its data set.
        trust_remote_code: Run the Python code in a Hugging Face folder. Needed for classes that
            belong neither to transformers nor to this project's exports.
    """
    with lasting_imports():
        from pretrain.evaluation.command import evaluate_sources

    asked = dataclasses.replace(evaluations, protocols=STREAM) if stream else evaluations
    evaluate_sources(sources, asked.request(), overrides, out, longppl, text, trust_remote_code)


@app.command("evaluate-tasks")
def evaluate_tasks(
    sources: Sources,
    tasks: Annotated[str, typer.Option(metavar="NAME,NAME,...")] = "needle,induction",
    lengths: Numbers = None,
    samples: Annotated[int, typer.Option(min=1, metavar="N")] = 64,
    out: JsonFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Measure how well a model uses a long context, beyond perplexity.

    \b
    needle           32 tokens of text appear in a long context and are repeated at its end
    induction        the same with random tokens, which can only be copied
    niah_single      a sentence states the magic number of a word; the end asks for the number
    niah_multikey    the same, with the numbers of 3 other words in the context
    niah_multivalue  one word has 4 numbers
    vt               which variables have a value, through a chain of 5 assignments
    cwe              the 10 most common words of a list
    fwe              the 3 most frequent words of a list, apart from '...'

    The last six are the synthetic tasks of RULER (arXiv 2404.06654), as text that a model without
    instruction tuning can continue. Each reports a gain: how much lower the loss of the answer is
    with the helpful context than without it, in nats per token; 0 means that the model does not use
    the context. An answer is exact if greedy decoding gives all of its tokens. L is the training
    length. Under torchrun or srun, all processes share the work.

    \b
    Example:
      pretrain evaluate-tasks runs/demo/alibi runs/demo/sinusoidal \\
          --out runs/demo/report/tasks.json
      pretrain evaluate-tasks runs/demo/alibi --tasks niah_single,vt,cwe --lengths 256,1024

    Args:
        tasks: The tasks to measure.
        lengths: Lengths of the context in tokens. Default: evaluation.lengths of the config, or 1,
            2, 4, 8 and 16 times the training length, up to the length of the text.
        samples: Samples of each task at each length and depth. Four times as many halve the width
            of the intervals.
        out: Write the results to this file, and Markdown and a figure beside it.
    """
    with lasting_imports():
        from pretrain.evaluation.tasks import evaluate_tasks as run

    run(sources, tasks, lengths, samples, overrides, out)


@app.command()
def reach(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT|HF_FOLDER")],
    text: Annotated[list[str], typer.Option(metavar="FILE|PATTERN")] = [],  # noqa: B006
    length: Count = 2048,
    plot: OutFile = None,
    out: JsonFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Show how far back each attention head can see.

    ALiBi lowers the score of a key by slope x distance, and products of queries and keys can make
    up for only as much as the weights allow. So each head has a distance beyond which all keys of a
    row together weigh less than 2^-24, half a unit in the last place of fp32:

    \b
    certificate    for every text: from the weights alone
    running bound  for this text: from the norms of its queries and keys, as attention computes it,
                   for the worst query and on average
    measured       on this text: dense attention in fp64, the worst row

    Also shows the share of attention's work that remains at 2, 16 and 128 times the training
    length, and the length from which each further token costs the same. docs/reach.md has the
    proof.

    \b
    Example:
      pretrain reach runs/demo/alibi --plot runs/demo/reach.png
      pretrain reach downloads/bloom-560m --text 'papers/*.txt'

    Args:
        source: A run (its newest checkpoint), a checkpoint, or a Hugging Face model that `pretrain
            import` accepts. For a Hugging Face model without --text, shows only the certificate.
        text: Read this text instead of the validation split; can be repeated. Needs no data set.
        length: The most tokens in a window of text. Time and memory grow with its square.
        plot: Write the distances as a figure, .png or .svg.
        out: Write everything to this file.
    """
    from pretrain.evaluation.command import temporary_texts, tokenizer_of_source
    from pretrain.evaluation.reach import reach_of_source
    from pretrain.huggingface.import_model import as_run

    with as_run(source) as (is_run, run), temporary_texts(text) as texts:
        if text:
            overrides = [*overrides, texts.of_files(tokenizer_of_source(run))]
        shown = is_run or bool(text)
        reach_of_source(
            run, overrides, name=source, with_text=shown, length=length, plot=plot, out=out
        )


@app.command()
def report(
    sources: Annotated[list[Path], typer.Argument(metavar="RUN|FILE.json")],
    out: JsonFile = None,
    style: Literal["paper", "slides"] = "paper",
) -> None:
    """Combine the evaluations of one run's checkpoints, or of several runs.

    For one run, shows perplexity at each length over training steps. Writes curve.json, plots and
    report.md to RUN/evaluations. The launcher's evaluation jobs do this after each checkpoint; you
    may run it at any time.

    For several runs or reports, shows one table. They may differ in method, training length, seed,
    tokenizer and validation set. --out writes the report.

    \b
    Example:
      pretrain report runs/demo/alibi
      pretrain report runs/sweep/alibi_512 runs/sweep/alibi_1024 old/report/curve.json \\
          --out runs/sweep/report/curve.json

    Args:
        sources: Directories of runs whose checkpoints were evaluated, or curve.json files of
            reports.
        out: Write one report of all sources to this file, and plots and report.md beside it.
            A run is represented by its newest evaluated checkpoint.
        style: Style of the plots that --out writes: paper (a column or a page wide, in 8 point
            type), or slides.
    """
    from pretrain.evaluation.report import combine, report_run

    if len(sources) == 1 and out is None and not sources[0].is_file():
        (run,) = sources
        with writing(run / "evaluations"):
            print(report_run(run))
    else:
        with writing(out or sources[0]):
            print(combine(sources, out, style))


@app.command()
def export(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    programs: Annotated[list[str], typer.Option("--for", metavar="PROGRAM")] = [],  # noqa: B006
    max_length: Annotated[int | None, typer.Option(metavar="TOKENS")] = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a Hugging Face model, and files for other programs, and verify them.

    Loads the written model with stock transformers and compares its logits in fp32. The comparison
    runs on validation text, at the training length and 16 times that or as far as memory allows. If
    it fails, OUT is not created and the exit code is 1. The perplexity of the written model in bf16
    and fp16 is measured too, printed and written on the model card.

    --for llama.cpp also writes the files of llama.cpp into OUT/llama.cpp, loads them there and
    compares logits and token ids. vllm reads the same files as transformers: --for vllm says
    whether it computes the model. A model that a program would compute differently is refused. For
    a program that is not installed here, the files are written but not compared.

    The folder also gets a model card with the run's own evaluation of this checkpoint. License,
    languages and data sets on it come from [export] in the run's config, or from --set.

    \b
    Example:
      pretrain export runs/demo/alibi runs/demo/hf --set export.license=apache-2.0 \\
          --set 'export.language=["en"]'
      pretrain export runs/demo/alibi runs/demo/hf --for llama.cpp

    Args:
        programs: transformers (always written), vllm or llama.cpp.
        out: Directory to write the Hugging Face model to.
        max_length: Longest sequence that the export accepts; MPT, OPT and GPT-2 fail beyond it.
            Default: 16 training lengths, or the longest evaluated length if that is longer.
    """
    with lasting_imports():
        from pretrain.huggingface.export import export_source

    export_source(source, out, max_length, overrides=overrides, programs=programs)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="HF_FOLDER|CHECKPOINT.pt")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE")] = None,
    dictionary: Annotated[Path | None, typer.Option("--dictionary", metavar="dict.txt")] = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Create a run from a Hugging Face model or a fairseq checkpoint, and verify it.

    Imports models exported by this program or published elsewhere: Bloom, MPT, OPT, GPT-NeoX
    (Pythia), GPT-2, Llama, Mistral and Qwen. Settings that our model cannot compute are refused.
    The weights become the step-0 checkpoint of a run that can be evaluated, trained further and
    exported. Its logits are compared with those of stock transformers, on random tokens at up to
    four times the model's length (data.sequence_length, for OPT and MPT as far as their positions
    reach). If they differ, OUT is not created and the exit code is 1.

    The folder's tokenizer.json or tokenizer.model is copied into the run, so `pretrain evaluate
    --text` and `pretrain export` need no data set. Build data for further training with that
    tokenizer, which the run's data.tokenizer names.

    The checkpoint of a fairseq language model does not state its position method. --config states
    it: the config of the run, with the checkpoint's step as train.num_steps. The options, tensors
    and log probabilities of the checkpoint are compared with it. Nothing in the file is executed.

    \b
    Example:
      pretrain import downloads/bloom-560m runs/bloom --set data.directory=data/bloom
      pretrain evaluate runs/bloom --lengths 2048,8192
      pretrain train runs/bloom/config.toml
      pretrain import alibi_wt103_L512.pt runs/wikitext103/alibi_512 \\
          --config configs/wikitext103/alibi_512.toml --dictionary data-bin/dict.txt

    Args:
        folder: Directory of a Hugging Face model (config.json and safetensors), or a checkpoint.
        out: Directory of the run to create.
        config: For a checkpoint: the config of the run.
        dictionary: For a checkpoint: the dict.txt of its data.
    """
    if folder.is_dir():
        from pretrain.huggingface.import_model import import_folder

        return import_folder(folder, out, overrides)
    if config is None or dictionary is None:
        raise ConfigError(
            f"{folder}: not a folder. Give one with config.json, or for a checkpoint of fairseq's "
            "--config and --dictionary too"
        )
    from pretrain.huggingface.fairseq import import_checkpoint

    import_checkpoint(folder, dictionary, config, out, overrides)


@app.command()
def plan(
    config: Config,
    gpus: Annotated[int, typer.Option(metavar="N", min=1)],
    gpu_type: Annotated[str, typer.Option(metavar="TYPE")],
    network: Annotated[float | None, typer.Option(metavar="GBIT", min=0.01)] = None,
    out: OutFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Predict memory, time and cost of a run in every layout, and name the best.

    For each legal layout (tensor, pipeline and virtual pipeline size, sequence parallelism, ZeRO
    stage, recomputation, micro-batch size), computes the memory of a GPU, the time of each part of
    a step, tokens/s, MFU and GPU-hours. Prints the fastest layouts that fit, why others are not
    legal, and the assumed speeds. Needs no GPU and trains nothing.

    \b
    Example:
      pretrain plan configs/cc100_roberta/alibi_1024.toml --gpus 128 --gpu-type v100-32
      pretrain plan configs/demo.toml --gpus 8 --gpu-type h100 --set train.precision=bf16 \\
          --out demo_h100.toml

    Args:
        gpus: Number of GPUs of the job.
        gpu_type: v100-32, a100-80, h100 or h200.
        network: Gbit/s of all links of a node together in one direction, such as 3200 for 8 x 400.
            Default: the usual speed of nodes with such GPUs.
        out: Write a config of the run in the best layout.
    """
    from pretrain.plan.command import plan_run, read_target

    print(plan_run(config, overrides, read_target(gpus, gpu_type, network), out))


@app.command()
def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml")],
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    site: Annotated[Path | None, typer.Option(metavar="SITE.toml")] = None,
    dry_run: bool = False,
    report_only: bool = False,
    only: Annotated[str, typer.Option(metavar="PATTERN")] = "*",
    again: bool = False,
) -> None:
    """Train methods at several lengths, evaluate them together, and report on the claims.

    Builds the data if it is missing, checks every run before the first one starts, and trains one
    after another as `launcher local` does. Ctrl-C saves. Finished runs are skipped, so the same
    command continues the study. If a run fails, the others still run, and the exit code is 1. All
    finished runs are evaluated together, and STUDY/report has the result.

    With --site the missing runs are submitted instead. Repeat the command when they are done to
    write the report.

    The runs of a study differ only in what its file says. If the file was edited so that runs that
    are already trained no longer match it, it is refused.

    \b
    Examples:
      pretrain study configs/studies/demo.toml --nproc 2
      pretrain study configs/studies/wikitext103.toml --site slurm/site.toml
      pretrain study configs/studies/debian_decide.toml --only "*-s1"

    Args:
        file: The study: methods, lengths, seeds, settings.
        nproc: Processes for each run, the evaluation and the measurements. Default: 1.
        site: Submit the runs to this Slurm cluster, as one job array, and train none here.
        dry_run: Print the runs and what remains of each; do nothing else.
        report_only: Train and measure nothing; evaluate and report the finished runs.
        only: Train only the missing runs whose names match, such as "alibi-*-s1".
        again: Train the runs of --only even if STUDY/records has them, and compare the losses.
    """
    if report_only and site is not None:
        raise ConfigError(
            "--report-only and --site: choose one. --report-only evaluates on this machine"
        )
    from pretrain.study.command import Request, print_plan, run_study

    if dry_run:
        print_plan(file, nproc, only, again)
        return
    raise typer.Exit(run_study(file, Request(nproc or 1, site, report_only, only, again)))


# ---- pretrain checkpoint ----
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]


@checkpoint.command("list")
def list_(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Show a run's checkpoints in a table.

    Shows the step, id, branch, time, size and validation loss of each checkpoint, and whether it is
    damaged. Abandoned checkpoints are listed separately. Reads only small files; `pretrain
    checkpoint verify` reads everything.

    \b
    Example:
      pretrain checkpoint list runs/demo/alibi

    Args:
        as_json: Print JSON, for programs.
    """
    from pretrain.checkpoint.tools import format_rows, list_run

    rows = list_run(run)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        print(format_rows(run, rows))


@checkpoint.command()
def show(source: Source) -> None:
    """Describe one checkpoint.

    Prints its id and ancestry, the allowed changes, the hashes of its data, the code and versions
    that saved it, a summary of its config, and its parameters with their shapes.

    \b
    Example:
      pretrain checkpoint show runs/demo/alibi/checkpoints/step-00000320
    """
    from pretrain.checkpoint.tools import show_source

    print(show_source(source))


@checkpoint.command()
def verify(
    sources: Annotated[list[str], typer.Argument(metavar="RUN|CHECKPOINT|URL")],
) -> None:
    """Read every byte of checkpoints and compare the digests.

    Names each damaged file. The exit code is 1 if there is one.

    \b
    Example:
      pretrain checkpoint verify runs/demo/alibi

    Args:
        sources: Runs (all of their checkpoints), single checkpoints, or URLs as in
            checkpoint.upload_to.
    """
    from pretrain.checkpoint.tools import verify_sources

    if not verify_sources(sources):
        raise typer.Exit(ExitCode.FAILED)


@checkpoint.command()
def prune(
    run: Run,
    keep: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    keep_every: Annotated[int | None, typer.Option(min=0, metavar="M")] = None,
    keep_best: Annotated[int | None, typer.Option(min=0, metavar="K")] = None,
    yes: bool = False,
) -> None:
    """Delete old checkpoints by the same rules as during training.

    Never deletes the two newest checkpoints, or one that a reader holds or that waits for an
    evaluation. First reads every byte of the newest checkpoint; if it is damaged, deletes nothing.
    A run that is training is refused.

    \b
    Example:
      pretrain checkpoint prune runs/demo/alibi --keep 2 --keep-every 1000 --yes

    Args:
        keep: Newest checkpoints to keep. Default of this and the next two: the run's config.
        keep_every: Also keep those whose step is a multiple of this; 0: none.
        keep_best: Also keep those with the lowest validation loss.
        yes: Delete. Without this option, the command only shows what it would delete.
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
def upload(
    run: Run,
    to: Annotated[str | None, typer.Option(metavar="URL")] = None,
) -> None:
    """Upload the checkpoints of a run that are not in its object store yet.

    Training uploads automatically if checkpoint.upload_to is set. This command uploads checkpoints
    whose upload failed. The exit code is 1 if one is still missing.

    \b
    Example:
      pretrain checkpoint upload runs/demo/alibi --to s3://bucket/alibi

    Args:
        to: URL of the store. Default: checkpoint.upload_to of the run's config.
    """
    from pretrain.checkpoint.tools import upload_run

    missing = upload_run(run, to)
    print("\n".join(missing) or f"{run}: every checkpoint is uploaded")
    if missing:
        raise typer.Exit(ExitCode.FAILED)
