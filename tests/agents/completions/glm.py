"""GLM's calls: a name, then keys and values in tags that are tokens of their own."""

from completions.case import Case, Family, Fault, Plain, call, fault, values_of
from completions.values import BARE_VALUES
from toolgym.envs import CallFault


def block(name: str, *pairs: tuple[str, str]) -> str:
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{body}</tool_call>"


LOOK, CLOCK = block("look_up", ("text", "alpha")), block("clock")
ALPHA = call(text="alpha")

_CASES = (
    Case("one call", f"\n{LOOK}", calls=ALPHA),
    Case("two arguments", block("look_up", ("text", "alpha"), ("count", "3")), calls=call(text="alpha", count=3)),
    Case("no arguments", CLOCK, calls=call("clock")),
    Case("no arguments and no newline", "<tool_call>clock</tool_call>", calls=call("clock")),
    Case(
        "no newlines anywhere",
        "<tool_call>look_up<arg_key>text</arg_key><arg_value>alpha</arg_value></tool_call>",
        calls=ALPHA,
    ),
    Case("a newline before the name", "<tool_call>\nclock\n</tool_call>", calls=call("clock")),
    Case("several calls", f"{CLOCK}\n{LOOK}\n{CLOCK}", calls=(*call("clock"), *ALPHA, *call("clock"))),
    Case(
        "text before, between and after calls",
        f"One. {LOOK} Two. {CLOCK} Three.",
        "One.  Two.  Three.",
        (*ALPHA, *call("clock")),
    ),
    Case("a tool that nobody has", block("fly", ("to", "moon")), calls=call("fly", to="moon")),
    Case("reasoning, text and a call", f"\n<think>Hm.</think>\nYes.\n{LOOK}", "Yes.", ALPHA, "Hm."),
    Case("reasoning that is empty", f"\n<think></think>\n{LOOK}", "", ALPHA),
    Case("a call in closed reasoning is a draft", f"<think>So {LOOK}</think>\nNo.", "No.", (), f"So {LOOK}"),
    Case(
        "a call in reasoning that never ends",
        f"<think>So {LOOK}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {LOOK}",
    ),
    Case(
        "a cut call in reasoning that never ends",
        "<think>So <tool_call>loo",
        "",
        fault(CallFault.IN_REASONING),
        "So <tool_call>loo",
        ended=False,
    ),
    Case("reasoning closed but never opened", f"Hm.</think>{LOOK}", "", ALPHA, "Hm."),
    Case(
        "no name",
        "<tool_call>\n<arg_key>text</arg_key>\n<arg_value>alpha</arg_value>\n</tool_call>",
        calls=fault(CallFault.NO_NAME),
    ),
    Case("an empty block", "<tool_call></tool_call>", calls=fault(CallFault.NO_NAME)),
    Case("words instead of a name", "<tool_call>I look up alpha</tool_call>", calls=fault(CallFault.MALFORMED)),
    Case(
        "JSON in the block",
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        calls=fault(CallFault.MALFORMED),
    ),
    Case(
        "a key without a value",
        "<tool_call>look_up\n<arg_key>text</arg_key>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "look_up"),
    ),
    Case(
        "a value without a key",
        "<tool_call>look_up\n<arg_value>alpha</arg_value>\n</tool_call>",
        calls=fault(CallFault.MALFORMED),
    ),
    Case(
        "a value that is not closed",
        "<tool_call>look_up\n<arg_key>text</arg_key>\n<arg_value>alpha\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "look_up"),
    ),
    Case("an empty key", block("look_up", ("", "alpha")), calls=fault(CallFault.MALFORMED, "look_up")),
    Case(
        "words between pairs",
        "<tool_call>look_up\n<arg_key>text</arg_key> is <arg_value>alpha</arg_value>\n</tool_call>",
        calls=fault(CallFault.MALFORMED, "look_up"),
    ),
    Case(
        "words after the pairs",
        "<tool_call>look_up\n<arg_key>text</arg_key>\n<arg_value>alpha</arg_value>\nplease</tool_call>",
        calls=fault(CallFault.MALFORMED, "look_up"),
    ),
    Case(
        "a key twice", block("look_up", ("count", "1"), ("count", "2")), calls=fault(CallFault.BAD_ARGUMENTS, "look_up")
    ),
    Case(
        "the closing tag of a value as a control token in it",
        block("run", ("code", "a</arg_value>b")),
        calls=call("run", code="a</arg_value>b"),
    ),
    Case(
        "the closing tag as a control token in a value",
        block("run", ("code", "a</tool_call>b")),
        calls=call("run", code="a</tool_call>b"),
    ),
    Case(
        "the opening tag as a control token in a value",
        block("run", ("code", 'print("<tool_call>")')),
        calls=call("run", code='print("<tool_call>")'),
    ),
    Case(
        "all tags in plain text in a value",
        (
            "<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>",
            Plain("</arg_value>\n<arg_key>x</arg_key>\n<arg_value>\n</tool_call>"),
            "</arg_value>\n</tool_call>",
        ),
        calls=call("run", code="</arg_value>\n<arg_key>x</arg_key>\n<arg_value>\n</tool_call>"),
    ),
    Case("the tags in plain text are no tags", (Plain(LOOK),), LOOK),
    Case(
        "the tags of reasoning as control tokens in a value",
        block("run", ("code", "<think>a</think>")),
        calls=call("run", code="<think>a</think>"),
    ),
    Case(
        "two opens and one close",
        f"<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>x\n{LOOK}",
        "",
        (Fault(CallFault.CUT_OFF), *ALPHA),
    ),
    Case("a close without an open", "Done.</tool_call>", "Done.</tool_call>"),
    Case("tags of arguments without a block", "<arg_key>a</arg_key>", "<arg_key>a</arg_key>"),
    Case("cut off in the name", "Yes. <tool_call>loo", "Yes.", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off in a key", "<tool_call>look_up\n<arg_key>te", "", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "cut off in a value",
        "<tool_call>look_up\n<arg_key>text</arg_key>\n<arg_value>al",
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case(
        "cut off before the closing tag", LOOK.removesuffix("</tool_call>"), "", fault(CallFault.CUT_OFF), ended=False
    ),
    Case(
        "ended without a closing tag",
        LOOK.removesuffix("</tool_call>"),
        "",
        fault(CallFault.CUT_OFF),
        stop="<|observation|>",
    ),
    Case("a call that ends with the stop token of text", LOOK, "", ALPHA, stop="<|user|>"),
    Case("text that ends with the stop token of calls", "Done.", "Done.", stop="<|observation|>"),
    Case("nothing but white space", "\n \n", ""),
    Case("only a stop token", "", ""),
)

GLM = Family(
    "glm",
    "glm4moe",
    _CASES + values_of(BARE_VALUES, lambda key, written: block("set_up", (key, written))),
    ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
