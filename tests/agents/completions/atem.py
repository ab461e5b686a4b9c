"""ATEM's turns (Muse): messages with recipients, and calls in tags. The prompt ends with the first's role."""

from completions.case import Case, Family, Fault, Plain, call, fault, values_of
from completions.values import BARE_VALUES
from toolgym.envs import CallFault

ROLE, EOM = "<|start|>assistant", "<|eom|>"
ALPHA = call(text="alpha")
BOTH = (*ALPHA, *call("clock"))


def invoke(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in parameters)
    return f'<atem:invoke name="{name}">\n{body}</atem:invoke>'


def block(*invocations: str) -> str:
    return "<atem:function_calls>\n" + "\n".join(invocations) + "\n</atem:function_calls>"


def to(recipient: str, body: str) -> str:
    return f" to={recipient}<|message|>{body}"


LOOK, CLOCK = block(invoke("look_up", ("text", "alpha"))), block(invoke("clock"))

_CASES = (
    Case("one call", to("look_up", LOOK), calls=ALPHA),
    Case(
        "two arguments",
        to("look_up", block(invoke("look_up", ("text", "alpha"), ("count", "3")))),
        calls=call(text="alpha", count=3),
    ),
    Case("no arguments", to("clock", CLOCK), calls=call("clock")),
    Case("several calls in several messages", f"{to('look_up', LOOK)}{EOM}{ROLE}{to('clock', CLOCK)}", calls=BOTH),
    Case(
        "several calls in one block",
        to("look_up", block(invoke("look_up", ("text", "alpha")), invoke("clock"))),
        calls=BOTH,
    ),
    Case("several blocks in one message", to("look_up", f"{LOOK}\n{CLOCK}"), calls=BOTH),
    Case("a call in a message to the user", to("user", f"One. {LOOK} Two."), "One.  Two.", ALPHA),
    Case("reasoning and an answer", f"{to('self', 'Hm.')}{EOM}{ROLE}{to('user', 'Done.')}", "Done.", (), "Hm."),
    Case(
        "reasoning, an answer and a call",
        f"{to('self', 'Hm.')}{EOM}{ROLE}{to('user', 'I look.')}{EOM}{ROLE}{to('look_up', LOOK)}",
        "I look.",
        ALPHA,
        "Hm.",
    ),
    Case(
        "reasoning twice",
        f"{to('self', 'Hm.')}{EOM}{ROLE}{to('self', 'So.')}{EOM}{ROLE}{to('user', 'Done.')}",
        "Done.",
        (),
        "Hm.\nSo.",
    ),
    Case(
        "a call in closed reasoning is a draft",
        f"{to('self', f'So {LOOK}')}{EOM}{ROLE}{to('user', 'No.')}",
        "No.",
        (),
        f"So {LOOK}",
    ),
    Case(
        "a call in reasoning that never ends",
        to("self", f"So {LOOK}"),
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {LOOK}",
    ),
    Case(
        "a cut call in reasoning",
        to("self", "So <atem:function_calls>\n<atem:inv"),
        "",
        fault(CallFault.IN_REASONING),
        "So <atem:function_calls>\n<atem:inv",
        ended=False,
    ),
    Case("a name with dots", to("mail.send", block(invoke("mail.send"))), calls=call("mail.send")),
    Case("a tool that nobody has", to("fly", block(invoke("fly", ("to", "moon")))), calls=call("fly", to="moon")),
    Case("the recipient is another than the call's", to("clock", LOOK), calls=ALPHA),
    Case("an answer without a recipient", "<|message|>Done.", "Done."),
    Case("an answer without a header", "Done.", "Done."),
    Case("text before a header", "Sure. <|message|>Done.", "Sure.\nDone."),
    Case("text behind the role", f"{to('self', 'Hm.')}{EOM}{ROLE} Done.", "Done.", (), "Hm."),
    Case("text behind the end of a message", f"{to('self', 'Hm.')}{EOM}Done.", "Done.", (), "Hm."),
    Case("a tool's message without a call", to("clock", "now, please"), calls=fault(CallFault.MALFORMED, "clock")),
    Case("JSON for a tool", to("clock", "{}"), calls=fault(CallFault.MALFORMED, "clock")),
    Case("no name", to("clock", block(invoke(""))), calls=fault(CallFault.NO_NAME, "clock")),
    Case(
        "an empty block", to("clock", "<atem:function_calls></atem:function_calls>"), calls=fault(CallFault.MALFORMED)
    ),
    Case("words in a block", to("clock", block("now")), calls=fault(CallFault.MALFORMED)),
    Case(
        "words between parameters",
        to("run", block('<atem:invoke name="run">\nx\n</atem:invoke>')),
        calls=fault(CallFault.MALFORMED, "run"),
    ),
    Case(
        "a parameter that is not closed",
        to("run", block('<atem:invoke name="run">\n<atem:parameter name="code">x\n</atem:invoke>')),
        calls=fault(CallFault.MALFORMED, "run"),
    ),
    Case(
        "a parameter twice",
        to("look_up", block(invoke("look_up", ("count", "1"), ("count", "2")))),
        calls=fault(CallFault.BAD_ARGUMENTS, "look_up"),
    ),
    Case(
        "a good invocation and a bad one",
        to("look_up", block(invoke("look_up", ("text", "alpha")), invoke(""))),
        calls=fault(CallFault.NO_NAME),
    ),
    Case(
        "the closing tag of a parameter in its value",
        to("run", block(invoke("run", ("code", "a</atem:parameter>b")))),
        calls=call("run", code="a</atem:parameter>b"),
    ),
    Case(
        "the closing tag of the invocation in a value",
        to("run", block(invoke("run", ("code", "a</atem:invoke>b")))),
        calls=call("run", code="a</atem:invoke>b"),
    ),
    Case(
        "the closing tag of the block in a value",
        to("run", block(invoke("run", ("code", "a</atem:function_calls>b")))),
        calls=call("run", code="a</atem:function_calls>b"),
    ),
    Case(
        "the end of a call in a value",
        to("run", block(invoke("run", ("code", "a\n</atem:invoke>\n</atem:function_calls>\nb")))),
        calls=call("run", code="a\n</atem:invoke>\n</atem:function_calls>\nb"),
    ),
    Case(
        "the opening tag of the block in a value",
        to("run", block(invoke("run", ("code", "a<atem:function_calls>b")))),
        calls=call("run", code="a<atem:function_calls>b"),
    ),
    Case(
        "all tokens in plain text in a value",
        (
            ' to=run<|message|><atem:function_calls>\n<atem:invoke name="run">\n<atem:parameter name="code">',
            Plain("<|eom|><|start|><|message|><|eot|>"),
            "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
        ),
        calls=call("run", code="<|eom|><|start|><|message|><|eot|>"),
    ),
    Case(
        "another control token in a value",
        to("run", block(invoke("run", ("code", "<|patch|>")))),
        calls=call("run", code="<|patch|>"),
    ),
    Case(
        "two opens and one close",
        to("run", f'<atem:function_calls>\n<atem:invoke name="run">\n{CLOCK}'),
        "",
        (Fault(CallFault.CUT_OFF), *call("clock")),
    ),
    Case("a close without an open", to("user", "Done.</atem:function_calls>"), "Done.</atem:function_calls>"),
    Case(
        "cut off in the header",
        f"{to('self', 'Hm.')}{EOM}{ROLE} to=look",
        "",
        fault(CallFault.CUT_OFF, "look"),
        "Hm.",
        ended=False,
    ),
    Case(
        "cut off in the name",
        to("look_up", '<atem:function_calls>\n<atem:invoke name="loo'),
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case("cut off in a value", to("run", LOOK[:80]), "", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "cut off before the closing tag",
        to("look_up", LOOK.removesuffix("</atem:function_calls>")),
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case(
        "ended without a closing tag",
        to("look_up", LOOK.removesuffix("</atem:function_calls>")),
        "",
        fault(CallFault.CUT_OFF),
    ),
    Case("cut off in reasoning", to("self", "Hm"), "", (), "Hm", ended=False),
    Case("nothing but white space", " \n ", ""),
    Case("only a stop token", "", ""),
)

ATEM = Family(
    "atem",
    "muse_glimmer",
    _CASES + values_of(BARE_VALUES, lambda key, written: to("set_up", block(invoke("set_up", (key, written))))),
    (
        "<|start|>",
        "<|message|>",
        "<|eom|>",
        "assistant",
        "atem",
        "function_calls",
        "invoke",
        "parameter",
        "name",
        "to",
        "self",
        "user",
    ),
)
