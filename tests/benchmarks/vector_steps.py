"""Steps of a vector whose tools cost next to nothing."""

import gymnasium
from figures import Figure, best

from toolgym.envs import AssistantMessage, ToolCall


def figures() -> list[Figure]:
    """Against Gymnasium's serial vector."""
    action = AssistantMessage("", (ToolCall("calculate", {"expression": "6 * 7"}),))
    rates = {}
    for mode in ("vector_entry_point", "sync"):
        envs = gymnasium.make_vec("toolgym/Calculator-v0", num_envs=64, vectorization_mode=mode)
        envs.reset(seed=0)
        rates[mode] = 64 * 20 / best(lambda envs=envs: [envs.step([action] * 64) for _ in range(20)])  # type: ignore[misc]
        envs.close()
    ours, theirs = rates["vector_entry_point"], rates["sync"]
    return [Figure("env steps, 64 slots", f"{ours:,.0f} a second, {ours / theirs:.1f}x SyncVectorEnv")]
