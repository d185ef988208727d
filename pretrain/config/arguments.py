"""The command lines of `pretrain` and `launcher`: shared arguments, and where their help stands.

The docstring of a command is the text of its --help, and under Args it describes the parameters.
`Commands` hands typer both.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from pretrain.config.load import EvaluationRequest

Command = TypeVar("Command", bound=Callable[..., Any])


class Commands(typer.Typer):
    """A group of commands whose docstrings describe their parameters under Args.

    A parameter is an option unless its annotation says typer.Argument. A flag has no --no-flag. A
    parameter that is a dataclass stands for an option for each of its fields, which the docstring
    of the class describes in the same way.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            # The subcommands inherit this from the app.
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Command], Command]:
        """Register the decorated function, as typer.Typer.command does."""
        register = super().command(name, **settings)

        def decorate(function: Command) -> Command:
            register(_documented(function))
            return function

        return decorate


def _documented(command: Command) -> Command:
    """Return a command whose parameters have the help that its docstring has under Args."""
    command.__doc__, hints = _described(command)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        options = {name: parameter.default}
        if name in groups:
            hints |= _described(groups[name])[1]
            options = vars(groups[name]())
        parameters += [
            inspect.Parameter(option, _BY_NAME, default=default, annotation=hints[option])
            for option, default in options.items()
        ]

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{option: given.pop(option) for option in vars(group())})
        return command(**given)

    # typer looks at both.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return cast(Command, call)


_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def _described(described: Any) -> tuple[str, dict[str, Any]]:
    """Return a docstring without its Args, and the type hints with the help that stands there."""
    text, _, arguments = (inspect.getdoc(described) or "").partition("\n\nArgs:\n")
    hints = get_type_hints(described, include_extras=True)
    for name, words in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE):
        is_annotated = get_origin(hints[name]) is Annotated
        kind, given = get_args(hints[name]) if is_annotated else (hints[name], typer.Option())
        info = copy.copy(given)
        info.help = " ".join(words.split())
        # In an annotation, typer keeps a name that is given in `default`.
        if kind is bool and info.default is ...:
            info.param_decls = (f"--{name.replace('_', '-')}",)
        hints[name] = Annotated[kind, info]
    return text, hints


Count = Annotated[int, typer.Option(min=1)]
Number = Annotated[int | None, typer.Option(metavar="N")]
Numbers = Annotated[str | None, typer.Option(metavar="N,N,...")]


@dataclass(frozen=True)
class Evaluations:
    """The options that say what the evaluations of checkpoints measure.

    Args:
        lengths: Window lengths of evaluations in tokens, as in 128,512,2048. Default:
            evaluation.lengths of the config, or 1, 2, 4, 8 and 16 times the training length, up to
            the length of the text.
        protocols: Protocols of evaluations: nonoverlapping, sliding, or both separated by a comma.
        stride: Tokens from one sliding window to the next. Default: evaluation.stride of the
            config, or the shortest length if that is shorter.
        max_tokens: Score at most this many validation tokens. Default: all; evaluation.max_tokens
            limits the evaluations during training.
    """

    lengths: Numbers = None
    protocols: str = "nonoverlapping,sliding"
    stride: Number = None
    max_tokens: Number = None

    def request(self) -> EvaluationRequest:
        """Return the options as a request. Raises ConfigError for a wrong value."""
        return EvaluationRequest.parse(self.lengths, self.protocols, self.stride, self.max_tokens)


OutFile = Annotated[Path | None, typer.Option(metavar="FILE")]
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE.json")]
Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="TOML file of the run. `pretrain config --list` shows examples."
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a value of the config, as in --set train.num_steps=100. With nothing after "
        "the =, remove the key, which restores its default. Can be repeated.",
    ),
]
AllowChanged = Annotated[
    list[str],
    typer.Option(
        "--allow-changed",
        metavar="SECTION.KEY",
        help="Resume although this key, which changes training, differs from the checkpoint's. "
        "data.directory means the training tokens, data.tokenizer the tokenizer. The change is "
        "recorded in later checkpoints and metrics.jsonl. Can be repeated.",
    ),
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="Directory of a run (its newest checkpoint), or of one checkpoint.",
    ),
]
"""The first argument of commands that read a checkpoint."""
Sources = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN|CHECKPOINT|HF_FOLDER",
        help="Directories of runs (their newest checkpoints), of checkpoints, or of Hugging Face "
        "models (with a config.json).",
    ),
]
"""The first argument of commands that evaluate several models together."""


def expand_home(words: Sequence[str]) -> list[str]:
    """Return command-line arguments with the ~ of --option=~/path expanded.

    A shell expands it at the beginning of a word, and bash nowhere else.
    """
    result = []
    for word in words:
        option, separator, value = word.partition("=")
        if separator and option.startswith("--") and value.startswith("~"):
            word = f"{option}={os.path.expanduser(value)}"
        result.append(word)
    return result


def print_and_exit(text: Callable[[], str]) -> Callable[[bool], None]:
    """Return the callback of a flag that prints a text and ends the command, as --help does."""

    def callback(given: bool) -> None:
        if given:
            print(text())
            raise typer.Exit

    return callback


def version_flag(command: str) -> Any:
    """Return the option --version of a command; pyproject.toml states the version."""

    def text() -> str:
        try:
            return f"{command} {importlib.metadata.version('pretrain')}"
        except importlib.metadata.PackageNotFoundError:
            return f"{command} (run from its source, not installed)"

    return typer.Option(
        "--version",
        is_eager=True,
        callback=print_and_exit(text),
        help="Print the version and exit.",
    )
