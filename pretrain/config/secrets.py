"""Tell secrets from other settings, by the names of variables and by what their values look like.

A config, a site file, the job's script and all that lies in a run's directory are read by others,
so no secret may stand in them. The filter errs on both sides: it is a safety net under the rule to
keep secrets elsewhere. No message of it has a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

_SECRET = re.compile(
    r"AUTH|AUTHORIZATION|BEARER|COOKIE|CREDS?|JWT|KEYS?|LOGIN|OTP|PASS|PASSCODE|PASSWORDS|PAT"
    r"|PSK|PSW|PW|PWD|USERPWD|WEBHOOK"
    # At the end of a word: MYTOKEN, PGPASSWORD, but not COMPASS or MONKEY.
    r"|.*((ACCESS|ACCOUNT|API|AUTH|PRIVATE|SECRET)KEY|CREDENTIALS?|(DB|USER)PASS|PASSPHRASE|PASSWD|PASSWORD)"
    r"|.*(SECRETS?|TOKEN)"
)
"""A name with such a word in it is a secret's: MY_PASS, GH_PAT, HF_AUTH."""
_SECRET_IN_URL = re.compile(r"HMAC|SAS|.*SIGNATURE")
"""So is a parameter of a URL with one of these. Of a variable they are as a rule a switch, such as
VERIFY_SIGNATURE=1; a shared access signature as its value is known by its `&sig=`."""
PLACES = {"DIR", "DIRECTORY", "FILE", "FILES", "HOME", "PATH", "SIZE", "SOCK", "SOCKET"}
"""A name that ends with one of these words says where a secret is, or how long: SSH_AUTH_SOCK."""
NO_SECRETS = {"PWD", "OLDPWD", "HF_HUB_DISABLE_IMPLICIT_TOKEN", "MAX_TOKEN", "NUM_TOKEN"}
"""The working directory and others that the words above do not tell apart."""
HIDDEN = "***"
"""Stands in a record in place of a secret."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name: of MY_PASS, of my-pass and of myPass."""
_ASSIGNED = re.compile(r"([A-Za-z][\w.-]*)=(?=.)")
"""NAME=... in a text."""
_PARAMETERS = re.compile(r"://[^?#]*([?#].*)", re.DOTALL)
_PARAMETER = re.compile(r"[?#&;,\s]([A-Za-z][\w.-]*)=(?=.)")
"""NAME=... in what follows the first ? or # of a URL."""
_OF_KEYS = {"ACCESS", "ACCOUNT", "API", "AUTH", "PRIVATE", "SECRET"}
"""In a URL a key is a secret after one of these words or alone: not partition_key or max_keys."""
_USER = re.compile(r"://[^\s/@]*:[^\s/@]*@|\bhttps?://[^\s/]*@", re.IGNORECASE)
"""user:password@ of a URL; of the web also a user alone, whose name is often a token."""
VALUES = {
    # user:password@ of any URL. A variable in place of the password is none.
    "a URL with a password": re.compile(r"[A-Za-z][\w+.-]*://[^\s/@:?#]*:[^\s/@$][^\s/@]*@"),
    # The signature of Azure, Amazon S3 or Google Cloud Storage opens the URL to whoever has it.
    "a signed URL": re.compile(
        r"[?#&](?:sig|signature|x-amz-signature|x-goog-signature)=[^&\s]", re.IGNORECASE
    ),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
    "a token": re.compile(
        r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
        r"|glpat-[\w-]{16,}|sk-(?:[a-z0-9]{2,8}-){0,3}\w{16,}|xox[abeprs]-[\w-]{10,}"
        r"|(?:AKIA|ASIA)[0-9A-Z]{16}"
        r"|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|nvapi-[\w-]{16,}"
        r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
    ),
    "a token in a header": re.compile(r"\b(?:Bearer|Basic) +[\w.~+/-]{8,}=*", re.IGNORECASE),
}
"""What a value looks like that is a secret whatever its name. The tokens are those of Hugging Face,
GitHub, GitLab, OpenAI and others, Slack, AWS, Google, npm, PyPI, NVIDIA, and JSON Web Tokens."""


def is_credential(name: str, *, in_url: bool = False) -> bool:
    """Return True if the name of a variable, an option or, `in_url`, a parameter is a secret's."""
    if name.upper() in NO_SECRETS:
        return False
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or words[-1] in PLACES:
        return False
    if in_url and len(words) > 1:
        pairs = zip(["", *words], words, strict=False)
        words = [word for of, word in pairs if word not in ("KEY", "KEYS") or of in _OF_KEYS]
    if in_url and any(map(_SECRET_IN_URL.fullmatch, words)):
        return True
    return any(_SECRET.fullmatch(word) and not (in_url and word == "LOGIN") for word in words)


def credential_in(value: str) -> str | None:
    """Return in words, and without the secret, what a text holds that nobody else may read.

    Args:
        value: A value, an option or a whole command line.

    Returns:
        "a URL with a password", the name of a variable that is set in it, or None.
    """
    for what, pattern in VALUES.items():
        if pattern.search(value):
            return what
    return next((name for name in _ASSIGNED.findall(value) if is_credential(name)), None)


def credential_in_url(text: str) -> bool:
    """Return True for a URL, or several that are nested, with a password, a token or a signature.

    abfs://container@account has none, nor sftp://me@host.
    """
    # "basic arithmetic" is no header: those stand on command lines.
    patterns = [pattern for what, pattern in VALUES.items() if what != "a token in a header"]
    # As it stands too: decoded, a password may have a slash in it.
    for url in (text, unquote(text)):
        parameters = _PARAMETERS.search(url)
        names = _PARAMETER.findall(parameters[1]) if parameters else []
        if any(pattern.search(url) for pattern in (*patterns, _USER)) or any(
            is_credential(name, in_url=True) for name in names
        ):
            return True
    return False


def credential_among(words: Iterable[str]) -> str | None:
    """Return what is secret among the words of a command line, as `credential_in` does.

    An option's value may also be the next word: `--docker-password`, `abc`.
    """
    return next((found for _, found in _each_with_credential(words) if found), None)


def redacted(words: Iterable[str]) -> list[str]:
    """Return the words of a command line with *** in place of each that holds a secret.

    A word that sets a name keeps the name.
    """
    result = []
    for word, what in _each_with_credential(words):
        found = what or ("a URL with a secret" if credential_in_url(word) else "")
        name, separator, _ = word.partition("=")
        keeps = separator and not found.startswith("--") and not credential_in(name)
        result.append((f"{name}={HIDDEN}" if keeps else HIDDEN) if found else word)
    return result


def _each_with_credential(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each word of a command line, and what is secret in it, or the option before; or ""."""
    before = ""
    for word in words:
        is_value = bool(before) and not word.startswith("-")
        is_secret = is_value and is_credential(before.removeprefix("--"))
        yield word, before if is_secret else credential_in(word) or ""
        before = word if word.startswith("--") and "=" not in word else ""


def refusal(key: str, what: str) -> str:
    """Return the line that refuses a secret in a site file or an option.

    Args:
        key: Where it stands.
        what: A name, or what `credential_in` returns.
    """
    export = f"`export {what}=...`" if what.isidentifier() else "export it as a variable"
    return (
        f"{key}: {what} looks like a secret, and would be written into the job's script and the "
        f"run's directory. Leave it out, and {export} in your shell: the job inherits it"
    )
