"""gpt-oss' turns: messages with headers that name a channel and a recipient. The prompt ends with the first's role."""

from completions.case import Case, Family, Fault, Plain, arguments_of, call, fault
from completions.values import JSON_ARGUMENTS
from toolgym.envs import CallFault

ROLE = "<|start|>assistant"
CALL, RETURN = "<|call|>", "<|return|>"
ALPHA = call(text="alpha")


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|>"


def commentary(name: str, arguments: str) -> str:
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}"


LOOK, CLOCK = commentary("look_up", '{"text": "alpha"}'), commentary("clock", "{}")
FINAL = "<|channel|>final<|message|>Done."

_CASES = (
    Case("one call", LOOK, calls=ALPHA, stop=CALL),
    Case(
        "the recipient behind the channel",
        '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"text": "alpha"}',
        calls=ALPHA,
        stop=CALL,
    ),
    Case("reasoning and a call", f"{analysis('Hm.')}{ROLE}{LOOK}", "", ALPHA, "Hm.", stop=CALL),
    Case("reasoning and an answer", f"{analysis('Hm.')}{ROLE}{FINAL}", "Done.", (), "Hm.", stop=RETURN),
    Case("only an answer", FINAL, "Done.", stop=RETURN),
    Case("an answer without a channel", "<|message|>Done.", "Done.", stop=RETURN),
    Case("an answer without a header", "Done.", "Done.", stop=RETURN),
    Case(
        "a preamble before a call",
        f"<|channel|>commentary<|message|>I look.<|end|>{ROLE}{LOOK}",
        "I look.",
        ALPHA,
        stop=CALL,
    ),
    Case(
        "reasoning, a preamble and a call",
        f"{analysis('Hm.')}{ROLE}<|channel|>commentary<|message|>I look.<|end|>{ROLE}{LOOK}",
        "I look.",
        ALPHA,
        "Hm.",
        stop=CALL,
    ),
    Case(
        "reasoning twice",
        f"{analysis('Hm.')}{ROLE}{analysis('So.')}{ROLE}{FINAL}",
        "Done.",
        (),
        "Hm.\nSo.",
        stop=RETURN,
    ),
    Case("two calls with an end between", f"{LOOK}<|end|>{ROLE}{CLOCK}", "", (*ALPHA, *call("clock")), stop=CALL),
    Case(
        "a call addressed from the analysis channel",
        ' to=functions.look_up<|channel|>analysis json<|message|>{"text": "alpha"}',
        calls=ALPHA,
        stop=CALL,
    ),
    Case("a call that ends with the stop token of answers", LOOK, "", ALPHA, stop=RETURN),
    Case(
        "a call described in reasoning is a draft",
        f"{analysis('I call ' + CLOCK.partition('<')[0])}{ROLE}{FINAL}",
        "Done.",
        (),
        "I call  to=functions.clock",
        stop=RETURN,
    ),
    Case(
        "a tool that is no function",
        ' to=browser.search<|channel|>analysis<|message|>{"query": "x"}',
        calls=call("browser.search", query="x"),
        stop=CALL,
    ),
    Case("a tool that nobody has", commentary("fly", '{"to": "moon"}'), calls=call("fly", to="moon"), stop=CALL),
    Case("no arguments at all", commentary("clock", ""), calls=call("clock"), stop=CALL),
    Case("no name", commentary("", "{}"), calls=fault(CallFault.NO_NAME), stop=CALL),
    Case(
        "code instead of JSON",
        " to=python<|channel|>analysis code<|message|>print(1)",
        calls=fault(CallFault.BAD_JSON, "python"),
        stop=CALL,
    ),
    Case(
        "all tokens in plain text in an argument",
        (' to=functions.run<|channel|>commentary json<|message|>{"code": "', Plain("<|call|><|end|><|start|>"), '"}'),
        calls=call("run", code="<|call|><|end|><|start|>"),
        stop=CALL,
    ),
    Case(
        "the token of messages as a control token in an argument",
        commentary("run", '{"code": "a<|message|>b"}'),
        calls=call("run", code="a<|message|>b"),
        stop=CALL,
    ),
    Case(
        "another control token in an argument",
        commentary("run", '{"code": "<|endoftext|>"}'),
        calls=call("run", code="<|endoftext|>"),
        stop=CALL,
    ),
    Case("the tokens in plain text are no tokens", (Plain(LOOK),), LOOK.strip(), stop=RETURN),
    Case("text before the header", "Sure.<|channel|>final<|message|>Done.", "Sure.\nDone.", stop=RETURN),
    Case("text behind an end", f"{analysis('Hm.')}Done.", "Done.", (), "Hm.", stop=RETURN),
    Case("text behind the role", f"{analysis('Hm.')}{ROLE} Done.", "Done.", (), "Hm.", stop=RETURN),
    Case("an unknown channel", "<|channel|>aside<|message|>Done.", "Done.", stop=RETURN),
    Case("two ends", f"{analysis('Hm.')}<|end|>{ROLE}{FINAL}", "<|end|>\nDone.", (), "Hm.", stop=RETURN),
    Case(
        "a start without an end before it",
        f"<|channel|>analysis<|message|>Hm.{ROLE}{FINAL}",
        "Done.",
        (),
        "Hm.",
        stop=RETURN,
    ),
    Case(
        "a channel without a start before it",
        f"<|channel|>analysis<|message|>Hm.{FINAL}",
        "Done.",
        (),
        "Hm.",
        stop=RETURN,
    ),
    Case(
        "a call in reasoning that never ends",
        f"<|channel|>analysis<|message|>Hm.<|channel|>commentary{CLOCK}".replace(
            "commentary to=functions.clock<|channel|>commentary", "commentary to=functions.clock"
        ),
        "",
        fault(CallFault.IN_REASONING, "clock"),
        "Hm.",
        stop=CALL,
    ),
    Case("cut off in reasoning", "<|channel|>analysis<|message|>Hm", "", (), "Hm", ended=False),
    Case("ended in reasoning", "<|channel|>analysis<|message|>Hm", "", (), "Hm", stop=RETURN),
    Case("cut off in the header", f"{analysis('Hm.')}{ROLE}<|channel|>fin", "", (), "Hm.", ended=False),
    Case(
        "cut off in the header of a call",
        f"{analysis('Hm.')}{ROLE} to=functions.look",
        "",
        fault(CallFault.CUT_OFF, "look"),
        "Hm.",
        ended=False,
    ),
    Case(
        "cut off in the arguments",
        ' to=functions.look_up<|channel|>commentary json<|message|>{"te',
        "",
        fault(CallFault.CUT_OFF, "look_up"),
        ended=False,
    ),
    Case("cut off before the stop token of a call", LOOK, "", fault(CallFault.CUT_OFF, "look_up"), ended=False),
    Case(
        "a good call and a cut one",
        f"{CLOCK}<|end|>{ROLE}{LOOK}"[:-4],
        "",
        (*call("clock"), Fault(CallFault.CUT_OFF)),
        ended=False,
    ),
    Case("an answer that was cut", "<|channel|>final<|message|>Do", "Do", ended=False),
    Case("an answer in JSON", '<|channel|>final<|message|>{"answer": 4}', '{"answer": 4}', stop=RETURN),
    Case("nothing but white space", " \n ", "", stop=RETURN),
    Case("only a stop token", "", "", stop=RETURN),
)

HARMONY = Family(
    "harmony",
    "gptoss",
    _CASES + arguments_of(JSON_ARGUMENTS, lambda written: commentary("look_up", written), named=True),
    (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "assistant",
        "analysis",
        "commentary",
        "final",
        "fin",
        "aside",
        "json",
        "functions",
        "to",
    ),
)
