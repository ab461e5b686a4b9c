"""One chat format serves many threads, and leaves the event loop alone."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from toolgym.agents.chat import ChatFormat, TemplateRefused, load_chat_format
from toolgym.agents.chat_threads import ChatThreads
from toolgym.agents.tiny import TINY_MODEL
from toolgym.envs import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from toolgym.envs.catalog.ledger import LedgerEnv

TOOLS = LedgerEnv().tools.schemas


def work(chat: ChatFormat, number: int) -> tuple[list[int], list[int], AssistantMessage, str]:
    """One turn of many shapes: opened, said, answered, read and decoded."""
    prompt = chat.open([SystemMessage(f"s{number % 5}"), UserMessage(f"u{number % 7} <|im_end|>")], TOOLS)
    said = AssistantMessage("", tuple(ToolCall("balance", {"account": f"a{k}"}) for k in range(1 + number % 3)))
    sampled = chat.write(said)
    sampled = sampled[: len(sampled) - number % 4]
    answers = [
        ToolMessage(f" {number % 11} \n é " * (1 + number % 2), f"c{k}", "balance") for k in range(1 + number % 3)
    ]
    delta = chat.extend(prompt, sampled, answers, TOOLS)
    return prompt, delta, chat.parse(sampled, prompt, TOOLS), chat.decode([*prompt, *sampled, *delta])


@pytest.mark.parametrize("family", [None, "qwen3"])
def test_eight_threads_get_the_same_results_in_10_000_calls(family: str | None) -> None:
    chat = load_chat_format(TINY_MODEL, family=family)
    fresh = load_chat_format(TINY_MODEL, family=family)
    expected = [work(fresh, number) for number in range(250)]
    with ThreadPoolExecutor(8) as pool:
        # Five calls of the format in each: 10,000 in all.
        found = list(pool.map(lambda number: work(chat, number % 250), range(2_000)))
    assert all(result == expected[number % 250] for number, result in enumerate(found))


def test_work_is_done_in_other_threads_and_raises_as_it_does() -> None:
    threads = ChatThreads(2)

    def refuse() -> None:
        raise TemplateRefused("no")

    async def use() -> set[str]:
        with pytest.raises(TemplateRefused, match="no"):
            await threads.run(refuse)
        names = await asyncio.gather(*(threads.run(lambda: threading.current_thread().name) for _ in range(20)))
        return set(names)

    names = asyncio.run(use())
    threads.close()
    threads.close()
    assert all(name.startswith("toolgym chat") for name in names)
    assert 1 <= len(names) <= 2
