"""The training function of the elastic tests; Ray's workers get it by value."""

from __future__ import annotations


def train_elastic(config: dict) -> None:
    """Ten steps more after the job was smaller and is whole again; each rank writes what it saw.

    config: folder; workers; strikes: {Ray rank: what it does in step 10}, once each.
    """
    import json
    import os
    import signal
    import time
    from pathlib import Path

    import numpy as np
    import ray.train

    import herring
    import herring.elastic

    folder, place = Path(config["folder"]), ray.train.get_context().get_world_rank()
    herring.init()
    is_again = all((folder / f"struck-{each}").exists() for each in config["strikes"])  # Ray has started all again.
    state = herring.elastic.State(step=0, weights=np.zeros(1000), was_smaller=is_again, steps_since=0)
    state.sync()
    began, seen, deadline = state.step, [], time.monotonic() + 120
    while state.steps_since < 10:
        assert time.monotonic() < deadline, (state.step, herring.size(), state.was_smaller)
        mark = folder / f"struck-{place}"
        if state.step == 10 and place in config["strikes"] and not mark.exists():
            mark.touch()
            if config["strikes"][place] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad data on purpose")
        total = herring.allreduce(np.ones(1000), op="sum")
        assert (total == total[0]).all()
        mean = herring.allreduce(np.full(1000, state.step))  # The same on all: their mean says that nobody is behind.
        assert (mean == state.step).all()
        seen.append(int(total[0]))
        state.was_smaller = state.was_smaller or total[0] < config["workers"]
        state.steps_since += state.was_smaller and total[0] == config["workers"]
        state.weights = state.weights - 0.1 * (state.weights - mean)
        state.step += 1
        time.sleep(0.02)
        state.commit()
    found = {
        "began": began,
        "seen": seen,
        "weights": state.weights.tolist(),
        "step": state.step,
        "description": herring.description(),
    }
    (folder / f"{place}-{os.getpid()}.json").write_text(json.dumps(found))
    if config.get("shuts_down", True):
        herring.shutdown()
