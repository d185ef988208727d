"""Load a run's config: TOML files that build on each other, `--set`, the checks; and write it back.

The example configs and site files that are installed with the package are found here as well.
`pretrain/configs` and `pretrain/slurm` lie beside the code. In a clone they are links to the
folders of those names at its root; in an installed wheel they are folders in site-packages, where
users do not look for them.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pretrain.config import rules
from pretrain.config.errors import ConfigError
from pretrain.config.run import PROTOCOLS, STREAM, RunConfig, changed_keys, in_phase
from pretrain.config.schema import Effect, Section

CONFIG_VERSION = 1
"""The version of the files that `dump_config` writes, as they state it. It is raised when a key's
meaning changes, or the value of a key that they lack, so that such a file would be read as another
run. What a person writes needs no version."""
_VERSION, _BASE = "config_version", "base"
"""The keys at the top of a file that are no sections of a run's config."""


# ---- Files ---------------------------------------------------------------------------------------
def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file in UTF-8, with or without a byte order mark.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not UTF-8 or not TOML.
        RecursionError: Its brackets are a thousand deep.
    """
    return tomllib.loads(path.read_bytes().decode("utf-8-sig"))


def read_values(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a config file, laid over the base that it names: `base = "other.toml"` at its top.

    Tables are merged key by key at every depth, any other value replaces the base's.

    Args:
        path: The file.
        above: The files that build on it, of which the last one names it as its base.

    Returns:
        Section -> its keys and values, as tomllib returns them.

    Raises:
        ConfigError: A file is missing or is no TOML, or the bases form a circle.
    """
    asked = f", the base of {above[-1]}" if above else ""
    if os.path.realpath(path) in map(os.path.realpath, above):
        raise ConfigError(f"{path}{asked}: builds on itself. Remove one of these bases")
    try:
        values = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such config file{asked}. `pretrain config --list` shows the configs that "
            "are installed with this package; a base is looked for from the folder of its file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable config file{asked}: {error}") from None
    values = without_version(values, path)
    base = values.pop(_BASE, None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {_BASE} = {base!r}: expected the name of one config file")
    return merged(
        read_values(path.parent / expand_path(f"{path}: {_BASE}", base), (*above, path)), values
    )


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table laid over another: tables key by key, any other value replaces the base's."""
    result = dict(base)
    for key, value in overlay.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = merged(below, value)
        result[key] = value
    return result


def without_version(values: Mapping[str, Any], file: Path | str) -> dict[str, Any]:
    """Return the content of a file without its version, which it may state.

    Raises:
        ConfigError: It is another one.
    """
    found = values.get(_VERSION, CONFIG_VERSION)
    # In Python true and 1.0 equal 1, too.
    if type(found) is not int or found != CONFIG_VERSION:
        raise ConfigError(
            f"{file}: {_VERSION} = {found!r}: this version of pretrain reads {CONFIG_VERSION}. Use "
            "the version that wrote the file"
        )
    return {key: value for key, value in values.items() if key != _VERSION}


# ---- Paths ---------------------------------------------------------------------------------------
# ~ and $VARIABLE are expanded once, when a config is read, so what a run records of itself is the
# place that it had: a variable may have another value on another node or for another user. The
# paths that come out hold no variable any more, so reading a recorded config again changes nothing.
#
# The environment is read here because a user has written the variable's name into the config. No
# other module of this package reads it.
PATHS = {
    "run": ("directory",),
    "data": ("directory", "paths", "validation_paths", "tokenizer"),
    "checkpoint": ("upload_to",),
}
"""The keys by section that hold paths or URLs."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^{}]*)\})")
"""$NAME or ${NAME}. Any other dollar stays as it is."""


def expand_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a config with ~ and variables expanded in every path.

    Args:
        values: Section -> its keys and values, which have not been checked yet: what is no path is
            left as it is.

    Raises:
        ConfigError: A variable or a home directory in a path does not exist.
    """
    result = dict(values)
    for section, names in PATHS.items():
        if isinstance(keys := result.get(section), dict):
            result[section] = _expanded(section, keys, names)
    data = result.get("data")
    if isinstance(data, dict) and isinstance(corpora := data.get("corpora"), dict):
        data["corpora"] = {
            name: _expanded(f"data.corpora.{name}", corpus, ("paths",))
            if isinstance(corpus, dict)
            else corpus
            for name, corpus in corpora.items()
        }
    return result


def expand_path(key: str, path: str) -> str:
    """Return a path with ~ and variables expanded.

    Args:
        key: Where it stands, for the message.
        path: A path, a pattern or a URL.

    Raises:
        ConfigError: A variable or a home directory in it does not exist.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        found = os.environ.get(name, "")
        # An empty one would turn $SCRATCH/runs into /runs, and a recorded config is read again.
        if not found or _VARIABLE.search(found):
            state = "itself contains a variable" if found else "is not set"
            raise ConfigError(
                f"{key} = {path}: the variable {name} {state}. Set it (export {name}=...), or "
                "write the path without it"
            )
        return found

    expanded = os.path.expanduser(_VARIABLE.sub(value, path))
    if expanded.startswith("~"):
        raise ConfigError(f"{key} = {path}: there is no such home directory")
    return expanded


def _expanded(section: str, keys: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return a section's keys with those of these names expanded."""
    return keys | {n: _each(f"{section}.{n}", keys[n]) for n in names if n in keys}


def _each(key: str, value: Any) -> Any:
    """Return a value with every text in it expanded."""
    if isinstance(value, str):
        return expand_path(key, value)
    return [_each(key, part) for part in value] if isinstance(value, list | tuple) else value


# ---- Keys ----------------------------------------------------------------------------------------
def section_keys() -> dict[str, list[str]]:
    """Return the names of all keys by section, in the order of the config file."""
    sections = (name for name in RunConfig.model_fields if name != "phases")
    return {name: list(section_fields(name)) for name in sections}


def section_fields(section: str) -> dict[str, FieldInfo]:
    """Return the fields of a section by name, those of all classes that it may be."""
    found: dict[str, FieldInfo] = {}
    for model in section_models(section):
        for name, field in model.model_fields.items():
            found.setdefault(name, field)
    return found


def section_models(section: str) -> list[type[Section]]:
    """Return the class of a section and those registered below it, as one for each optimizer.

    Raises:
        KeyError: There is no such section.
    """
    annotation = RunConfig.model_fields[section].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return [candidate, *getattr(candidate, "REGISTERED", {}).values()]
    raise KeyError(section)


def effect_of(key: str) -> Effect:
    """Return what a change of "section.key" does, as the key or else its section says.

    Raises:
        TypeError: Neither says it.
    """
    section, _, name = key.partition(".")
    model = next(each for each in section_models(section) if name in each.model_fields)
    own = [each for each in model.model_fields[name].metadata if isinstance(each, Effect)]
    effect = own[0] if own else model.EFFECT
    if effect is None:
        raise TypeError(f"{key}: say what its change means, as in Free[int]")
    return effect


def suggestion(*location: str) -> str:
    """Return the end of the message about an unknown key: what was probably meant.

    The same name in another section comes first, as of a key under the wrong header.
    """
    keys, (section, *_, name) = section_keys(), (*location[:1], location[-1])
    meant = [f"{other}.{name}" for other, names in keys.items() if name in names]
    among = [f"{section}.{key}" for key in keys.get(section, ())] or [*keys, _BASE]
    meant += difflib.get_close_matches(".".join(location).lower(), among, 1)
    return f", did you mean {meant[0]}?" if meant else f"; there are {', '.join(among)}"


# ---- --set section.key=value ---------------------------------------------------------------------
# The value is TOML. A shell takes away the quotes that TOML wants around a text, so what is not
# TOML is a text as well, without the space around it. Every value of a key that holds texts alone
# is one, even "2024" and "none". Nothing behind the = removes the key.
def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the sections of a config with overrides applied, the first one first.

    Args:
        values: Section -> its keys and values, as tomllib returns them. They stay as they are.
        overrides: "section.key=value" each, or "section.key=", which removes the key.

    Raises:
        ConfigError: An override is malformed, or removes a key that does not exist.
    """
    result = dict(values)
    for override in overrides:
        *tables, name = key_of(override).split(".")
        text = override.partition("=")[2].strip()
        holder = result
        for table in tables:
            inner = holder.get(table)
            holder[table] = holder = dict(inner) if isinstance(inner, dict) else {}
        if text:
            holder[name] = _value((*tables, name), text)
        # A misspelled key would be removed without any effect, and the one that is meant stay.
        elif holder.pop(name, None) is None and _field(*tables, name) is None:
            key = ".".join((*tables, name))
            raise ConfigError(f"--set {override}: {key}: no such key{suggestion(*tables, name)}")
    return result


def key_of(override: str) -> str:
    """Return the key that an override is about: "section.key", or "data.corpora.NAME.key"."""
    key, separator, _ = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not (separator and len(parts) > 1 and all(parts)):
        raise ConfigError(
            f"--set {override}: expected section.key=value, as in --set train.num_steps=100, or "
            "section.key= to remove the key"
        )
    return ".".join(parts)


def _field(section: str, name: str, *inner: str) -> FieldInfo | None:
    """Return the field of a key; `inner` is the rest of one of a table, such as NAME.paths."""
    field = section_fields(section).get(name) if section in RunConfig.model_fields else None
    if field is None or not inner:
        return field
    *_, table = get_args(field.annotation) or (None,)
    fields: dict[str, FieldInfo] = getattr(table, "model_fields", {})
    return fields.get(inner[1]) if len(inner) == 2 else None


def _value(key: Sequence[str], text: str) -> Any:
    """Return the value that a text stands for."""
    try:
        # In brackets, a comment or another line at its end is an error.
        [value] = tomllib.loads(f"values = [{text}]")["values"]
    # An integer of more than 4,300 digits is a ValueError, deep brackets are the other one.
    except (ValueError, RecursionError):
        return text
    field = _field(*key)
    is_text = field is not None and field.annotation in (str, str | None)
    return text if is_text and not isinstance(value, str) else value


# ---- A run ---------------------------------------------------------------------------------------
def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    sections: Mapping[str, dict[str, Any]] | None = None,
) -> RunConfig:
    """Read a TOML file and the bases that it names, apply overrides and check the result.

    Args:
        path: The config file.
        overrides: "section.key=value" as after `--set`; of several on one key the last one wins.
            The value is TOML, or a plain word, which needs no quotes. "section.key=" removes the
            key, which brings its default back.
        sections: Whole sections that replace those of the file, before the overrides are applied.

    Returns:
        The config, with every rule checked that does not depend on the number of processes.

    Raises:
        ConfigError: When the file or a base of it cannot be read, or the run cannot work. The
            message names the file, the key, the value and the remedy.
    """
    return parse_config(read_values(Path(path)) | dict(sections or {}), str(path), overrides)


def parse_config(values: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Build and check a config from a dictionary of sections.

    Args:
        values: Section name -> its keys and values, as tomllib returns them.
        origin: What the values were read from; every line of an error message begins with it.
        overrides: As for `load_config`; applied to a copy of the values.

    Raises:
        ConfigError: When a key or value is not valid, or the run cannot work.
    """
    # The keys of a missing section are named instead of the section.
    named = dict[str, Any]((n, {}) for n, f in RunConfig.model_fields.items() if f.is_required())
    values = overridden(named | without_version(values, origin), overrides)
    try:
        values = expand_paths(values)
        rules.check_secrets(values)
        config = RunConfig.model_validate(values)
        rules.check(config)
        _check_phases(config)
    except (ValidationError, ConfigError) as error:
        where = ": ".join([origin, *getattr(error, "__notes__", ())])
        if isinstance(error, ConfigError):
            lines = str(error).splitlines()
        else:
            # A misspelled key is the reason why another one is missing, so it comes first.
            errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
            lines = [explain(e) for e in errors]
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None
    return config


def _check_phases(config: RunConfig) -> None:
    """Check what each phase changes, and the config that it has then.

    Raises:
        ConfigError, ValidationError: A phase cannot work; a note names it.
    """
    method = config.position.method
    for number, phase in enumerate(config.phases, 1):
        changes, before = changed_keys(phase), method
        method = changes.get("position.method", method)
        # Another method begins with keys of its own.
        own = ("position.",) if method != before else ()
        asked = [key for key in changes if not key.startswith(own)]
        if fixed := [key for key in asked if not _may_change(key, config)]:
            places = {key: f"[{key.rpartition('.')[0]}]" for key in fixed}
            if method != config.position.method:
                begun = [key for key in fixed if key.startswith("position.")]
                places |= dict.fromkeys(begun, f"the phase that begins {method}")
            with in_phase(number):
                raise ConfigError(
                    "\n".join(
                        f"{key} = {changes[key]!r}: is the same in all phases of a run. Set it in "
                        f"{place}"
                        for key, place in places.items()
                    )
                )
    parts = config.parts if config.phases else ()
    for each in parts:
        with in_phase(each.number):
            rules.check(each.config)
    tables = [e.config for e in parts if hasattr(e.config.position, "max_position_embeddings")]
    if len({c.position.table_end(c) for c in tables}) > 1:
        raise ConfigError(
            "position.max_position_embeddings: follows data.sequence_length, and must be the same "
            "in all phases of a run. Set it in [position]"
        )


def _may_change(key: str, config: RunConfig) -> bool:
    """Return False for a key that one phase of a run cannot change; True for an unknown one."""
    section, name, *inner = (*key.split("."), "")
    if (section, name) == ("data", "corpora"):
        # The data set is built of all corpora of the run, whose shares alone may change.
        return inner[0] in config.data.corpora and inner[1] in ("epochs", "weight")
    if name not in section_keys().get(section, ()):
        # The config that results says what was probably meant; it has no phases.
        return section != "phases"
    effect = effect_of(f"{section}.{name}")
    if section in _WHOLE or f"{section}.{name}" in _WHOLE or section == "data":
        return section == "data" and effect is Effect.TRAJECTORY
    return effect not in (Effect.FIXED, Effect.CONTENT)


_WHOLE = {
    *("run", "parallel", "cleaning", "checkpoint", "logging", "recovery", "export"),
    # A ramp-up and a profile count from the run's beginning.
    *("train.num_steps", "train.profile_steps", "batch.rampup_batch_size"),
    # The initial weights are drawn before the first step.
    *("model.init_method_std", "model.embedding_init_method_std"),
}
"""Sections and keys that all phases have in common."""


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as TOML: its version, and every key with its value.

    Keys whose value is None are left out, since TOML has no null. `load_config` reads the text back
    as an equal config.
    """
    sections = config.model_dump(mode="json", exclude_none=True)
    if not config.phases:
        del sections["phases"]
    return tomli_w.dumps({_VERSION: CONFIG_VERSION, **sections})


def explain(error: Any, keys: Collection[str] | None = None, *, hides_value: bool = False) -> str:
    """Return a pydantic error (`ErrorDetails`) as a line: the key, its value, what is expected.

    Args:
        error: The error.
        keys: The keys of the file, if they are not those of a run's config.
        hides_value: Leave out the value, which may be a secret.
    """
    location = [str(part) for part in error["loc"]]
    # lengths[1] is the second element of a list.
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    key, text = "".join(parts).removeprefix("."), error["msg"]
    if error["type"] == "extra_forbidden":
        known = f"; keys are {', '.join(keys)}" if keys and len(location) == 1 else ""
        return f"{key}: no such key{suggestion(*location) if keys is None else known}"
    if error["type"] == "missing":
        return f"{key}: missing, and it has no default. Set it"
    if error["type"] == "tuple_type":
        text = "should be a valid list, as in [...]"
    got = error["input"]
    kind = f" (got {type(got).__name__})" if "valid" in text or hides_value else ""
    shown = key if hides_value else f"{key} = {got!r}"
    return f"{shown}: {text[:1].lower()}{text[1:]}{kind}"


# ---- What an evaluation shall measure ------------------------------------------------------------
@dataclass(frozen=True)
class EvaluationRequest:
    """The options of an evaluation.

    Lengths and stride that are None are those of the run's config. `pretrain evaluate` takes them
    on its command line, and the launcher passes them on to the evaluation job of every checkpoint.
    """

    lengths: tuple[int, ...] | None
    """Window lengths in tokens."""

    protocols: tuple[str, ...]
    """Names out of PROTOCOLS, or STREAM alone."""

    stride: int | None
    """Tokens by which a sliding window moves on, which is also how many of its predictions are
    scored."""

    max_tokens: int | None
    """The most tokens of the validation stream to score; None scores all of them, whatever the
    run's config says about the evaluations in its training loop."""

    @staticmethod
    def parse(
        lengths: str | None, protocols: str, stride: int | None, max_tokens: int | None
    ) -> EvaluationRequest:
        """Build a request from the values of the command-line options.

        Args:
            lengths: --lengths, for example "128,256,512"; None when the option is not given.
            protocols: --protocols, for example "nonoverlapping,sliding".
            stride: --stride in tokens.
            max_tokens: --max-tokens.

        Raises:
            ConfigError: When a value is not valid. The message names the option.
        """
        try:
            parsed = tuple(int(n) for n in lengths.split(",")) if lengths is not None else None
        except ValueError:
            raise ConfigError(
                f"--lengths {lengths}: expected numbers of tokens separated by commas, "
                "as in --lengths 128,256,512"
            ) from None
        names = tuple(protocols.split(","))
        if names == (STREAM,) and (lengths is not None or stride is not None):
            raise ConfigError(
                "--stream: the text is read in one pass and has no windows. Leave out --lengths "
                "and --stride"
            )
        if names != (STREAM,) and (unknown := {*names} - {*PROTOCOLS}):
            raise ConfigError(
                f"--protocols {unknown.pop()}: unknown protocol. Choose {' or '.join(PROTOCOLS)}, "
                "or both separated by a comma"
            )
        given = {"--lengths": parsed, "--stride": stride, "--max-tokens": max_tokens}
        for option, value in given.items():
            least = min(value) if isinstance(value, tuple) else value
            if least is not None and least < 1:
                raise ConfigError(f"{option} {least}: expected 1 or more tokens")
        if parsed and stride is not None and stride > min(parsed):
            raise ConfigError(
                f"--stride {stride}: longer than the shortest window of --lengths, {min(parsed)} "
                f"tokens, so that windows would leave tokens out. Choose {min(parsed)} or less"
            )
        if parsed and max_tokens is not None and max(parsed) > max_tokens:
            raise ConfigError(
                f"--lengths {max(parsed)}: more than the {max_tokens:,} tokens of --max-tokens, so "
                "not one window could be scored. Raise --max-tokens, or choose shorter lengths"
            )
        return EvaluationRequest(parsed, names, stride, max_tokens)

    def options(self) -> list[str]:
        """Return the command-line arguments from which `parse` builds this request again."""
        options = ["--protocols", ",".join(self.protocols)]
        if self.lengths is not None:
            options += ["--lengths", ",".join(map(str, self.lengths))]
        for option, value in (("--stride", self.stride), ("--max-tokens", self.max_tokens)):
            options += [option, str(value)] if value is not None else []
        return options

    def applied_to(self, config: RunConfig, origin: str) -> RunConfig:
        """Return a run's config with this request in its [evaluation], checked like any other.

        `evaluation.max_tokens` of the run bounds the evaluations in its training loop and is
        dropped: what the command scores is all of the text, or what --max-tokens says.

        Args:
            config: The run's config.
            origin: The file that it comes from, for messages.

        Raises:
            ConfigError: The run's model cannot be evaluated so, for example at a length beyond its
                position embeddings.
        """
        values = config.model_dump(mode="json", exclude_none=True)
        section = values["evaluation"]
        section.pop("max_tokens", None)
        if self.lengths is not None:
            section["lengths"] = list(self.lengths)
            own = config.evaluation.stride
            if own is not None and own > min(self.lengths):
                # Without the key, the stride is the shortest of the new lengths.
                del section["stride"]
        asked = {"stride": self.stride, "max_tokens": self.max_tokens}
        section |= {key: value for key, value in asked.items() if value is not None}
        return parse_config(values, origin)


# ---- What is installed with the package ----------------------------------------------------------
PACKAGE = Path(__file__).parents[1]


def shipped() -> dict[str, list[Path]]:
    """Return the TOML files that are installed with the package, by what they are for."""
    # In a clone the package's folders are links. Resolved, the paths are those at the clone's root.
    files = [path.resolve() for path in sorted((PACKAGE / "configs").rglob("*.toml"))]
    configs = [path for path in files if path.parent.name != "studies"]
    # A whole config names run.directory, which no two runs share, so no base has one.
    runs = [path for path in configs if "directory" in read_values(path).get("run", {})]
    return {
        "Configs, for `pretrain` and `launcher` as CONFIG:": runs,
        'Parts of them, for `base = "FILE"` in a config of your own:': [
            path for path in configs if path not in runs
        ],
        "Studies, for `pretrain study` as STUDY:": [path for path in files if path not in configs],
        "Example sites, for `launcher submit --site`; copy one and set your cluster's values:": [
            path.resolve() for path in sorted((PACKAGE / "slurm").glob("site.*.toml"))
        ],
    }


def list_shipped() -> str:
    """Return what `pretrain config --list` prints: every file, and its first line, a comment."""
    return "\n\n".join("\n".join(_listed(title, paths)) for title, paths in shipped().items())


def _listed(title: str, paths: list[Path]) -> Iterator[str]:
    """Yield two lines for each file, so that a long path never breaks a table."""
    yield title
    for path in paths:
        here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        yield f"  {here}"
        yield f"      {path.read_text().partition(chr(10))[0].removeprefix('#').strip()}"
