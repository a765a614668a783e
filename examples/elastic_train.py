"""Trains while workers die and join: of three workers one is killed with kill -9, and another one joins later.

herringrun --elastic -np 3 --restart-workers 1 python examples/elastic_train.py

Rank 1 kills itself in step 40. The two others finish that step with the average of two and go on; herringrun starts a
new worker, which gets parameters, momentum and step from rank 0 at the end of a step, and the loss goes on falling.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np

import herring
import herring.elastic

FEATURES = 64


def batch(step: int, rank: int, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """This worker's part of the data of one step: which part follows from its rank now."""
    random = np.random.default_rng([step, rank])
    inputs = random.standard_normal((32, FEATURES))
    return inputs, inputs @ truth + 0.01 * random.standard_normal(32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="training steps (default 3000)")
    parser.add_argument("--kill-in-step", type=int, default=40, help="when rank 1 kills itself (default 40)")
    steps, strike = (args := parser.parse_args()).steps, args.kill_in_step
    herring.on_membership_change(lambda change: print(f"  workers now: {change.size}; {change.reason or 'one is new'}"))
    herring.init()
    truth = np.random.default_rng(0).standard_normal(FEATURES)
    state = herring.elastic.State(step=0, weights=np.zeros(FEATURES), momentum=np.zeros(FEATURES))
    state.sync()  # A worker that comes later begins where rank 0 is.
    is_victim = herring.rank() == 1 and state.step == 0  # Not the worker that takes its place.
    print(f"worker {herring.rank()} of {herring.size()} begins in step {state.step}")
    while state.step < steps:
        inputs, targets = batch(state.step, herring.rank(), truth)
        errors = inputs @ state.weights - targets
        gradient = inputs.T @ errors / len(errors)
        if is_victim and state.step == strike:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = herring.allreduce(gradient)  # The average over the workers that are there.
        loss = herring.allreduce(np.array([np.mean(errors**2)]))[0]
        state.momentum = 0.9 * state.momentum + gradient
        state.weights = state.weights - 0.0002 * state.momentum
        if herring.rank() == 0 and state.step % (steps // 10) == 0:
            print(f"step {state.step}: loss {loss:.5f} with {herring.size()} workers")
        state.step += 1
        state.commit()  # The end of a step: here new workers come in.
    if herring.rank() == 0:
        print(f"done: loss {loss:.5f} with {herring.size()} workers")
    herring.shutdown()


if __name__ == "__main__":
    main()
