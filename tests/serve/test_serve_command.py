"""Test ``tierstore serve`` in a separate process, as a user would run it, with the folder of a small model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from tests.adapters.tiny import tiny_llama
from tests.serve.serving import COMPLETION
from tests.serve.small import VOCABULARY, tokenizer
from tests.support.command import COMMAND
from tests.support.pages import PATIENCE_S
from tierstore.cli.app import app

TEXT = "The lamp went out, and with it the last of the light in the house. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(vocabulary=VOCABULARY).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "store.yaml"
    disk = {"path": str(tmp_path / "pages"), "capacity": "64MiB", "payload": "lmdb", "readers": 2}
    tree = {"page_size": 8, "hbm": {"capacity": "1MiB", "device": "cpu"}, "nvme": disk}
    file.write_text(json.dumps(tree))
    return file


def command(*arguments: str | Path) -> list[str]:
    return [*COMMAND, "serve", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}


@contextmanager
def running(*arguments: str | Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[str], dict[str, Any]]]:
    """Run a server on a free port until the block ends. Yield a client, the process and its first line of output."""
    with subprocess.Popen(
        command("--port", "0", "--json", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            said = json.loads(line)
            with httpx.Client(base_url=said["url"], timeout=PATIENCE_S, trust_env=False) as http:
                yield http, process, said
        finally:
            process.kill()


def end(process: subprocess.Popen[str], number: int, times: int = 1) -> str:
    """Send a signal ``times`` times, and assert that it ends the process cleanly. Return the process's stderr."""
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.02)  # signals that arrive together count as one
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert "leaked" not in errors
    return errors


def refused(*arguments: str | Path) -> str:
    result = CliRunner(env=ENVIRONMENT).invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("tierstore: ")
    return line


@pytest.mark.deep
def test_a_second_start_finds_pages_and_documents_of_the_first(
    model: Path, config: Path, tmp_path: Path
) -> None:
    options = ("--config", config, "--model", model, "--documents", tmp_path / "texts")
    with running(*options) as (http, process, said):
        assert said["model"] == "tiny"
        assert http.get("/health").json() == {"ready": True}
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        id = http.post("/v1/documents", json={"name": "lamp", "text": TEXT}).json()["id"]  # noqa: A001
        question = {"question": "Why?", "max_tokens": 4}
        before = http.post(f"/v1/documents/{id}/ask", json=question).json()
        assert "POST /v1/completions 200" in end(process, signal.SIGTERM)
    with running(*options) as (http, process, _):
        assert http.get(f"/v1/documents/{id}").json()["state"] == "ready"
        after = http.post(f"/v1/documents/{id}/ask", json=question).json()
        assert after["answer"] == before["answer"]
        assert after["usage"]["reused"]["NVME"] > 0
        end(process, signal.SIGTERM)


def test_interrupt_stops_the_server_during_an_answer(model: Path, config: Path) -> None:
    with running("--config", config, "--model", model) as (http, process, _):
        asked = COMPLETION | {"max_tokens": 400, "stream": True}
        with http.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()  # a reference that keeps the connection open
            next(lines)
            end(process, signal.SIGINT)


@pytest.mark.deep
def test_two_interrupts_stop_the_server_cleanly(model: Path, config: Path) -> None:
    with running("--config", config, "--model", model) as (http, process, _):
        asked = COMPLETION | {"max_tokens": 400, "stream": True}
        with http.stream("POST", "/v1/completions", json=asked) as response:
            lines = response.iter_lines()  # a reference that keeps the connection open
            next(lines)
            end(process, signal.SIGINT, times=2)


@pytest.mark.deep
def test_with_keys_the_server_may_listen_on_all_interfaces(model: Path, config: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"tenants": {"anne": [sha256(b"secret").hexdigest()]}}))
    options = ("--config", config, "--model", model, "--host", "0.0.0.0", "--keys", keys)
    with running(*options) as (http, process, said):
        port = said["url"].rsplit(":", 1)[1]
        url = f"http://127.0.0.1:{port}/v1/models"
        assert http.get(url).status_code == 401
        assert http.get(url, headers={"Authorization": "Bearer secret"}).status_code == 200
        end(process, signal.SIGTERM)


def test_invalid_options_of_serve_are_refused_in_one_line(model: Path, config: Path, tmp_path: Path) -> None:
    given = ("--config", config, "--model", model)
    assert "--keys" in refused(*given, "--host", "0.0.0.0")
    assert "127.0.0.256" in refused(*given, "--host", "127.0.0.256", "--open")
    assert "--keys" in refused(*given, "--keys", tmp_path / "none.yaml")
    assert "no such folder" in refused("--config", config, "--model", tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "--documents" in refused(*given, "--port", "0", "--documents", tmp_path / "file")
    (tmp_path / "engine.yaml").write_text("hbm: {device: cpu, owner: engine}")
    assert "hbm.owner" in refused("--config", tmp_path / "engine.yaml", "--model", model)
    (tmp_path / "none.yaml").write_text("page_size: 8")
    assert "hbm" in refused("--config", tmp_path / "none.yaml", "--model", model)


@pytest.mark.deep
def test_port_in_use_is_reported_before_the_model_is_loaded(
    model: Path, config: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "cut short"
    shutil.copytree(model, broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(b"")
    with running("--config", config, "--model", model) as (_, process, said):
        port = said["url"].rsplit(":", 1)[1]
        line = refused("--config", config, "--model", broken, "--port", port)
        assert f"--port {port}" in line
        end(process, signal.SIGTERM)
