"""The probes of the certificate, P1 to P8: small conversations that show where chat formats break."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from toolgym.agents.certificate import Certificate, Concern, Finding, Shown, Verdict, finding
from toolgym.agents.chat import ChatFormat, TemplateRefused
from toolgym.agents.dialect import PROBE_TOOL
from toolgym.agents.judging import Step, Turn, judge_cut, judge_other_stop, play
from toolgym.envs.errors import ConfigurationError
from toolgym.envs.messages import AssistantMessage, Message, SystemMessage, ToolCall, ToolMessage, UserMessage

OTHER_TOOL = {"type": "function", "function": {**PROBE_TOOL["function"], "name": "find_out"}}
TOOLS = (PROBE_TOOL, OTHER_TOOL)
QUESTION = UserMessage("What is 6 * 7?")
AGAIN = UserMessage("And 7 * 8?")
SYSTEM = SystemMessage("You are brief.")
OPENINGS = ((QUESTION,), (SYSTEM, QUESTION))
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
    '{"b": 1,  "a" : 2}',
    "",
    " ".join(f"word{number}" for number in range(400)),
)


def call(number: int = 0) -> ToolCall:
    """A call of the probe tool."""
    return ToolCall(_tool(number), {"text": f"page {number} of it"}, f"call_{number}")


def answer(number: int = 0, text: str = "") -> ToolMessage:
    """The answer to such a call."""
    return ToolMessage(text or f"Result {number}: it is known.", f"call_{number}", _tool(number))


def _tool(number: int) -> str:
    return "find_out" if number % 2 else "look_up"


def calling(*numbers: int, reasoning: str | None = None) -> Step:
    """A turn that calls, with the answers."""
    said = AssistantMessage("", tuple(call(number) for number in numbers), reasoning)
    return Step(said, f"page {numbers[-1]} of it", tuple(answer(number) for number in numbers))


def answering(reasoning: str | None = None, follows: Message = AGAIN) -> Step:
    """A turn that answers, with the user's next word."""
    said = AssistantMessage("The answer is 42.", reasoning=reasoning)
    return Step(said, said.content, (follows,))


def certify(chat: ChatFormat) -> Certificate:
    """Run all probes."""
    one_call = not _can_write(chat, calling(1, 2).said) and _can_write(chat, calling(1).said)
    probes = (_calls, _several_calls, _reasoning, _inline_reasoning, _rounds, _odd_texts, _cut, _openings)
    findings = tuple(probe(chat) for probe in probes)
    return Certificate(chat.name, chat.call_syntax, chat.fingerprint, one_call, findings)


def _conversation(chat: ChatFormat, *steps: Step, system: bool = False) -> Iterator[Shown]:
    yield from (shown for _, shown in play(chat, OPENINGS[system], steps, TOOLS))


def _calls(chat: ChatFormat) -> Finding:
    return finding("P1", "user, call, result", _conversation(chat, calling(0)))


def _several_calls(chat: ChatFormat) -> Finding:
    about = "several calls, several results"
    if _can_write(chat, calling(1).said) and not _can_write(chat, calling(1, 2).said):
        return finding("P2", about, _conversation(chat, calling(1), calling(2)), "one call a turn; more are refused")
    said = calling(9, 8, 7, 6, 5)
    equal = Step(said.said, said.last, tuple(replace(m, content="The same.") for m in said.follows))
    return finding("P2", about, _conversation(chat, calling(1, 2), calling(3, 4, 5), said, equal))


def _reasoning(chat: ChatFormat) -> Finding:
    about = "reasoning in a field, then a user turn"
    try:
        chat.write(answering(THOUGHT).said)
    except ConfigurationError as error:
        steps = (answering(), answering())
        return finding("P3", about, _conversation(chat, *steps, system=_takes_system(chat)), str(error))
    acting = (calling(0, reasoning=THOUGHT),) if _can_write(chat, calling(0).said) else ()
    steps = (*acting, answering(THOUGHT), answering(THOUGHT))
    return finding("P3", about, _conversation(chat, *steps, system=_takes_system(chat)))


def _inline_reasoning(chat: ChatFormat) -> Finding:
    about, said = "reasoning inline, then a user turn", "The answer is 42."
    text = chat.inline_reasoning(THOUGHT, said)
    if text is None:
        return finding("P4", about, _conversation(chat, answering()), "reasoning has a channel of its own")
    steps = (Step(text, said, (AGAIN,)), Step(text, said, (AGAIN,)))
    return finding("P4", about, _conversation(chat, *steps, system=_takes_system(chat)))


def _rounds(chat: ChatFormat) -> Finding:
    # Long enough for templates that count: twelve turns.
    steps = (*(calling(number) for number in range(8)), answering(), calling(8), calling(9), answering())
    return finding("P5", "results over several rounds", _conversation(chat, *steps, system=_takes_system(chat)))


def _odd_texts(chat: ChatFormat) -> Finding:
    plain = set(chat.render((UserMessage("x"),), (), opens=False))
    can_call = _can_write(chat, calling(0).said)

    def shown() -> Iterator[Shown]:
        for text in ODD_TEXTS:
            if chat.control_token_ids & set(chat.render((UserMessage(text),), (), opens=False)) - plain:
                continue  # as `_literals` has it
            acting = (Step(calling(0).said, calling(0).last, (ToolMessage(text, "call_0", "look_up"),)),)
            yield from _conversation(chat, *(acting if can_call else ()), answering(follows=UserMessage(text)))
        yield from _literals(chat, can_call=can_call)
        if can_call:
            beside = Step(AssistantMessage("I look it up.", (call(0),)), calling(0).last, (answer(0),))
            yield from (_about_beside(shown) for shown in _conversation(chat, beside))

    return finding("P6", "odd texts, special-token literals", shown())


def _about_beside(shown: Shown) -> Shown:
    return replace(shown, concern=Concern.BESIDE, note=f"text beside a call: {shown.note}" if shown.note else "")


def _literals(chat: ChatFormat, *, can_call: bool) -> Iterator[Shown]:
    """Literals of control tokens must be text: the same conversation as with a harmless word, but for that word."""
    prompt, special = chat.open((QUESTION,), TOOLS), chat.control_token_ids
    turns: list[tuple[list[int], Callable[[str], Message]]] = [(chat.write(answering().said), UserMessage)]
    if can_call:
        turns.append((chat.write(calling(0).said), lambda text: answer(0, text)))
    others = sorted(special - set(chat.stop_token_ids))
    for token in (*chat.stop_token_ids, *others[:_LITERALS]):
        literal, word = chat.decode([token]), "harmless"
        if '"' in literal:
            continue  # where templates write JSON, it reads otherwise
        for turn, make in turns:
            forged, honest = (chat.extend(prompt, turn, (make(f"a {text} b"),), TOOLS) for text in (literal, word))
            same_tokens = [t for t in forged if t in special] == [t for t in honest if t in special]
            if same_tokens and chat.decode(forged) == chat.decode(honest).replace(word, literal):
                yield Shown(Verdict.EXACT)
            else:
                yield Shown(Verdict.REFUSED, f"the literal {literal!r} in a message is more than text")


def _cut(chat: ChatFormat) -> Finding:
    def shown() -> Iterator[Shown]:
        for step in (answering(), calling(0)):
            if not _can_write(chat, step.said):
                continue
            turn, whole = next(play(chat, (QUESTION,), (step,), TOOLS))
            yield whole
            if whole.verdict is not Verdict.REFUSED:
                yield from _cut_anywhere(chat, turn)
                others = [stop for stop in chat.stop_token_ids if stop != turn.sampled[-1]]
                yield from (judge_other_stop(chat, turn, stop, TOOLS) for stop in others)
        for step in (answering(THOUGHT), calling(0, reasoning=THOUGHT)):
            if _can_write(chat, step.said) and THOUGHT in chat.decode(chat.write(step.said)):
                turn, whole = next(play(chat, (QUESTION,), (step,), TOOLS))
                if whole.verdict is not Verdict.REFUSED:
                    yield _cut_reasoning(chat, turn)

    return finding("P7", "a completion cut by length, or ended by another stop token", shown())


def _cut_anywhere(chat: ChatFormat, turn: Turn) -> Iterator[Shown]:
    """Cut within its last words: in the content, or in the arguments of a call."""
    spoken = next(k for k in range(len(turn.sampled)) if turn.step.last in chat.decode(turn.sampled[:k])) - 1
    behind = chat.decode(turn.sampled[:-1]).rpartition(turn.step.last)[2].strip()
    yield judge_cut(chat, turn, spoken, behind.endswith, TOOLS)


def _cut_reasoning(chat: ChatFormat, turn: Turn) -> Shown:
    """Cut before the last words of its reasoning."""
    text = chat.decode(turn.sampled)
    closes = text.partition(THOUGHT)[2].strip()
    tagged = chat.inline_reasoning("", "") is not None  # else the token that ends the turn closes the channel
    spoken = next(k for k in range(len(turn.sampled)) if THOUGHT in chat.decode(turn.sampled[:k])) - 1

    def fits(closed: str) -> bool:
        return bool(closed) == tagged and closes.startswith(closed)

    return judge_cut(chat, turn, spoken, fits, TOOLS)


def _openings(chat: ChatFormat) -> Finding:
    def shown() -> Iterator[Shown]:
        told = (SYSTEM, QUESTION, calling(0).said, answer(0), answering().said, AGAIN)
        history = (told,) if _can_write(chat, calling(0).said) and _takes_system(chat) else ()
        for opening in (*OPENINGS, *history):
            for tools in ((), TOOLS):
                ours, theirs = chat.open(opening, tools), chat.render(opening, tools, opens=True)
                shown = chat.decode(ours)
                dropped = [m for m in opening if m.content not in shown and json.dumps(m.content)[1:-1] not in shown]
                if dropped:
                    yield Shown(Verdict.REFUSED, f"the template drops a {type(dropped[0]).__name__}")
                elif ours != theirs:
                    yield Shown(Verdict.REFUSED, "the first prompt is another")
                else:
                    yield Shown(Verdict.EXACT)

    notes: tuple[str, ...] = ()
    with contextlib.suppress(TemplateRefused):
        if PROBE_TOOL["function"]["description"] not in chat.decode(chat.open((QUESTION,), TOOLS)):
            notes = (TOOLS_NOT_SHOWN,)
    return finding("P8", "with and without system message and tools", shown(), *notes)


TOOLS_NOT_SHOWN = "the template does not show tools: describe them in the system prompt"


def _can_write(chat: ChatFormat, said: AssistantMessage | str) -> bool:
    try:
        return bool(chat.write(said))
    except (ConfigurationError, TemplateRefused):
        return False


def _takes_system(chat: ChatFormat) -> bool:
    try:
        return bool(chat.open(OPENINGS[True], ()))
    except TemplateRefused:
        return False
