"""Real launchers, with four processes each; rank 0 serves, nobody is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import farcell

LAUNCHED = str(Path(__file__).with_name("launched.py"))

needs_torch = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import torch.distributed"], capture_output=True).returncode
    != 0,
    reason="no PyTorch for this interpreter",
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of the test's own: no key, no address of another job."""
    gone = ("XDG_", "OMPI_", "PMI", "SLURM_", "FARCELL_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    kept.update(HOME=str(tmp_path), OMP_NUM_THREADS="1")
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return kept


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        env=environment,
        timeout=180,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def torchrun(tmp_path: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4"]
    # Debian's PyTorch 1.13 fails under Python 3.11 with the usual streams.
    command += ["--tee", "1", "--redirects", "1", "--log_dir", str(tmp_path / "log")]
    return command + list(more)


@needs_torch
def test_torchrun_with_the_agents_store(environment, tmp_path, free_port):
    command = torchrun(tmp_path, "--master_port", str(free_port), LAUNCHED)
    output = run(command, environment)
    assert "saw torchrun 4 sum 10" in output
    assert "torchrun started this as rank 0 of 4" in output


@needs_torch
def test_torchrun_of_the_c10d_kind(environment, tmp_path):
    output = run(torchrun(tmp_path, "--standalone", LAUNCHED), environment)
    assert "saw torchrun 4 sum 10" in output


@needs_torch
def test_torchrun_with_a_process_group(environment, tmp_path):
    command = torchrun(tmp_path, "--standalone", LAUNCHED, "--init-process-group")
    assert "saw torchrun 4 sum 10" in run(command, environment)


@needs_torch
def test_torchruns_port_is_left_to_its_store(environment, tmp_path, free_port):
    # The process group makes its store at MASTER_PORT after us.
    program = tmp_path / "both.py"
    program.write_text(
        "import os, farcell\n"
        "client = farcell.connect()\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "one = torch.ones(1)\n"
        "dist.all_reduce(one)\n"
        "client.counters('n', 1).add(0, 1)\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 0:\n"
        "    print('both', int(one), client.counters('n', 1)[0], flush=True)\n"
    )
    for more in (["--master_port", str(free_port)], ["--standalone"]):
        output = run(torchrun(tmp_path, *more, str(program)), environment)
        assert "both 4 4" in output


@pytest.mark.skipif(not shutil.which("mpirun.openmpi"), reason="no Open MPI")
def test_open_mpi(environment):
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    output = run([*command, sys.executable, LAUNCHED], environment)
    assert "saw Open MPI 4 sum 10" in output


@pytest.mark.skipif(not shutil.which("mpiexec.hydra"), reason="no Hydra")
def test_hydra(environment):
    output = run(["mpiexec.hydra", "-n", "4", sys.executable, LAUNCHED], environment)
    assert "saw Hydra 4 sum 10" in output


def test_two_jobs_at_once_do_not_meet(environment):
    if not shutil.which("mpirun.openmpi"):
        pytest.skip("no Open MPI")
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    jobs = [
        subprocess.Popen(
            [*command, sys.executable, LAUNCHED],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    for job in jobs:
        output, _ = job.communicate(timeout=180)
        assert job.returncode == 0, output
        assert "saw Open MPI 4 sum 10" in output


def srun(environment: dict[str, str], rank: int, size: int, job: str) -> dict[str, str]:
    """The variables that srun sets, as its manual lists them."""
    return {
        **environment,
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
    }


def test_what_srun_sets(environment):
    ranks = [
        subprocess.Popen(
            [sys.executable, LAUNCHED],
            env=srun(environment, rank, 4, "4711"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in reversed(range(4))
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    assert "saw srun 4 sum 10" in outputs[-1]


def test_a_stale_address_of_another_job_is_not_joined(environment, tmp_path):
    """Another job's server is where an old address file says."""
    program = tmp_path / "one.py"
    program.write_text(
        "import farcell, os\n"
        "job = farcell.Launch.from_env()\n"
        "print(job.address_file(), flush=True)\n"
        "client = farcell.connect()\n"
        "print(client.list(), flush=True)\n"
    )
    mine = srun(environment, 0, 1, "1")
    key_file = tmp_path / ".config/farcell/authkey"
    first = run([sys.executable, str(program)], mine)
    path = first.splitlines()[0]
    with farcell.serve("127.0.0.1:0", authkey_file=key_file, job="another job") as other:
        there = farcell.connect(other.address, authkey_file=key_file)
        there.events("of.the.other", 1)
        Path(path).write_text(other.address + "\n")
        second = run([sys.executable, str(program)], mine)
        assert second.splitlines()[1] == "[]"


def test_an_address_file_and_the_environment_come_first(environment, tmp_path, server):
    key = tmp_path / "key"
    key.write_bytes(b"a key for the tests")
    key.chmod(0o600)
    program = "import farcell; print(farcell.connect().info()['sessions'], farcell.explain()[-1])"
    base = {**srun(environment, 0, 4, "9"), "FARCELL_AUTHKEY_FILE": str(key)}
    output = run([sys.executable, "-c", program], {**base, "FARCELL_ADDR": server.address})
    assert output == f"1 FARCELL_ADDR names the server {server.address}\n"
    file = tmp_path / "address"
    file.write_text(server.address + "\n")
    output = run([sys.executable, "-c", program], {**base, "FARCELL_ADDR_FILE": str(file)})
    assert output == f"1 the address file {file} names {server.address}\n"


def test_alone_there_is_a_private_server_that_children_share(environment):
    program = (
        "import farcell, multiprocessing\n"
        "def work(event):\n"
        "    assert farcell.connect().events('e', 1)[0].is_set()\n"
        "    event.clear()\n"
        "if __name__ == '__main__':\n"
        "    event = farcell.connect().events('e', 1)[0]\n"
        "    for method in ['fork', 'spawn', 'forkserver']:\n"
        "        event.set()\n"
        "        p = multiprocessing.get_context(method).Process(target=work, args=(event,))\n"
        "        p.start()\n"
        "        p.join()\n"
        "        assert p.exitcode == 0 and not event.is_set(), method\n"
        "    print('shared')\n"
    )
    path = Path(environment["HOME"]) / "alone.py"
    path.write_text(program)
    assert run([sys.executable, str(path)], environment) == "shared\n"


def test_each_step_is_logged(environment, server):
    """In their order, up to the one that leads to a server."""
    program = "import logging, farcell; logging.basicConfig(level=logging.INFO); "
    key = "authkey=b'a key for the tests'"
    alone = run([sys.executable, "-c", program + "farcell.connect()"], environment)
    steps = [
        "FARCELL_ADDR is not set",
        "no address in",
        "no launcher",
        "no server of this user on this machine",
        "a private server inside of this process",
    ]
    places = [alone.find(f"INFO:farcell:{step}") for step in steps]
    assert places == sorted(places) and places[0] >= 0, alone
    named = f"farcell.connect({server.address!r}, {key})"
    output = run([sys.executable, "-c", program + named], {**environment, "FARCELL_ADDR": "x"})
    assert output == f"INFO:farcell:the program names the server {server.address}\n"
    led = run(
        [sys.executable, "-c", program + f"farcell.connect({key})"],
        {**environment, "FARCELL_ADDR": server.address},
    )
    assert led == f"INFO:farcell:FARCELL_ADDR names the server {server.address}\n"
