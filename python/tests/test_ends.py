"""Programs that end with waits under way, and interpreters that are not the main one."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import asyncio, os, sys, threading, time
import farcell
client = farcell.connect(sys.argv[1], authkey=b"a key for the tests", transport=sys.argv[2])
events = client.events("ends", 64)
"""

# What is left as the program ends.
LEFT = {
    "waits of a loop that has stopped": """
loop = asyncio.new_event_loop()
async def main():
    waits = [asyncio.ensure_future(event.wait_async()) for event in events]
    waits.append(asyncio.ensure_future(client.lock("l").acquire_async()))
    waits.append(asyncio.ensure_future(client.barrier("b", 2).wait_async()))
    await asyncio.sleep(0.1)
    return waits
waits = loop.run_until_complete(main())
""",
    "waits of a loop that was closed": """
async def wait(event):
    try:
        await event.wait_async()
    except asyncio.CancelledError:
        os.write(1, b".")
async def main():
    waits = [asyncio.ensure_future(wait(event)) for event in events]
    await asyncio.sleep(0.1)
asyncio.run(main())
""",
    "threads that wait": """
def wait(event):
    try:
        event.wait()
    except farcell.Closed:
        pass
for event in events:
    threading.Thread(target=wait, args=(event,), daemon=True).start()
""",
    "a thread that is at work": """
def work():
    try:
        while True:
            events[0].is_set()
    except farcell.Closed:
        pass
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
""",
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("what", LEFT)
def test_a_program_ends_with_waits_under_way(server, what, transport):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + LEFT[what], server.address, transport],
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done
    # A panic on a thread of the session's changes no exit code.
    assert "panicked" not in done.stderr and "FATAL" not in done.stderr, done.stderr


@pytest.mark.parametrize("first", ["import farcell", ""])
def test_a_sub_interpreter_is_refused(server, first):
    program = f"""
import sys
{first}
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
other = interpreters.create()
try:
    failure = interpreters.run_string(other, "import farcell")
except interpreters.RunFailedError as error:
    failure = error
print(failure)
interpreters.destroy(other)
import farcell
client = farcell.connect(sys.argv[1], authkey=b"a key for the tests")
print(client.events("after", 1)[0].is_set())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, server.address], timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done
    refusal, after = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert "ImportError" in refusal and "interpreter" in refusal
    assert after == "False"
