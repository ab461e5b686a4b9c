"""Qwen3-Coder's, Qwen3.5's and Nemotron 3's calls: a function in tags, with its parameters as bare text."""

from completions.case import Case, Family, Fault, Plain, call, fault, values_of
from completions.values import BARE_VALUES
from toolgym.envs import CallFault, ToolCall

CLOSED = "\n</think>\n\n"  # of the reasoning that the prompt opens


def block(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


LOOK, CLOCK = block("look_up", ("text", "alpha")), block("clock")
ALPHA = call(text="alpha")

# What both families have in common: the reasoning is closed in the prompt.
_SHARED = (
    Case("one call", LOOK, calls=ALPHA),
    Case("two parameters", block("look_up", ("text", "alpha"), ("count", "3")), calls=call(text="alpha", count=3)),
    Case("no parameters", CLOCK, calls=call("clock")),
    Case(
        "no newlines anywhere",
        "<tool_call><function=look_up><parameter=text>alpha</parameter></function></tool_call>",
        calls=ALPHA,
    ),
    Case("several calls", f"{LOOK}\n{CLOCK}", calls=(*ALPHA, *call("clock"))),
    Case(
        "text before, between and after calls",
        f"One. {LOOK} Two. {CLOCK} Three.",
        "One.  Two.  Three.",
        (*ALPHA, *call("clock")),
    ),
    Case("a tool that nobody has", block("fly", ("to", "moon")), calls=call("fly", to="moon")),
    Case(
        "no function",
        "<tool_call>\n<parameter=text>\nalpha\n</parameter>\n</tool_call>",
        calls=fault(CallFault.NO_NAME),
    ),
    Case(
        "a function without a name",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        calls=fault(CallFault.NO_NAME),
    ),
    Case("an empty block", "<tool_call>\n</tool_call>", calls=fault(CallFault.NO_NAME)),
    Case(
        "JSON in the block",
        '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>',
        calls=fault(CallFault.NO_NAME),
    ),
    Case(
        "the function is not closed",
        "<tool_call>\n<function=look_up>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "look_up"),
    ),
    Case(
        "a parameter is not closed",
        "<tool_call>\n<function=look_up>\n<parameter=text>\nalpha\n</function>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "look_up"),
    ),
    Case(
        "cut off in a value",
        "<tool_call>\n<function=look_up>\n<parameter=text>\nal",
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case(
        "a call in reasoning that never ends",
        f"So {LOOK}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {LOOK}",
        prompt="<think>\n",
    ),
    Case(
        "a call in closed reasoning is a draft",
        f"So {LOOK}\n</think>\n\nNo.",
        "No.",
        (),
        f"So {LOOK}",
        prompt="<think>\n",
    ),
    Case("only a stop token", "", ""),
)

_QWEN = (
    Case("reasoning, text and a call", f"Hm.\n</think>\n\nYes.\n\n{LOOK}", "Yes.", ALPHA, "Hm.", prompt="<think>\n"),
    Case(
        "words before the function",
        "<tool_call>\nI call\n<function=clock>\n</function>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "clock"),
    ),
    Case(
        "words after the function",
        "<tool_call>\n<function=clock>\n</function>\nso there\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "clock"),
    ),
    Case(
        "words between parameters",
        "<tool_call>\n<function=look_up>\n<parameter=text>\na\n</parameter>\nand\n<parameter=count>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=(ToolCall("look_up", {"text": "a\n</parameter>\nand\n<parameter=count>\n3"}),),
    ),
    Case(
        "words instead of parameters",
        "<tool_call>\n<function=clock>\nnow\n</function>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "clock"),
    ),
    Case(
        "two functions in one block",
        "<tool_call>\n<function=clock>\n</function>\n<function=clock>\n</function>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "clock"),
    ),
    Case(
        "a parameter without a name",
        "<tool_call>\n<function=look_up>\n<parameter=>\na\n</parameter>\n</function>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "look_up"),
    ),
    Case(
        "a parameter twice",
        block("look_up", ("count", "1"), ("count", "2")),
        calls=fault(CallFault.BAD_ARGUMENTS, "look_up"),
    ),
    Case("the name in quotes is another name", block('"clock"'), calls=call('"clock"')),
    Case(
        "the closing tag of a parameter in its value",
        block("run", ("code", "a</parameter>b")),
        calls=call("run", code="a</parameter>b"),
    ),
    Case(
        "the closing tag of the function in a value",
        block("run", ("code", "a</function>b")),
        calls=call("run", code="a</function>b"),
    ),
    Case(
        "the closing tag as a control token in a value",
        block("run", ("code", "a</tool_call>b")),
        calls=call("run", code="a</tool_call>b"),
    ),
    Case(
        "the end of a call with its control token in a value",
        block("run", ("code", "a\n</function>\n</tool_call>\nb")),
        calls=call("run", code="a\n</function>\n</tool_call>\nb"),
    ),
    Case(
        "the closing tag in plain text in a value",
        (
            "<tool_call>\n<function=run>\n<parameter=code>\n",
            Plain("a\n</tool_call>\nb"),
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        calls=call("run", code="a\n</tool_call>\nb"),
    ),
    Case(
        "a whole call in plain text in a value",
        (
            "<tool_call>\n<function=run>\n<parameter=code>\n",
            Plain("x<tool_call>y</tool_call>z"),
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        calls=call("run", code="x<tool_call>y</tool_call>z"),
    ),
    Case(
        "the opening tag as a control token in a value",
        block("run", ("code", 'print("<tool_call>")')),
        calls=call("run", code='print("<tool_call>")'),
    ),
    Case(
        "the tags of reasoning as control tokens in a value",
        block("run", ("code", "<think>a</think>")),
        calls=call("run", code="<think>a</think>"),
    ),
    Case(
        "another control token in a value",
        block("run", ("code", "<|im_start|>x")),
        calls=call("run", code="<|im_start|>x"),
    ),
    Case("the tags in plain text are no tags", (Plain(LOOK),), LOOK),
    Case(
        "two opens and one close",
        f"<tool_call>\n<function=run>\n<parameter=code>\nx\n{LOOK}",
        "",
        (Fault(CallFault.CUT_OFF), *ALPHA),
    ),
    Case("a close without an open", "Done.</tool_call>", "Done.</tool_call>"),
    Case("the tags of the function without a block", "<function=clock>\n</function>", "<function=clock>\n</function>"),
    Case("cut off in the name", "Yes.\n<tool_call>\n<function=lo", "Yes.", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "cut off before the closing tag", LOOK.removesuffix("</tool_call>"), "", fault(CallFault.CUT_OFF), ended=False
    ),
    Case("ended without a closing tag", LOOK.removesuffix("</tool_call>"), "", fault(CallFault.CUT_OFF)),
    Case("reasoning again after text", "a<think>b</think>c", "ac", (), "b"),
    Case("cut off in reasoning", "Hm", "", (), "Hm", ended=False, prompt="<think>\n"),
    Case("nothing but white space", " \n ", ""),
)

_NEMOTRON = (
    Case("reasoning, text and a call", f"Hm.</think>Yes.\n{LOOK}\n", "Yes.", ALPHA, "Hm.", prompt="<think>\n"),
    Case("reasoning closed at once", f"</think>{LOOK}\n", "", ALPHA, prompt="<think>\n"),
    Case("digits declared text stay text", block("set_up", ("zip", "75001")), calls=call("set_up", zip="75001")),
    Case(
        "indented code survives",
        block("run", ("code", "  if x:\n    y()\n")),
        calls=call("run", code="  if x:\n    y()\n"),
    ),
    Case(
        "Python's words where a schema asks for them",
        block("set_up", ("flag", "True"), ("maybe", "None")),
        calls=call("set_up", flag=True, maybe=None),
    ),
    Case(
        "the closing tag as a control token in a value",
        block("run", ("code", "a</tool_call>b")),
        calls=call("run", code="a</tool_call>b"),
    ),
    Case("a close without an open", "Done.</tool_call>", "Done.</tool_call>"),
    Case("ended in reasoning", "Hm. Done.", "", (), "Hm. Done.", prompt="<think>\n"),
)


def _closed(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Prompts that say nothing else have closed the reasoning which their template opens."""
    return tuple(
        Case(
            c.name,
            c.said,
            c.content,
            c.calls,
            c.reasoning,
            c.ended,
            c.prompt.removeprefix("<think>\n") or ("" if c.prompt else CLOSED),
        )
        for c in cases
    )


_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "function", "parameter")
QWEN_XML = Family(
    "qwen-xml",
    "qwen3_5_think",
    _closed(_SHARED + _QWEN + values_of(BARE_VALUES, lambda key, written: block("set_up", (key, written)))),
    _MARKERS,
)
NEMOTRON = Family("nemotron", "nemotron_3_nano", _closed(_SHARED + _NEMOTRON), _MARKERS)
