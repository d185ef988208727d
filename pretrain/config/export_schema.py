"""Define the keys of [export], as `schema` does most others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from pretrain.config.section import Section

_Language = Annotated[
    str, StringConstraints(pattern=r"^([a-z]{2,3}(-[A-Za-z]+)?|multilingual|code)$")
]
_Dataset = Annotated[str, StringConstraints(pattern=r"^([\w.-]+/)?[\w.-]+$", max_length=96)]


class ExportSection(Section):
    """[export]: what a model card says of the model. `pretrain export --set` takes them too."""

    license: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9.\-]*$")
    """License of the exported model, by the Hub's identifier: "apache-2.0", "cc-by-4.0", "mit",
    "other". Default: the model card names none."""

    language: tuple[_Language, ...] = Field(default=(), strict=False)
    """Languages of the text, by ISO 639 code: ["en"]; also "multilingual" and "code"."""

    datasets: tuple[_Dataset, ...] = Field(default=(), strict=False)
    """Data sets that the model was trained on, by their names on the Hub: ["org/name"]. The first
    also names the text that perplexities were measured on; a part of it was held out."""

    task_bytes: int = Field(default=2**20, ge=0)
    """The most bytes of validation text, taken from its first documents, that are put beside the
    model as a task for lm-eval. Set 0 for text that must not be published: then none of it is in
    the folder or in the model card."""
