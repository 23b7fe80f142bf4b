"""What the tests of launchers start: every rank sets its column, and waits for
all of the others. Rank 0 says what it saw."""

import os
import sys

import farcell


def main() -> None:
    torch_first = "--init-process-group" in sys.argv
    if torch_first:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]
    rank = int(next(os.environ[name] for name in names if name in os.environ))
    size = 4
    with farcell.connect() as client:
        events = client.events("arrived", size, size)
        events[:, rank].set()
        assert events[rank].wait_all(60), events.snapshot()
        total = client.counters("total", 1)
        total.add(0, rank + 1)
        total.counter_at(0).wait_until("==", size * (size + 1) // 2, 60)
        # A second connection of the same process leads to the same server.
        assert farcell.connect().counters("total", 1)[0] == 10
        if rank == 0:
            launch = farcell.Launch.from_env()
            print(f"saw {launch.launcher} {launch.size} sum {total[0]}", flush=True)
            for step in farcell.explain():
                print("step:", step, flush=True)


if __name__ == "__main__":
    main()
