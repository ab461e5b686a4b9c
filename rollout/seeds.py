"""Seeds derived from what a sample is for, so that the order in which things happen changes nothing."""

import numpy as np

_ENVIRONMENT, _SAMPLING = 0, 1
# Below 2**32 by more than any group's size: sample k of a group is drawn with seed + k.
_BOUND = 2**31


def environment_seed(run_seed: int, task_index: int) -> int:
    """The seed of a task's environment: the same for all members of its group, so that they begin alike."""
    return _derive(run_seed, _ENVIRONMENT, task_index)


def sampling_seed(run_seed: int, task_index: int, member: int, turn: int) -> int:
    """The seed of one turn of one member. First turns are a group's: one seed, and member k takes ``seed + k``."""
    if turn == 0:
        return _derive(run_seed, _SAMPLING, task_index) + member
    return _derive(run_seed, _SAMPLING, task_index, member, turn)


def _derive(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1)[0]) % _BOUND
