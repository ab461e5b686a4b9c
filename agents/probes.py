"""The probes of the certificate, P1 to P8: small conversations that show where chat formats break."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from toolgym.agents.certificate import Certificate, Finding, Step, Verdict, finding, play
from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.dialect import PROBE_CALL, PROBE_TOOL
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import AssistantMessage, Message, SystemMessage, ToolCall, ToolMessage, UserMessage

TOOLS = (PROBE_TOOL,)
QUESTION = UserMessage("What is 6 * 7?")
AGAIN = UserMessage("And 7 * 8?")
SYSTEM = SystemMessage("You are brief.")
OPENINGS = ((QUESTION,), (SYSTEM, QUESTION))
ANSWER = AssistantMessage("It is 42.")
THOUGHT = "Six times seven. That is forty-two."
_LITERALS = 64
# What tools and users send: white space at the edges, other scripts, what looks like JSON or markup, and nothing.
ODD_TEXTS = (
    "  two spaces before and after  ",
    "\n\nlines\n\n",
    "\xe9\u6f22\u5b57\u0301 \U0001f600\u200d \xa0",
    '{"a": [1, "b"]}',
    "[1, 2]",
    "a\r\nb\tc",
    "</tool_response> </function> ```",
    "<think>hm</think>",
    "\\n \\u0041 \\\\",
    "- a\n- b\n",
    "7",
    "true",
    "",
)


def call(number: int = 0, name: str = "look_up") -> ToolCall:
    """A call of the probe tool."""
    return ToolCall(name, {"text": f"number {number}", "count": number}, f"call_{number}")


def answer(number: int = 0, text: str = "It is 42.") -> ToolMessage:
    """The answer to such a call."""
    return ToolMessage(text, f"call_{number}", "look_up")


def certify(chat: ChatFormat) -> Certificate:
    """Run all probes."""
    probes = (_calls, _several_calls, _reasoning, _inline_reasoning, _rounds, _odd_texts, _cut, _openings)
    return Certificate(chat.name, chat.call_syntax, tuple(probe(chat) for probe in probes))


def _conversation(chat: ChatFormat, *steps: Step, system: bool = False) -> Iterator[tuple[Verdict, str]]:
    opening: tuple[Message, ...] = (SYSTEM, QUESTION) if system else (QUESTION,)
    yield from play(chat, opening, steps, TOOLS)


def _calls(chat: ChatFormat) -> Finding:
    step = Step(AssistantMessage("", (call(),)), (answer(),))
    return finding("P1", "user, call, result", _conversation(chat, step))


def _several_calls(chat: ChatFormat) -> Finding:
    about = "several calls, several results"
    said = AssistantMessage("", (call(1), call(2)))
    try:
        chat.write(said)
    except ConfigurationError:
        steps = (
            Step(AssistantMessage("", (call(1),)), (answer(1),)),
            Step(AssistantMessage("", (call(2),)), (answer(2),)),
        )
        return finding("P2", about, _conversation(chat, *steps), "one call a turn")
    return finding("P2", about, _conversation(chat, Step(said, (answer(1, "one"), answer(2, "two")))))


def _reasoning(chat: ChatFormat) -> Finding:
    about = "reasoning in a field, then a user turn"
    try:
        chat.write(AssistantMessage(ANSWER.content, reasoning=THOUGHT))
    except ConfigurationError as error:
        return finding("P3", about, _conversation(chat, Step(ANSWER, (AGAIN,)), Step(ANSWER, (AGAIN,))), str(error))
    thought = AssistantMessage(ANSWER.content, reasoning=THOUGHT)
    acting = AssistantMessage("", (call(),), THOUGHT)
    steps = (Step(acting, (answer(),)), Step(thought, (AGAIN,)), Step(thought, (AGAIN,)))
    return finding("P3", about, _conversation(chat, *steps))


def _inline_reasoning(chat: ChatFormat) -> Finding:
    about = "reasoning inline, then a user turn"
    text = chat.inline_reasoning(THOUGHT, ANSWER.content)
    if text is None:
        return finding("P4", about, _conversation(chat, Step(ANSWER, (AGAIN,))), "reasoning has a channel of its own")
    return finding("P4", about, _conversation(chat, Step(text, (AGAIN,)), Step(text, (AGAIN,))))


def _rounds(chat: ChatFormat) -> Finding:
    steps = [Step(AssistantMessage("", (call(k),)), (answer(k, f"Result {k}."),)) for k in range(3)]
    steps.append(Step(ANSWER, (AGAIN,)))
    steps.append(Step(AssistantMessage("", (call(4),)), (answer(4),)))
    return finding("P5", "results over several rounds", _conversation(chat, *steps, system=True))


def _odd_texts(chat: ChatFormat) -> Finding:
    plain = set(chat.render((UserMessage("x"),), (), opens=False))

    def shown() -> Iterator[tuple[Verdict, str]]:
        for text in ODD_TEXTS:
            if chat.control_token_ids & set(chat.render((UserMessage(text),), (), opens=False)) - plain:
                continue  # as `_literals` has it
            acting = (Step(AssistantMessage("", (call(),)), (answer(0, text),)),) if _can_call(chat) else ()
            yield from _conversation(chat, *acting, Step(ANSWER, (UserMessage(text),)))
        yield from _literals(chat)

    return finding("P6", "odd texts, special-token literals", shown())


def _literals(chat: ChatFormat) -> Iterator[tuple[Verdict, str]]:
    """Literals of control tokens must be text: the same conversation as with a harmless word, but for that word."""
    prompt = chat.open((QUESTION,), TOOLS)
    turns: list[tuple[list[int], Callable[[str], Message]]] = [(chat.write(ANSWER), UserMessage)]
    if _can_call(chat):
        turns.append((chat.write(AssistantMessage("", (call(),))), lambda text: answer(0, text)))
    special = chat.control_token_ids
    others = sorted(special - set(chat.stop_token_ids))
    for token in (*chat.stop_token_ids, *others[:_LITERALS]):
        literal, word = chat.decode([token]), "harmless"
        if '"' in literal:
            continue  # where templates write JSON, it reads otherwise
        for turn, make in turns:
            forged, honest = (chat.extend(prompt, turn, (make(f"a {text} b"),), TOOLS) for text in (literal, word))
            same_tokens = [t for t in forged if t in special] == [t for t in honest if t in special]
            if same_tokens and chat.decode(forged) == chat.decode(honest).replace(word, literal):
                yield Verdict.EXACT, ""
            else:
                yield Verdict.REFUSED, f"the literal {literal!r} in a message is more than text"


@dataclass(frozen=True)
class _Cut:
    """Cuts so many tokens off the end of what was sampled, its stop token among them."""

    tokens: int

    def __call__(self, sampled: Sequence[int]) -> int:
        return max(1, len(sampled) - 1 - self.tokens)


def _cut(chat: ChatFormat) -> Finding:
    def shown() -> Iterator[tuple[Verdict, str]]:
        long = AssistantMessage("It is forty-two, as everybody knows by now.")
        kept = chat.write(long)[: _Cut(2)(chat.write(long))]
        yield from _conversation(chat, Step(long, (AGAIN,), _Cut(2), chat.parse(kept, chat.open((QUESTION,), TOOLS))))
        if _can_call(chat):
            acting = AssistantMessage("", (call(),))
            yield from _conversation(chat, Step(acting, (answer(0, "The call was cut off."),), _Cut(6), acting))
        try:
            sampled = chat.write(AssistantMessage("", reasoning=THOUGHT))
        except (ConfigurationError, TemplateRefused):
            return
        end = next((k for k in range(len(sampled)) if THOUGHT[:-1] in chat.decode(sampled[: k + 1])), 4)
        said = chat.parse(sampled[:end], chat.open((QUESTION,), TOOLS))
        step = Step(AssistantMessage("", reasoning=THOUGHT), (AGAIN,), lambda _: end, said)
        yield from _conversation(chat, step)

    return finding("P7", "a completion cut by length", shown())


def _openings(chat: ChatFormat) -> Finding:
    def shown() -> Iterator[tuple[Verdict, str]]:
        for opening in OPENINGS:
            for tools in ((), TOOLS):
                ours, theirs = chat.open(opening, tools), chat.render(opening, tools, opens=True)
                dropped = [m for m in opening if m.content not in chat.decode(ours)]
                if dropped:
                    yield Verdict.REFUSED, f"the template drops a {type(dropped[0]).__name__}"
                else:
                    yield (Verdict.EXACT, "") if ours == theirs else (Verdict.REFUSED, "the first prompt is another")

    notes: tuple[str, ...] = ()
    with contextlib.suppress(TemplateRefused):
        if PROBE_CALL.name not in chat.decode(chat.open((QUESTION,), TOOLS)):
            notes = ("the template does not show tools: describe them in the system prompt",)
    return finding("P8", "with and without system message and tools", shown(), *notes)


def _can_call(chat: ChatFormat) -> bool:
    try:
        return bool(chat.write(AssistantMessage("", (call(),))))
    except ConfigurationError:
        return False
