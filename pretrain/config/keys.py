"""Name the keys of a config, and guess which one was meant by a name that is none."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pretrain.config.run import RunConfig


def section_keys() -> dict[str, list[str]]:
    """Return the names of all keys by section, in the order of the config file."""
    return {name: list(_fields(name)) for name in RunConfig.model_fields}


def is_text(section: str, name: str) -> bool:
    """Return True if every value of a key is a text, so that "2024" can only mean the word."""
    field = _fields(section).get(name) if section in RunConfig.model_fields else None
    return field is not None and all(kind is str for kind in _kinds(field.annotation))


def is_needed(location: Sequence[int | str]) -> bool:
    """Return True for the location of a config's key that has no default."""
    section, name = (*map(str, location), "", "")[:2]
    field = _fields(section).get(name) if section in RunConfig.model_fields else None
    return field is not None and field.is_required()


def suggestion(location: list[str]) -> str:
    """Return the end of the message about an unknown key: what was probably meant.

    The same name in another section comes first (a key under the wrong header), then a similar name
    in the section.
    """
    sections = section_keys()
    if len(location) == 1:
        near = _near(location[0], [*sections, "base", "remove"], 0.6)
        homes = [f"{s}.{location[0]}" for s, keys in sections.items() if location[0] in keys]
        if near or homes:
            return f", did you mean {(near or homes)[0]}?"
        return f"; sections are {', '.join(sections)}"
    section, name = location[0], location[1]
    if name in ("base", "remove"):
        return f"; {name} stands at the top of a file, before its first section"
    elsewhere = [f"{s}.{name}" for s, keys in sections.items() if name in keys]
    near = _near(name, sections[section], 0.5)
    if elsewhere or near:
        return f", did you mean {elsewhere[0] if elsewhere else f'{section}.{near[0]}'}?"
    return f"; [{section}] has {', '.join(sections[section])}"


def _near(name: str, names: list[str], cutoff: float) -> list[str]:
    """Return the most similar of some names, in lower case; an empty list if none is similar."""
    return difflib.get_close_matches(name.lower(), names, 1, cutoff)


def _fields(section: str) -> dict[str, Any]:
    """Return the fields of a section by name; none if it is a value and no section."""
    annotation = RunConfig.model_fields[section].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return dict(candidate.model_fields)
    return {}


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that a value may have, without None; of a Literal those of its values."""
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    return set() if annotation is type(None) else {annotation}
