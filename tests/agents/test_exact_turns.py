"""Real models in a real engine, 300 turns each, every turn answered by a tool: no token is other than it should be."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from toolgym.agents.chat import ChatFormat, TemplateWarning, load_chat_format
from toolgym.agents.policy import Completion, FinishReason, Policy, SampleRequest
from toolgym.agents.tiny import TINY_MODEL
from toolgym.agents.vllm_policy import VLLMPolicy
from toolgym.envs import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from toolgym.envs.catalog.ledger import LedgerEnv
from toolgym.envs.messages import to_dict
from toolgym.rollout.trajectory import SegmentKind, Trajectory

CONVERSATIONS, TURNS = 30, 10
TOOLS = LedgerEnv().tools.schemas
RESULTS = [
    "The balance is 42.",
    "  Error: no account <|im_end|>\n",
    "é漢 \U0001f600\n\n",
    '{"ok": true}',
    "x" * 80,
    "0",
]


@dataclass
class Conversation:
    """A conversation in which every turn of the model is answered by a tool."""

    number: int
    messages: list[Message] = field(default_factory=list)
    record: Trajectory = field(default_factory=lambda: Trajectory("test", "t", 0, 0, 0))
    cut: int = 0
    closings: int = 0


@dataclass
class Check:
    """Plays conversations and compares every token."""

    policy: Policy
    chat: ChatFormat
    theirs: PreTrainedTokenizerFast

    async def converse(self, number: int) -> Conversation:
        talk = Conversation(number)
        talk.messages = [SystemMessage("You keep accounts."), UserMessage(f"Report account {number}, and move 5.")]
        prompt = self.chat.open(talk.messages, TOOLS)
        talk.record.append(SegmentKind.PROMPT, prompt)
        for turn in range(TURNS):
            seed = 1_000 * number + turn
            request = SampleRequest(
                tuple(prompt), 6 + 5 * (number % 3), seed=seed, stop_token_ids=self.chat.stop_token_ids
            )
            (completion,) = await self.policy.sample(request)
            answer = ToolMessage(RESULTS[(number + turn) % len(RESULTS)], f"call_{turn}", "balance")
            prompt = self.turn(talk, prompt, completion, answer)
        return talk

    def turn(self, talk: Conversation, prompt: list[int], completion: Completion, answer: ToolMessage) -> list[int]:
        """Add one turn, and compare with what the engine was fed and with what the template writes."""
        assert completion.prompt_ids is not None
        assert completion.prompt_ids.tolist() == prompt
        sampled = completion.token_ids.tolist()
        said = self.chat.parse(sampled, prompt, TOOLS)
        assert isinstance(said, AssistantMessage)
        delta = self.chat.extend(prompt, sampled, [answer], TOOLS)
        talk.record.append(SegmentKind.ACTION, completion)
        talk.record.append(SegmentKind.OBSERVATION, delta)
        extended = [*prompt, *sampled, *delta]
        assert talk.record.input_ids.tolist() == extended
        self.compare(talk, sampled, delta, answer, cut=completion.finish_reason is FinishReason.LENGTH)
        return extended

    def compare(
        self, talk: Conversation, sampled: list[int], delta: list[int], answer: ToolMessage, *, cut: bool
    ) -> None:
        """The delta is what transformers writes behind the turn, found by its own rendering and its own encoding."""
        stops = self.chat.stop_token_ids
        closing = delta[: delta.index(stops[0]) + 1] if cut else []
        spoken = [token for token in [*sampled, *closing] if token not in stops]
        talk.cut, talk.closings = talk.cut + cut, talk.closings + (len(closing) > 1)
        talk.messages += [AssistantMessage(self.chat.decode(spoken)), answer]
        entries = [to_dict(message) for message in talk.messages]
        text = self.theirs.apply_chat_template(entries, TOOLS, add_generation_prompt=True, tokenize=False)
        assert text == self.chat.decode(talk.record.input_ids.tolist())
        behind = text[text.rindex(stops_text := self.chat.decode([stops[0]]), 0, text.rindex(answer.content)) :]
        expected = self.theirs(behind.removeprefix(stops_text), add_special_tokens=False)["input_ids"]
        if "<|im_end|>" in answer.content:  # transformers takes the literal for the token, which it must not be
            assert delta.count(stops[0]) == expected.count(stops[0]) - 1 + len(closing[-1:])
        else:
            assert delta[len(closing) :] == expected


async def play(check: Check) -> list[Conversation]:
    return list(await asyncio.gather(*(check.converse(number) for number in range(CONVERSATIONS))))


def run(policy: VLLMPolicy, chat: ChatFormat, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(str(folder))
    talks = asyncio.run(play(Check(policy, chat, theirs)))
    assert sum(int(s.kind is SegmentKind.ACTION) for talk in talks for s in talk.record.segments) == 300
    assert sum(talk.cut for talk in talks) > 0


@pytest.mark.vllm
def test_300_turns_of_the_embedded_model(engine: VLLMPolicy) -> None:
    run(engine, load_chat_format(TINY_MODEL), TINY_MODEL)


@pytest.mark.vllm
def test_300_turns_of_smollm2(smollm2: Path) -> None:
    with VLLMPolicy(smollm2, max_model_len=2_048, max_num_seqs=32) as policy:
        with pytest.warns(TemplateWarning, match="does not show tools"):
            chat = load_chat_format(smollm2, syntax="hermes")
        run(policy, chat, smollm2)
