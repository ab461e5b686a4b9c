"""Extend and parse of one turn of 200 new tokens, early and late in a conversation of 40,000."""

from functools import partial

from figures import Figure, best
from formats import TEMPLATE, chat_tokenizer, real_format
from transformers import PreTrainedTokenizerFast

from toolgym.agents.chat import ChatFormat
from toolgym.envs import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from toolgym.envs.messages import to_dict

NOTES = """\
extend + parse: three quarters of it is the tokenizer itself, which also works out where each token stands in the text;
nobody asked it to, and its way without that would print a warning at every later fork."""
_CALLS = [{"function": {"name": "look_up", "arguments": {"page": "the second one of the list", "lines": 40}}}]


def figures() -> list[Figure]:
    """Ours, the renderers library's, and applying the whole template again."""
    tokenizer, ours = chat_tokenizer(), real_format()
    theirs = ChatFormat.for_tokenizer(tokenizer, template=TEMPLATE, family="qwen3")
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    whole.chat_template = TEMPLATE
    said = AssistantMessage("", (ToolCall("look_up", {"page": "the second one of the list", "lines": 40}),))
    sampled = ours.write(said)
    answer = ToolMessage(
        "It says: every ship that left the harbour before noon came back by night. " * 9, "c", "look_up"
    )
    opening = [SystemMessage("Be brief."), UserMessage("Report ann.")]
    ids, messages = ours.open(opening, []), [to_dict(message) for message in opening]
    new = len(sampled) + len(ours.extend(ids, sampled, [answer]))
    costs: dict[tuple[str, int], float] = {}
    for turn in range(1, 201):
        messages += [{"role": "assistant", "content": "", "tool_calls": _CALLS}, to_dict(answer)]
        if turn in (2, 50, 200):
            for name, chat in (("ours", ours), ("renderers", theirs)):
                parts = (partial(chat.extend, ids, sampled, [answer]), partial(chat.parse, sampled, ids))
                costs[name, turn] = sum(best(part, 100) for part in parts) * 1e3
            again = partial(whole.apply_chat_template, messages, add_generation_prompt=True)
            costs["again", turn] = best(again, 3) * 1e3
        ids = [*ids, *sampled, *ours.extend(ids, sampled, [answer])]
    raw = best(lambda: tokenizer.encode(answer.content, add_special_tokens=False), 100) * 1e3

    def row(name: str, what: str, goal: str = "") -> Figure:
        times = ", ".join(f"{costs[name, turn]:.3g} ms at turn {turn}" for turn in (2, 50, 200))
        return Figure(what, f"{times}: {costs[name, 200] / costs[name, 2]:.2f}x", goal)

    return [
        row("ours", f"extend + parse, {new} new tokens, {len(ids):,} in all", "0.2 ms; at most 1.2x"),
        row("renderers", "the same by renderers"),
        row("again", "the same by applying the template again"),
        Figure("of that, the tokenizer alone", f"{raw:.2f} ms"),
    ]
