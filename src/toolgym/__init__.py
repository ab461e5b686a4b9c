"""Toolgym: tool use by language models as vectorized Gymnasium environments.

Three rooms, imported one way: ``toolgym.rollout -> toolgym.agents -> toolgym.envs``. Importing this package does
no work: import the room you need, e.g. ``import toolgym.envs`` to register the environments that ship.
"""

__version__ = "0.1.0"
