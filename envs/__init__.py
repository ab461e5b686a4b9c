"""Environments: messages, tools, tasks, rewards and the Gymnasium classes. Knows nothing of tokens.

Importing this package registers the environments that ship, so that
``gymnasium.make_vec("toolgym/Calculator-v0", num_envs=64)`` works.
"""

from toolgym.envs.context import EpisodeContext, Stats, StatSummary, aggregate_stats, current_context
from toolgym.envs.errors import (
    ConfigurationError,
    EnvironmentFailure,
    Failure,
    ResetNeededError,
    ToolError,
    ToolgymError,
)
from toolgym.envs.messages import (
    AssistantMessage,
    CallFault,
    InvalidToolCall,
    Message,
    Observation,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from toolgym.envs.registration import register_env, register_shipped, tool_env_ids
from toolgym.envs.reward_functions import RewardFunction
from toolgym.envs.rewards import Episode, Score, ScoreLike, StepView, last_number
from toolgym.envs.sandbox.image import ImageSpec
from toolgym.envs.sandbox.limits import SandboxLimits
from toolgym.envs.sandbox.results import RunResult, RunStatus, SandboxFailure
from toolgym.envs.sandbox.sandbox import Sandbox, SandboxPool
from toolgym.envs.sandbox.sandbox_env import SandboxEnv
from toolgym.envs.spaces import AssistantMessageSpace, MessagesSpace
from toolgym.envs.tasks import ProceduralTasks, Task, TaskList, TaskSource
from toolgym.envs.tool_env import ToolEnv
from toolgym.envs.tools import Tool, Toolset, tool
from toolgym.envs.vector import ToolVectorEnv

__all__ = [
    "AssistantMessage",
    "AssistantMessageSpace",
    "CallFault",
    "ConfigurationError",
    "EnvironmentFailure",
    "Episode",
    "EpisodeContext",
    "Failure",
    "ImageSpec",
    "InvalidToolCall",
    "Message",
    "MessagesSpace",
    "Observation",
    "ProceduralTasks",
    "ResetNeededError",
    "RewardFunction",
    "RunResult",
    "RunStatus",
    "Sandbox",
    "SandboxEnv",
    "SandboxFailure",
    "SandboxLimits",
    "SandboxPool",
    "Score",
    "ScoreLike",
    "StatSummary",
    "Stats",
    "StepView",
    "SystemMessage",
    "Task",
    "TaskList",
    "TaskSource",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolMessage",
    "ToolVectorEnv",
    "ToolgymError",
    "Toolset",
    "UserMessage",
    "aggregate_stats",
    "current_context",
    "last_number",
    "register_env",
    "register_shipped",
    "tool",
    "tool_env_ids",
]

register_shipped()
