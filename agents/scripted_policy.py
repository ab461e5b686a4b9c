"""`ScriptedPolicy`: a deterministic policy that says what a function tells it to."""

from collections.abc import Callable

import numpy as np

from toolgym.agents.chat import ChatFormat
from toolgym.agents.policy import Completion, FinishReason, SampleRequest
from toolgym.envs.messages import AssistantMessage

Script = Callable[[SampleRequest, int], AssistantMessage | str]


class ScriptedPolicy:
    """Writes the messages of a script as a model would have sampled them, with certainty (logprob 0.0).

    Args:
        chat: the chat format to write in.
        script: called as ``script(request, member)``; returns a message, or a str as the model's raw output.
        version: recorded as the version of the weights.
    """

    def __init__(self, chat: ChatFormat, script: Script, *, version: int = 0) -> None:
        self._chat, self._script, self.version = chat, script, version

    async def sample(self, request: SampleRequest) -> list[Completion]:
        """See `Policy.sample`. What is longer than ``max_tokens`` is cut, as an engine would."""
        return [self._say(request, request.member + k) for k in range(request.n)]

    def _say(self, request: SampleRequest, member: int) -> Completion:
        ids = np.asarray(self._chat.write(self._script(request, member)), dtype=np.int32)
        cut = ids[: request.max_tokens]
        finish = FinishReason.STOP if len(cut) == len(ids) else FinishReason.LENGTH
        fed = np.asarray(request.prompt_ids, dtype=np.int32)
        versions = np.full(len(cut), self.version, dtype=np.int32)
        return Completion(cut, np.zeros(len(cut), dtype=np.float32), versions, finish, fed)
