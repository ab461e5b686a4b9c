"""Real trajectories, collected with scripted policies, for the tests of what is made of them."""

from collections.abc import Callable
from typing import Any

import tokenizers
from helpers import TroubledPolicy, echo_twice, vector

from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.policy import Completion, SampleRequest
from toolgym.agents.scripted_policy import Script
from toolgym.agents.template_chat import TemplateChatFormat
from toolgym.agents.tiny import TINY_MODEL
from toolgym.rollout.collector import Collector
from toolgym.rollout.limits import Limits
from toolgym.rollout.trajectory import Trajectory


class Refusing(TemplateChatFormat):
    """A format that is never able to continue."""

    def extend(self, *args: Any) -> list[int]:
        if self.certificate is None:
            return super().extend(*args)
        raise TemplateRefused("no")


def refusing() -> ChatFormat:
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    return Refusing(tokenizer, (TINY_MODEL / "chat_template.jinja").read_text())


class Learning(TroubledPolicy):
    """A policy whose weights are new at each turn, and in the middle of each completion: 10, 11 | 20, 21 | ..."""

    async def sample(self, request: SampleRequest) -> list[Completion]:
        made = await super().sample(request)
        for completion in made:
            completion.versions[:] = 10 * (request.turn + 1)
            completion.versions[len(completion.versions) // 2 :] += 1
        return made


def collected(
    chat: ChatFormat,
    count: int = 1,
    group: int = 1,
    *,
    script: Script = echo_twice,
    limits: Limits | None = None,
    trouble: Callable[[int], str | None] = lambda k: None,
    sampling_trouble: Callable[[SampleRequest], BaseException | str | None] = lambda request: None,
    **options: Any,
) -> list[Trajectory]:
    """Trajectories of `EchoEnv` by a `Learning` policy; options are the collector's."""
    envs = vector(trouble=trouble)
    try:
        policy = Learning(chat, script, sampling_trouble)
        return Collector(envs, policy, options.pop("format", chat), limits or Limits(), **options).collect(count, group)
    finally:
        envs.close()


def split(chat: ChatFormat) -> Trajectory:
    """A trajectory of three turns, each a sample of its own."""
    (trajectory,) = collected(chat, format=refusing(), on_break="split")
    return trajectory
