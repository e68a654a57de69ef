# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.edge.config import FIELDS, BadSettings, Settings, load, read_token


def test_defaults() -> None:
    settings = load([], {})
    assert settings.state_dir == Path("/var/lib/opendsec")
    assert settings.socket == Path("/run/opendsec/edge.sock")
    assert settings.tcp is None
    assert settings.memory_bytes() > 0
    assert set(FIELDS) == set(Settings.__struct_fields__)


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "edge.toml"
    file.write_text('state_dir = "/from/file"\nmax_sandboxes = 5\nmax_cpu = 1.5\nmax_memory = "1GiB"\n')
    settings = load(
        ["--config", str(file), "--state-dir", "/from/flag", "--tcp", "[::1]:80", "--token-file", "/t"], {"OPENDSEC_MAX_SANDBOXES": "6"}
    )
    assert (settings.state_dir, settings.max_sandboxes, settings.max_cpu, settings.max_memory) == (Path("/from/flag"), 6, 1.5, 1 << 30)
    assert settings.tcp == ("::1", 80)
    assert load([], {"OPENDSEC_CONFIG": str(file)}).max_sandboxes == 5


@pytest.mark.parametrize(
    ("arguments", "environ", "what"),
    [
        (["--max-sandboxes", "0"], {}, "--max-sandboxes: must be from 1"),
        (["--max-sandboxes", "many"], {}, "--max-sandboxes"),
        ([], {"OPENDSEC_MEMORY_FRACTION": "1.5"}, "OPENDSEC_MEMORY_FRACTION: must be from 0.01 to 1"),
        ([], {"OPENDSEC_MEMORY_FRACTION": "nan"}, "OPENDSEC_MEMORY_FRACTION"),
        (["--memory-limit", "lots"], {}, "is not a size"),
        (["--tcp", "8080", "--token-file", "/t"], {}, "must be HOST:PORT"),
        (["--tcp", "0.0.0.0:8080"], {}, "--tcp needs --token-file"),
        (["--log-level", "loud"], {}, "must be one of debug"),
        (["--uid-base", "65537"], {}, "must be a multiple of 65536"),
        (["--uid-base", "0xfffe0000", "--uid-ranges", "9"], {}, "ends beyond the largest uid"),
        (["--run-dir", "/" + "x" * 120], {}, "too long"),
        (["--config", "/no/such/file"], {}, "No such file"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], environ: dict[str, str], what: str) -> None:
    with pytest.raises(BadSettings, match=what.replace("[", r"\[")):
        load(arguments, environ)


@pytest.mark.parametrize(
    ("text", "what"),
    [("max_sandboxs = 1", "no setting is called 'max_sandboxs'"), ("max_cpu = true", "must be a string or a number"), ("= 1", "edge.toml")],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "edge.toml"
    file.write_text(text)
    with pytest.raises(BadSettings, match=what):
        load(["--config", str(file)], {})


def test_a_token_is_secret_and_long(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert read_token(file) == b"0123456789abcdef"
    file.chmod(0o640)
    with pytest.raises(BadSettings, match="readable by its owner alone"):
        read_token(file)
    file.chmod(0o600)
    for text in ("short", "with spaces in it all", "x" * 5000, "\x00" * 20):
        file.write_text(text)
        with pytest.raises(BadSettings, match="must hold 16 to 4096"):
            read_token(file)
    with pytest.raises(BadSettings, match="No such file"):
        read_token(tmp_path / "nothing")
