"""Promise: a FARCELL_ variable that means nothing is told, once, with the likely meant one."""

import os
import subprocess
import sys

SCRIPT = """
import farcell
for _ in range(2):
    try:
        farcell.connect("127.0.0.1:1", authkey=b"a key of some length", timeout=0.5)
    except farcell.Unreachable:
        pass
"""


def test_a_misspelt_variable_is_told_once() -> None:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("FARCELL_")}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", SCRIPT],
        env={**environment, "FARCELL_ADR": "node0:7117"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("FARCELL_ADR means nothing here; is FARCELL_ADDR meant?") == 1
    assert "RuntimeWarning" in done.stderr
