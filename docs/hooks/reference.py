"""Write the reference of every config key and every command, in Markdown, from the code itself.

The keys' types, defaults, bounds and docstrings are pydantic's, those of the commands are click's.
`make docs` puts the pages into the site (docs/hooks/site_pages.py). Nothing of it is committed.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pretrain.cli.commands import app as pretrain
from pretrain.config.load import section_fields, section_models
from pretrain.config.run import RunConfig
from pretrain.config.schema import Effect
from pretrain.config.trajectory import effect_of
from pretrain.launcher.cli import app as launcher
from pretrain.launcher.site import Site
from pretrain.study.runs import StudyFile

COMMANDS = {"pretrain": pretrain, "launcher": launcher}
FILES: dict[str, tuple[str, type[BaseModel]]] = {
    "site": ("Site file keys", Site),
    "study": ("Study file keys", StudyFile),
}
"""Other TOML files than a run's config: name of the page -> its title, and the file's keys."""
_WORDS = {str: "text", bool: "true or false", int: "integer", float: "number", dict: "table"}
_BOUNDS = {"gt": "greater than {}", "ge": "at least {}", "lt": "less than {}", "le": "at most {}"}
_SHAPES = {
    "min_length": "not empty",
    "max_length": "at most {} of them",
    "pattern": "matching `{}`",
}
_ON_RESUME = {
    Effect.FIXED: "cannot change",
    Effect.FUNCTION: "changes what the model computes: refused unless `--allow-changed` names it",
    Effect.TRAJECTORY: "changes training: refused unless `--allow-changed` names it",
    Effect.CONTENT: "may change as long as the built data stays the same: other data is refused "
    "unless `--allow-changed` names `data.directory`, or `data.tokenizer` for another tokenizer",
    Effect.FREE: "may change",
    Effect.OUTCOME: "may change",
}


def _read_docstrings(model: type[BaseModel]) -> None:
    """Give a model's fields the docstrings below them, and then those of the models below it.

    Pydantic would (use_attribute_docstrings), when a class is made. It reads the source of every
    model then, at the start of every command, which took a third of the time to import a config.
    """
    # A class of a test, such as an optimizer of one's own, is ours by its bases.
    if any(base.__module__.startswith("pretrain.") for base in model.__mro__):
        [source] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
        assert isinstance(source, ast.ClassDef)
        texts = {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in itertools.pairwise(source.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        bases = [base for base in model.__mro__[1:] if issubclass(base, BaseModel)]
        for name, field in model.model_fields.items():
            above = (b.model_fields[name].description for b in bases if name in b.model_fields)
            field.description = texts.get(name) or next(filter(None, above), None)
    for each in model.__subclasses__():
        _read_docstrings(each)


_read_docstrings(BaseModel)


# ---- config keys ---------------------------------------------------------------------------------
def config_page() -> str:
    """Return the page of all keys of a run's config, a heading for each."""
    parts = [
        "# Config keys",
        "Every key of a run's TOML file, section by section. `pretrain config CONFIG` prints the "
        "values of a file with all defaults; `--set section.key=value` overrides one on the "
        "command line. *On resume* says what a change between two starts of a run means. This "
        "page is generated from the code.",
    ]
    for section, field in RunConfig.model_fields.items():
        parts += [f"## [{section}]", *_section(section, _models(field.annotation)[0])]
    return "\n\n".join(parts) + "\n"


def file_page(name: str) -> str:
    """Return the page of all keys of one of FILES."""
    title, model = FILES[name]
    parts = [f"# {title}", _unwrapped(model.__doc__ or ""), "Generated from the code."]
    parts += [part for key, field in file_keys(name) for part in _key(key, key, field)]
    return "\n\n".join(parts) + "\n"


def file_keys(name: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of one of FILES, those of a table as table.key, and its field."""
    for key, field in FILES[name][1].model_fields.items():
        inner = _models(field.annotation)
        if not inner:
            yield key, field
        for model in inner:
            yield from ((f"{key}.{own}", each) for own, each in model.model_fields.items())


def config_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of a run's config, as section.key, and its field.

    The keys of a table with names of one's own are data.corpora.NAME.key.
    """
    for section in RunConfig.model_fields:
        for name, own in section_fields(section).items():
            yield f"{section}.{name}", own
            # The keys of any other table stand in its docstring.
            tables = _models(own.annotation) if get_origin(own.annotation) is dict else []
            for model in tables:
                for inner, field_of_model in model.model_fields.items():
                    yield f"{section}.{name}.NAME.{inner}", field_of_model


def _section(section: str, model: type[BaseModel]) -> Iterator[str]:
    """Yield what is said about a section: its docstring and every key."""
    about = _plain(model.__doc__ or "").partition(": ")[2]
    yield about[:1].upper() + about[1:]
    for key, field in config_keys():
        if key.split(".")[0] == section:
            name = key.removeprefix(f"{section}.")
            yield from _key(key, name, field, *_owner(section, name), _resume(key))


def _owner(section: str, name: str) -> Iterator[str]:
    """Yield whose key it is, where one key of the section chooses which others there are."""
    models = section_models(section)
    if name not in models[0].model_fields:
        homes = [each.__name__ for each in models if name in each.model_fields]
        yield f"Of {', '.join(homes)}."


def _resume(key: str) -> str:
    """Return what a change of a key means when a run goes on."""
    return f"On resume: {_ON_RESUME[effect_of('.'.join(key.split('.')[:2]))]}."


def _key(key: str, name: str, field: FieldInfo, *more: str) -> Iterator[str]:
    """Yield the heading of a key, its type and default, and its docstring.

    Args:
        key: The whole key, for links.
        name: The name in its section.
        field: pydantic's description.
        more: Further sentences.
    """
    yield f"### {name} {{ #{key.replace('.', '-')} }}"
    # What a key that is left out means is said by its docstring.
    default = "optional" if field.default is None else f"default {_value(field.default)}"
    default = "required" if field.is_required() else default
    yield f"{describe_type(field)}, {default}. {' '.join(more)}".strip()
    yield _plain(field.description or "")


def describe_type(field: FieldInfo) -> str:
    """Return a field's type and bounds in words."""
    words = _bounded(_type(field.annotation), field.metadata)
    return words[:1].upper() + words[1:]


def _type(annotation: Any) -> str:
    """Return a type in words: "integer", "list of text", "`fp32`, `bf16` or `fp16`"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_type(arguments[0]), arguments[1:])
    if origin is Literal:
        return _either([_value(value) for value in arguments])
    if origin in (Union, types.UnionType):
        return _either([_type(part) for part in arguments if part is not type(None)])
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return f"list of {_plural(_type(arguments[0]))}"
        return f"list of {len(arguments)}: {', '.join(map(_type, arguments))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return _WORDS.get(origin or annotation) or getattr(annotation, "__name__", str(annotation))


def _bounded(words: str, constraints: Iterable[Any]) -> str:
    """Return a type with its bounds: "number at least 0 and less than 1", "text, not empty"."""
    found = {
        name: text.format(bound)
        for outer in constraints
        # Inside a type, Field(gt=0) is an object that holds the bounds.
        for constraint in getattr(outer, "metadata", [outer])
        for name, text in (_BOUNDS | _SHAPES).items()
        if (bound := getattr(constraint, name, None)) is not None
    }
    limits = " and ".join(found[name] for name in _BOUNDS if name in found)
    shapes = [found[name] for name in _SHAPES if name in found]
    return ", ".join([f"{words} {limits}".strip(), *shapes])


def _plural(words: str) -> str:
    """Return "integers greater than 0" of "integer greater than 0"."""
    return re.sub(r"^(integer|number|text)\b", r"\1s", words)


def _either(words: list[str]) -> str:
    """Return words as "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _value(value: Any) -> str:
    """Return a value as TOML has it; "none" for a key that is left out."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(_value(item).strip('`') for item in value)}]`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return "`{}`" if value == {} else f"`{value}`"


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a type holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


# ---- commands ------------------------------------------------------------------------------------
def commands_page(name: str) -> str:
    """Return the page of a command, `pretrain` or `launcher`, and of all its subcommands."""
    parts = [f"# {name}", "The output of `-h` for every command. Generated from the code."]
    for words, command in commands(name):
        parts += [f"## {' '.join(words)}", *_command(words, command)]
    return "\n\n".join(parts) + "\n"


def commands(name: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the definition of a command and of each that is not hidden below it."""
    yield from _below((name,), typer.main.get_command(COMMANDS[name]))


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _below((*words, name), inner)


def _command(words: tuple[str, ...], command: Any) -> Iterator[str]:
    """Yield what is said about one command: its help, usage, arguments and options."""
    context = command.make_context(words[-1], [], resilient_parsing=True)
    usage = " ".join([*words, *command.collect_usage_pieces(context)])
    usage = usage.replace("{", "").replace("}", "")
    yield f"```text\n{usage}\n```"
    yield from _help(command.help or "")
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            # An argument that click has no help of; typer's have one.
            continue
        if "--help" not in parameter.opts:
            rows.append(f"| {_code(record[0])} | {_cell(record[1])} |")
    if rows:
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows])


def _help(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring. One that begins with \\b keeps its lines."""
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        if not paragraph.strip().startswith("\b"):
            yield _plain(paragraph)
            continue
        lines = paragraph.replace("\b", "").strip("\n").splitlines()
        if lines and lines[0].endswith(":"):
            yield lines.pop(0)
        yield "\n".join(["```text", *textwrap.dedent("\n".join(lines)).splitlines(), "```"])


def _code(text: str) -> str:
    # Behind a backtick, Python-Markdown takes | for itself.
    return f"`{text.strip()}`"


def _cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Return a docstring's text with what Markdown would take for its own escaped, but `code`."""
    return "".join(
        part if part.startswith("`") else re.sub(r"([>*_\[\]])", r"\\\1", part.replace("<", "&lt;"))
        for part in re.split(r"(`[^`]*`)", _unwrapped(text))
    )


def _unwrapped(text: str) -> str:
    """Return a text without the line breaks inside its paragraphs."""
    paragraphs = [" ".join(p.split()) for p in textwrap.dedent(text).strip().split("\n\n")]
    return "\n\n".join(paragraphs)
