"""Qwen2.5's and Qwen3's calls: JSON in ``<tool_call>``, as Hermes began it."""

from completions.case import Case, Family, Fault, Plain, arguments_of, call, fault
from completions.values import JSON_ARGUMENTS
from toolgym.envs import CallFault

LOOK = '{"name": "look_up", "arguments": {"text": "alpha"}}'
CLOCK = '{"name": "clock", "arguments": {}}'
ALPHA = call(text="alpha")


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


_CASES = (
    Case("one call", block(LOOK), calls=ALPHA),
    Case("one call on one line", f"<tool_call>{LOOK}</tool_call>", calls=ALPHA),
    Case("several calls", f"{block(LOOK)}\n{block(CLOCK)}", calls=(*ALPHA, *call("clock"))),
    Case("the same call twice", block(LOOK) * 2, calls=ALPHA * 2),
    Case(
        "text before, between and after calls",
        f"One. {block(LOOK)} Two. {block(CLOCK)} Three.",
        "One.  Two.  Three.",
        (*ALPHA, *call("clock")),
    ),
    Case(
        "a good call, a bad one and a good one",
        block(LOOK) + block("{oops}") + block(CLOCK),
        calls=(*ALPHA, Fault(CallFault.BAD_JSON), *call("clock")),
    ),
    Case("a tool that nobody has", block('{"name": "fly", "arguments": {"to": "moon"}}'), calls=call("fly", to="moon")),
    Case("reasoning, text and a call", f"<think>\nHm.\n</think>\n\nYes.\n{block(LOOK)}", "Yes.", ALPHA, "Hm."),
    Case(
        "a call in closed reasoning is a draft",
        f"<think>\nPerhaps {block(LOOK)}?\n</think>\n\nNo.",
        "No.",
        (),
        f"Perhaps {block(LOOK)}?",
    ),
    Case(
        "a draft in reasoning and a call after it",
        f"<think>{block(CLOCK)}</think>{block(LOOK)}",
        "",
        ALPHA,
        block(CLOCK),
    ),
    Case(
        "a call in reasoning that never ends",
        f"<think>\nSo {block(LOOK)}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {block(LOOK)}",
    ),
    Case(
        "a cut call in reasoning that never ends",
        "<think>\nSo <tool_call>\n{",
        "",
        fault(CallFault.IN_REASONING),
        "So <tool_call>\n{",
        ended=False,
    ),
    Case(
        "reasoning that the prompt opened, then a call",
        f"Hm.\n</think>\n\n{block(LOOK)}",
        "",
        ALPHA,
        "Hm.",
        prompt="<think>\n",
    ),
    Case(
        "a call in reasoning that the prompt opened",
        f"Hm. {block(LOOK)}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"Hm. {block(LOOK)}",
        prompt="<think>\n",
    ),
    Case("reasoning that was closed but never opened", f"Hm.\n</think>\n\n{block(LOOK)}", "", ALPHA, "Hm."),
    Case("reasoning again after text", "<think>a</think>b<think>c</think>d", "bd", (), "a\nc"),
    Case(
        "reasoning between two calls", f"{block(LOOK)}<think>b</think>{block(CLOCK)}", "", (*ALPHA, *call("clock")), "b"
    ),
    Case("reasoning that is empty", "<think>\n\n</think>\n\nYes.", "Yes."),
    Case(
        "the tags of reasoning as control tokens in an argument",
        block('{"name": "run", "arguments": {"code": "<think>a</think>"}}'),
        calls=call("run", code="<think>a</think>"),
    ),
    Case(
        "the closing tag of reasoning alone in an argument",
        block('{"name": "run", "arguments": {"code": "</think>"}}'),
        calls=call("run", code="</think>"),
    ),
    Case(
        "the closing tag as a control token in an argument",
        block('{"name": "run", "arguments": {"code": "a</tool_call>b"}}'),
        calls=call("run", code="a</tool_call>b"),
    ),
    Case(
        "the closing tag in plain text in an argument",
        ('<tool_call>\n{"name": "run", "arguments": {"code": "', Plain("a</tool_call>b"), '"}}\n</tool_call>'),
        calls=call("run", code="a</tool_call>b"),
    ),
    Case(
        "a whole call as control tokens in an argument",
        block('{"name": "run", "arguments": {"code": "<tool_call>{}</tool_call>"}}'),
        calls=call("run", code="<tool_call>{}</tool_call>"),
    ),
    Case("the tag in plain text is no tag", (Plain(block(LOOK)),), block(LOOK)),
    Case(
        "another control token in an argument",
        block('{"name": "run", "arguments": {"code": "<|im_start|>x"}}'),
        calls=call("run", code="<|im_start|>x"),
    ),
    Case("a control token between", f"a<|im_start|>b{block(LOOK)}", "a<|im_start|>b", ALPHA),
    Case("no name", block('{"arguments": {}}'), calls=fault(CallFault.NO_NAME)),
    Case("an empty name", block('{"name": "", "arguments": {}}'), calls=fault(CallFault.NO_NAME)),
    Case("a name of white space", block('{"name": " ", "arguments": {}}'), calls=fault(CallFault.NO_NAME)),
    Case("a name that is a number", block('{"name": 7, "arguments": {}}'), calls=fault(CallFault.NO_NAME)),
    Case("a name that is a list", block('{"name": ["look_up"], "arguments": {}}'), calls=fault(CallFault.NO_NAME)),
    Case("a name that is null", block('{"name": null, "arguments": {}}'), calls=fault(CallFault.NO_NAME)),
    Case("a list instead of a call", block(f"[{LOOK}]"), calls=fault(CallFault.NO_NAME)),
    Case("the call one level too deep", block(f'{{"function": {LOOK}}}'), calls=fault(CallFault.NO_NAME)),
    Case("no arguments at all", block('{"name": "clock"}'), calls=call("clock")),
    Case("arguments called parameters", block('{"name": "look_up", "parameters": {"count": 3}}'), calls=call(count=3)),
    Case(
        "both arguments and parameters",
        block('{"name": "look_up", "arguments": {"count": 3}, "parameters": {"text": "x"}}'),
        calls=fault(CallFault.BAD_ARGUMENTS, "look_up"),
    ),
    Case(
        "arguments beside the name",
        block('{"name": "look_up", "text": "alpha"}'),
        calls=fault(CallFault.BAD_ARGUMENTS, "look_up"),
    ),
    Case(
        "an id and a type beside the name",
        block('{"id": "c1", "type": "function", "name": "clock"}'),
        calls=call("clock"),
    ),
    Case("the name twice", block('{"name": "clock", "name": "run", "arguments": {}}'), calls=fault(CallFault.BAD_JSON)),
    Case("an empty block", "<tool_call></tool_call>", calls=fault(CallFault.BAD_JSON)),
    Case("a block of white space", "<tool_call>\n \n</tool_call>", calls=fault(CallFault.BAD_JSON)),
    Case("words in a block", block("look up alpha"), calls=fault(CallFault.BAD_JSON)),
    Case("a fence around the JSON", block(f"```json\n{LOOK}\n```"), calls=fault(CallFault.BAD_JSON)),
    Case("two calls in one block", block(f"{LOOK}\n{CLOCK}"), calls=fault(CallFault.BAD_JSON)),
    Case(
        "a block within a block",
        f"<tool_call>\n{block(LOOK)}\n</tool_call>",
        "</tool_call>",
        (Fault(CallFault.CUT_OFF), *ALPHA),
    ),
    Case(
        "two opens and one close",
        f"<tool_call>\n{LOOK}\n{block(CLOCK)}",
        "",
        (Fault(CallFault.CUT_OFF), *call("clock")),
    ),
    Case("open instead of close", f"<tool_call>\n{LOOK}\n<tool_call>", "", fault(CallFault.CUT_OFF) * 2),
    Case("a close without an open", "Done.</tool_call>", "Done.</tool_call>"),
    Case("two closes", f"{block(LOOK)}</tool_call>", "</tool_call>", ALPHA),
    Case("cut off right after the open", "Yes. <tool_call>", "Yes.", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off in the name", '<tool_call>\n{"name": "loo', "", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "cut off in the arguments",
        '<tool_call>\n{"name": "look_up", "arguments": {"text": "al',
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case("cut off before the closing tag", f"<tool_call>\n{LOOK}\n", "", fault(CallFault.CUT_OFF), ended=False),
    Case("ended without a closing tag", f"<tool_call>\n{LOOK}\n", "", fault(CallFault.CUT_OFF)),
    Case(
        "a good call and a cut one",
        f'{block(CLOCK)}\n<tool_call>\n{{"na',
        "",
        (*call("clock"), Fault(CallFault.CUT_OFF)),
        ended=False,
    ),
    Case("cut off in reasoning", "<think>\nHm", "", (), "Hm", ended=False),
    Case("nothing but white space", " \n\t ", ""),
    Case("only a stop token", "", ""),
    Case("nothing at all", "", "", ended=False),
    Case("JSON without tags is an answer", LOOK, LOOK),
    Case("unicode and emoji in text and reasoning", "<think>思考 🤔</think>Zürich 🚀", "Zürich 🚀", (), "思考 🤔"),
    Case("other tags are text", "<tool>x</tool> <TOOL_CALL>", "<tool>x</tool> <TOOL_CALL>"),
)

HERMES = Family(
    "hermes",
    "qwen3",
    _CASES
    + arguments_of(
        JSON_ARGUMENTS, lambda written: block(f'{{"name": "look_up", "arguments": {written}}}'), named=False
    ),
    (
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "name",
        "arguments",
        "parameters",
        "type",
        "function",
        "id",
        "c1",
    ),
)
