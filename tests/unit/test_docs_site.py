"""The reference of the site has every key and every command, and its links lead somewhere.

mkdocs is not needed for this. Where it is installed (`make setup`), the whole site is built.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from docs.hooks import reference
from pretrain.config.load import section_keys
from tests.changed import ROOT
from tests.guide import APPS, check_words

HAS_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material"))
KEYS = dict(reference.config_keys())
OF_FILES = {
    f"{name}: {key}": field for name in reference.FILES for key, field in reference.file_keys(name)
}


def test_every_key_of_a_config_is_in_the_reference():
    page = reference.config_page()
    unescaped = re.sub(r"\\([>*_\[\]])", r"\1", page).replace("&lt;", "<")
    assert {f"{s}.{name}" for s, keys in section_keys().items() for name in keys} <= set(KEYS)
    assert "data.corpora.NAME.weight" in KEYS and len(KEYS) > 100
    for key, field in KEYS.items():
        assert f"{{ #{key.replace('.', '-')} }}" in page
        assert " ".join((field.description or "").split("\n\n")[0].split()) in unescaped
    # Patterns and signs are no Markdown.
    assert r'"corpus/\*\*/\*.txt"' in page


@pytest.mark.parametrize("name", reference.FILES)
def test_every_key_of_a_site_and_of_a_study_is_in_the_reference(name):
    page = reference.file_page(name)
    assert all(f"\n### {key} {{" in page for key, _ in reference.file_keys(name))


def test_no_key_is_without_a_docstring():
    assert [key for key, field in (KEYS | OF_FILES).items() if not field.description] == []


@pytest.mark.parametrize("name", reference.COMMANDS)
def test_every_command_and_option_is_in_the_reference(name: str):
    page = reference.commands_page(name)
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings == [" ".join(words) for words, _ in reference.commands(name)]
    assert len(headings) > 8
    shown = subprocess.run(
        [sys.executable, "-m", "pretrain" if name == "pretrain" else "pretrain.launcher", "-h"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", shown.partition("Commands:")[2], re.MULTILINE)
    assert len(listed) > 5 and {f"{name} {command}" for command in listed} <= set(headings)
    for _, command in reference.commands(name):
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert f"`{max(parameter.opts, key=len)}" in page


def test_examples_in_helps_are_commands_that_exist():
    count = 0
    for name in APPS:
        page = reference.commands_page(name)
        for example in re.findall(r"```text\n((?:pretrain|launcher) .*?)```", page, re.S):
            for line in example.replace("\\\n", " ").splitlines():
                words = line.split("#")[0].replace("'", "").split()
                # What is in capitals stands for something.
                if words[:1] in (["pretrain"], ["launcher"]) and not re.search(
                    "[A-Z]{5}|[|]", line
                ):
                    check_words(words)
                    count += 1
    assert count > 20


@pytest.mark.skipif(not HAS_MKDOCS, reason="mkdocs is not installed: make setup")
def test_the_site_builds_without_a_warning_and_loads_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"guide.html", "index.html"} <= {page.name for page in pages} and len(pages) > 100
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe|link)[^>]*=\"?https?://[^>]*>", page.read_text()
        )
        assert loaded == [], page
