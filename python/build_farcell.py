"""Builds the wheel: maturin, with the program `farcell` beside the module.

The program is the same one that `cargo install` gives. It goes into the wheel
as a script, so that `farcell serve` is there after `pip install`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (  # noqa: F401  (the other hooks of PEP 517)
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
)

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "farcell.data" / "scripts"


def make_data() -> None:
    """maturin wants the folder that pyproject.toml names, also where it only tells what
    the wheel will be."""
    SCRIPTS.mkdir(parents=True, exist_ok=True)


def build_program() -> None:
    """Builds `farcell` and puts it where maturin takes scripts from."""
    cargo = os.environ.get("CARGO", "cargo")
    command = [cargo, "build", "--release", "--locked", "--bin", "farcell"]
    # With the features of dependencies that the module asks for, so that what is compiled
    # here is what maturin then finds.
    command += ["--package", "farcell", "--package", "farcell-python"]
    command += ["--manifest-path", str(HERE.parent / "Cargo.toml"), "--message-format=json"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    program = None
    for line in lines.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable"):
            if message["target"]["name"] == "farcell":
                program = message["executable"]
    if program is None:
        raise RuntimeError("cargo built no program farcell")
    make_data()
    shutil.copy2(program, SCRIPTS / "farcell")
    strip = shutil.which("strip")
    if strip:
        subprocess.run([strip, str(SCRIPTS / "farcell")], check=True)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    make_data()
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    make_data()
    return maturin.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build_program()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    build_program()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)
