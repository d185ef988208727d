"""Secrets are told from settings by name and by value, and no message repeats one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tomli_w

from pretrain.config import ConfigError
from pretrain.config.secrets import (
    credential_among,
    credential_in,
    credential_in_url,
    is_credential,
)
from pretrain.launcher.site import load_site, parse_site
from tests.conftest import tiny_config
from tests.unit.test_site import GPU

SECRETS = re.findall(
    r"\S+",
    """
MY_PASS MYTOKEN HF_AUTH GH_PAT WANDB_API_KEY WANDB_APIKEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID
AWS_SESSION_TOKEN HF_TOKEN hf_token HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN GITLAB_PAT OPENAI_API_KEY
GPG_PASSPHRASE AZURE_CLIENT_SECRET AZURE_ACCOUNT_ACCESS_KEY GCS_SECRET CLIENTSECRET myApiKey
dbPassword proxy-password SLACK_WEBHOOK_URL SLACK_TOKEN AUTHORIZATION PROXY_AUTH SESSION_COOKIE
API_KEYS MY_CREDS DOCKER_CREDENTIALS GOOGLE_APPLICATION_CREDENTIALS SLURM_JWT WIFI_PSK MY_PW
""",
)
SETTINGS = re.findall(
    r"\S+",
    """
TOKENIZERS_PARALLELISM TIKTOKEN_CACHE_DIR KEYBOARD MONKEY MONKEYS TURKEY PASSENGER PASSAGE COMPASS
BYPASS ACCELERATE_BYPASS_DEVICE_MAP PASSES NUM_PASSES PASSIVE PWD OLDPWD PATH PYTHONPATH PATTERN
PATCH AUTHOR AUTHORS GIT_AUTHOR_NAME XAUTHORITY SSH_AUTH_SOCK HF_TOKEN_PATH
AWS_SHARED_CREDENTIALS_FILE SSLKEYLOGFILE HF_HUB_DISABLE_IMPLICIT_TOKEN TOKENS_PER_BATCH MAX_TOKENS
SECRETARY NCCL_DEBUG NCCL_IB_HCA NCCL_IB_PKEY NCCL_SOCKET_IFNAME NCCL_IB_GID_INDEX NCCL_ALGO
PYTORCH_CUDA_ALLOC_CONF TORCH_NCCL_ASYNC_ERROR_HANDLING XLA_FLAGS LD_LIBRARY_PATH http_proxy
LOGNAME HOME LANG LC_ALL MKL_NUM_THREADS KMP_AFFINITY TRITON_CACHE_DIR COLOUR A APPTAINER_BIND
VERIFY_SIGNATURE SAS HMAC_ALGORITHM
""",
)


@pytest.mark.parametrize("name", SECRETS)
def test_a_name_of_a_secret(name: str) -> None:
    assert is_credential(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_name_of_a_setting(name: str) -> None:
    assert not is_credential(name)


HORSE = "correct-horse"
SECRET_VALUES = [
    f"http://user:{HORSE}@proxy:3128",
    f"postgresql://me:{HORSE}@db.example/runs",
    f"redis://:{HORSE}@host:6379/0",
    f"host=db user=me password={HORSE}",
    f"https://store.example/x?sig=1&token={HORSE}",
    f"AZURE_SAS=sv=2025-01-05&sr=c&sig={HORSE}",
    f"DefaultEndpointsProtocol=https;AccountKey={HORSE}==",
    f"Authorization: Bearer {HORSE}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{HORSE}",
    "hf_abcdefghijKLMNOPQRSTuvwxyz",
    "https://ghp_0123456789abcdefABCDEF@github.com/x",
    "https://a.blob.core.windows.net/c/x?sv=2025-01-05&sr=c&sig=pVZ%2Fq81dGmZk2cSxWbq7%3D",
    "https://b.s3.amazonaws.com/x?X-Amz-Expires=60&X-Amz-Signature=fe5f80f77d5fa3beca038a248ff027",
    "github_pat_11ABCDEFG0123456789_abcdef",
    "AKIAIOSFODNN7EXAMPLE",
    "sk-proj-0123456789abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2ln",
]
PLAIN_VALUES = [
    "http://proxy:3128",
    "ssh://git@github.com/x.git",
    "docker://registry.example:5000/image:tag",
    "docker://user@registry#image:tag",
    "postgresql://me@db.example/runs",
    "http://user:$PROXY_PASS@proxy:3128",
    "file:///home/me/a:b@c",
    "expandable_segments:True,max_split_size_mb:512",
    "--xla_gpu_autotune_level=2 --xla_dump_to=/tmp",
    "tcp://[::1]:5000",
    "da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "--env=TOKENIZERS_PARALLELISM=false",
    "--reservation=night",
    "/scratch/me:/scratch/me",
    "KEYBOARD=de",
    "TOKEN=",
]


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_a_value_that_is_a_secret(value: str) -> None:
    what = credential_in(value)
    assert what and what not in value.replace(f"{what}=", "") and HORSE not in what


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_a_value_that_is_none(value: str) -> None:
    assert credential_in(value) is None


def test_words_of_a_command_line() -> None:
    assert credential_among(["docker", "--docker-password", HORSE]) == "--docker-password"
    assert credential_among(["run", "-e", f"MY_PASS={HORSE}"]) == "MY_PASS"
    assert credential_among(["run", f"--env=A=1,MYTOKEN={HORSE}"]) == "MYTOKEN"
    assert credential_among(["run", "--no-tokens", "--token-file", "/x", "--bind", "/a"]) is None


PLACES: list[dict[str, Any]] = [
    {"environment": {"MY_PASS": HORSE}},
    {"environment": {"HTTP_PROXY": f"http://me:{HORSE}@proxy:1"}},
    {"environment": {"A": f"password={HORSE}\0"}},
    # Not even in the error of a wrong type, or beside another one.
    {"environment": {"MY_PASS": [HORSE]}},
    {"environment": [f"MY_PASS={HORSE}"]},
    {"environment": [{"MY_PASS": HORSE}]},
    {"environment": {"MY_PASS": HORSE}, "color": 1},
    {"container": ["apptainer", "exec", "--env", f"MYTOKEN={HORSE}"]},
    {"container": ["srun", "--docker-password", HORSE]},
    {"container": f"apptainer --env MYTOKEN={HORSE}"},
    {"sbatch_arguments": [f"--export=ALL,GH_PAT={HORSE}"]},
    {"sbatch_arguments": ["--partition=x", f"--comment=token={HORSE}"]},
    {"sbatch_arguments": [f"MYTOKEN={HORSE}"]},
    {"scratch": f"s3://me:{HORSE}@host/x"},
    {"account": f"password={HORSE}\n"},
]


@pytest.mark.parametrize("values", PLACES, ids=str)
def test_no_message_repeats_a_secret(values: dict[str, Any], tmp_path) -> None:
    (tmp_path / "site.toml").write_text(tomli_w.dumps(GPU | values))
    for load in (
        lambda: parse_site(GPU | values, "site.toml"),
        lambda: load_site(tmp_path / "site.toml"),
    ):
        with pytest.raises(ConfigError) as error:
            load()
        assert HORSE not in str(error.value)
        assert next(iter(values)) in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{HORSE}@host/x.jsonl",
        f"https://{HORSE}@host/x.jsonl",
        f"https://host/x.jsonl?token={HORSE}",
        f"simplecache::sftp://me:{HORSE}@host/x",
        f"https://a.blob.core.windows.net/c/x?sv=1&sig={HORSE}",
        f"https://host/x#token={HORSE}",
        f"https://host/x?key={HORSE}",
        f"https://host/x?a=1&privateKey={HORSE}",
        f"abfs://c/x?account_key={HORSE}",
        f"https://host/x?t%6fken={HORSE}",
        f"https://me:{HORSE}%2F@host/x",
        f"https://host/x?sas={HORSE}",
        f"https://host/x?hmac={HORSE}",
        f"https://host/x?SharedAccessSignature={HORSE}",
    ],
)
def test_a_config_holds_no_secret(url: str) -> None:
    for section in (
        {"data": {"paths": [url]}},
        {"data": {"validation_paths": [url]}},
        {"data": {"directory": url}},
        {"data": {"tokenizer": url}},
        {"data": {"corpora": {"a": {"paths": [url]}}}},
        {"data": {"corpora": [url]}},
        {"run": {"directory": url}},
        {"logging": {"wandb_project": url}},
    ):
        with pytest.raises(ConfigError) as caught:
            tiny_config(**section)
        assert "secret" in str(caught.value) and HORSE not in str(caught.value), section


def test_what_looks_like_a_secret_in_a_path_is_none() -> None:
    paths = "data/key=3/x", "runs/sk-learn-experiments-2024", "runs/basic pretraining-1b"
    for url in (*paths, "s3://bucket/part-??", "sftp://me@host/x", "abfs://c@account/x"):
        assert not credential_in_url(url)
    for query in ("partition_key=3", "max_keys=9", "sort_key=a", "login=me", "f=x.jsonl&keys_of=b"):
        url = f"https://host/list?{query}"
        assert not credential_in_url(url)
