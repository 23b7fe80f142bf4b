"""The wheel's console script: the whole program, in step with the module."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

import pytest

import farcell


def program() -> str | None:
    """Where the wheel has put it, if this is one that is installed."""
    try:
        entries = files("farcell") or []
    except PackageNotFoundError:
        return None
    found = [str(entry.locate()) for entry in entries if Path(entry).name == "farcell"]
    return next((path for path in found if os.access(path, os.X_OK)), None)


pytestmark = pytest.mark.skipif(program() is None, reason="farcell was not installed by a wheel")


def run(*words: str, **more: str) -> str:
    done = subprocess.run(
        [program(), *words],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_versions_are_one():
    assert run("--version").split()[1] == farcell.__version__ == version("farcell")


def test_it_serves_and_python_connects(tmp_path):
    ready = tmp_path / "address"
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("XDG_CONFIG_HOME", None)
    serving = subprocess.Popen(
        [program(), "serve", "--bind", "127.0.0.1:0", "--ready-file", str(ready)],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        address = ready.read_text().split()[0]
        key_file = tmp_path / ".config/farcell/authkey"
        with farcell.connect(address, authkey_file=key_file) as client:
            client.events("go", 2)[1].set()
            listed = run("ls", FARCELL_ADDR=address, FARCELL_AUTHKEY_FILE=str(key_file))
            assert "go" in listed
            client.join("python")
            members = run("members", FARCELL_ADDR=address, FARCELL_AUTHKEY_FILE=str(key_file))
            assert "python" in members
    finally:
        serving.terminate()
        assert serving.wait(20) == 0


def test_what_the_wheel_has():
    names = [str(entry) for entry in files("farcell")]
    for wanted in ("farcell/py.typed", "farcell/_native.pyi", "farcell/_native.abi3.so"):
        assert wanted in names
    # Nothing is vendored: libibverbs is that of the system, at run time.
    assert not [name for name in names if "verbs" in name or ".libs/" in name]
    needed = subprocess.run(
        [sys.executable, "-c", "import farcell; print(open('/proc/self/maps').read())"],
        capture_output=True, text=True, check=True,
    ).stdout
    assert "libibverbs" not in needed
