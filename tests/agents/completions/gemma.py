"""Gemma 4's calls: keys without quotes, and texts between two tokens that quote."""

from completions.case import Case, Family, Fault, Plain, Value, call, fault, values_of
from completions.values import BOTTOMLESS, DEEP, HUGE
from toolgym.envs import CallFault

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THINK, THOUGHT = "<|channel>thought\n", "\n<channel|>"
BAD_ARGUMENTS, MALFORMED = CallFault.BAD_ARGUMENTS, CallFault.MALFORMED
ALPHA = call(text="alpha")
BOTH = (*ALPHA, *call("clock"))


def quoted(text: str) -> str:
    return f"{QUOTE}{text}{QUOTE}"


def block(name: str, arguments: str = "") -> str:
    return f"{OPEN}call:{name}{{{arguments}}}{CLOSE}"


LOOK, CLOCK = block("look_up", f"text:{quoted('alpha')}"), block("clock")

_VALUES = (
    Value("unicode and emoji", quoted("Zürich 🚀 東京"), "Zürich 🚀 東京"),
    Value("digits in quotes stay text", quoted("75001"), "75001"),
    Value("ordinary quotes in a text", quoted('say "it\'s"'), 'say "it\'s"'),
    Value("backslashes are themselves", quoted(r"a\n\"b"), r"a\n\"b"),
    Value("white space and newlines of a text", quoted("  x\n\n"), "  x\n\n"),
    Value("braces and commas in a text", quoted("},{a:1}]"), "},{a:1}]"),
    Value("an empty text", quoted(""), ""),
    Value("an integer", "-3", -3),
    Value("a fraction", "1.5", 1.5),
    Value("a number with an exponent", "1e-05", 1e-5),
    Value("booleans and nulls", "[true,false,null,None]", [True, False, None, None]),
    Value("nested values", f"{{a:[1,{{b:{quoted('c')}}}],d:{{}}}}", {"a": [1, {"b": "c"}], "d": {}}),
    Value("quoted keys", f"{{{QUOTE}a b{QUOTE}:1}}", {"a b": 1}),
    Value("white space between all parts", "[ 1 , 2 ]", [1, 2]),
    Value("a text in ordinary quotes", '"alpha"', MALFORMED),
    Value("a bare word", "alpha", MALFORMED),
    Value("NaN", "NaN", MALFORMED),
    Value("an integer of 5,000 digits", HUGE, MALFORMED),
    Value("nested 70 deep", DEEP, MALFORMED),
    Value("a number beyond all floats", "1e999", BAD_ARGUMENTS),
    Value("a key twice in a mapping", "{a:1,a:2}", BAD_ARGUMENTS),
)

_CASES = (
    Case("one call", LOOK, calls=ALPHA),
    Case("two arguments", block("look_up", f"count:3,text:{quoted('alpha')}"), calls=call(text="alpha", count=3)),
    Case("no arguments", CLOCK, calls=call("clock")),
    Case("several calls", LOOK + CLOCK, calls=BOTH),
    Case("text before, between and after calls", f"One. {LOOK} Two. {CLOCK} Three.", "One.  Two.  Three.", BOTH),
    Case("a call that ends where the answer begins", LOOK, calls=ALPHA, stop="<|tool_response>"),
    Case("white space around the call", f"{OPEN} call:clock{{ }} {CLOSE}", calls=call("clock")),
    Case("a tool that nobody has", block("fly", f"to:{quoted('moon')}"), calls=call("fly", to="moon")),
    Case("reasoning, text and a call", f"{THINK}Hm.{THOUGHT}Yes.{LOOK}", "Yes.", ALPHA, "Hm."),
    Case("reasoning that is empty", f"{THINK}<channel|>{LOOK}", "", ALPHA),
    Case("a call in closed reasoning is a draft", f"{THINK}So {LOOK}{THOUGHT}No.", "No.", (), f"So {LOOK}"),
    Case(
        "a call in reasoning that never ends",
        f"{THINK}So {LOOK}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {LOOK}",
    ),
    Case(
        "a call in reasoning that the prompt opened",
        f"So {LOOK}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {LOOK}",
        prompt=THINK,
    ),
    Case("no call: before the name", f"{OPEN}clock{{}}{CLOSE}", calls=fault(MALFORMED)),
    Case("no name", f"{OPEN}call:{{}}{CLOSE}", calls=fault(CallFault.NO_NAME)),
    Case("no braces", f"{OPEN}call:clock{CLOSE}", calls=fault(CallFault.CUT_OFF, "clock")),
    Case("parentheses instead of braces", f"{OPEN}call:clock(){CLOSE}", calls=fault(MALFORMED, "clock")),
    Case("a list instead of braces", f"{OPEN}call:clock[1]{CLOSE}", calls=fault(MALFORMED, "clock")),
    Case("an empty block", OPEN + CLOSE, calls=fault(CallFault.CUT_OFF)),
    Case("words in a block", f"{OPEN}look up alpha{CLOSE}", calls=fault(MALFORMED)),
    Case("words behind the braces", f"{OPEN}call:clock{{}} please{CLOSE}", calls=fault(MALFORMED, "clock")),
    Case("an argument twice", block("look_up", "count:1,count:2"), calls=fault(BAD_ARGUMENTS, "look_up")),
    Case("a key without a value", block("look_up", "count"), calls=fault(MALFORMED, "look_up")),
    Case(
        "a text that is not closed",
        f"{OPEN}call:look_up{{text:{QUOTE}alpha}}{CLOSE}",
        calls=fault(CallFault.CUT_OFF, "look_up"),
    ),
    Case(
        "the closing token in a text",
        block("run", f"code:{quoted(f'a{CLOSE}b')}"),
        calls=call("run", code=f"a{CLOSE}b"),
    ),
    Case(
        "the closing token behind a brace in a text",
        block("run", f"code:{quoted(f'{{}}{CLOSE}b')}"),
        calls=call("run", code=f"{{}}{CLOSE}b"),
    ),
    Case(
        "the opening token in a text", block("run", f"code:{quoted(f'a{OPEN}b')}"), calls=call("run", code=f"a{OPEN}b")
    ),
    Case("a whole call in a text", block("run", f"code:{quoted(CLOCK)}"), calls=call("run", code=CLOCK)),
    Case(
        "all tokens in plain text in a text",
        (f"{OPEN}call:run{{code:{QUOTE}", Plain(f"{QUOTE}}}{CLOSE}{OPEN}"), f"{QUOTE}}}{CLOSE}"),
        calls=call("run", code=f"{QUOTE}}}{CLOSE}{OPEN}"),
    ),
    Case(
        "the tokens of reasoning in a text",
        block("run", f"code:{quoted('<|channel>thought<channel|>')}"),
        calls=call("run", code="<|channel>thought<channel|>"),
    ),
    Case("the tokens in plain text are no tokens", (Plain(LOOK),), LOOK),
    Case(
        "two opens and one close", f"{OPEN}call:look_up{{text:{QUOTE}al{LOOK}", "", (Fault(CallFault.CUT_OFF), *ALPHA)
    ),
    Case("a close without an open", f"Done.{CLOSE}", f"Done.{CLOSE}"),
    Case("a quote without a call", f"Say {QUOTE}a{QUOTE}.", f"Say {QUOTE}a{QUOTE}."),
    Case("cut off in the name", f"Yes.{OPEN}call:loo", "Yes.", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off in a text", f"{OPEN}call:look_up{{text:{QUOTE}al", "", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off before the closing token", LOOK.removesuffix(CLOSE), "", fault(CallFault.CUT_OFF), ended=False),
    Case("ended without a closing token", LOOK.removesuffix(CLOSE), "", fault(CallFault.CUT_OFF)),
    Case("nothing but white space", " \n ", ""),
    Case("only a stop token", "", ""),
)

GEMMA = Family(
    "gemma",
    "gemma4",
    _CASES
    + values_of(_VALUES, lambda key, written: block("set_up", f"{key}:{written}"))
    + (Case("nested 20,000 deep", block("run", f"x:{BOTTOMLESS}"), calls=fault(MALFORMED)),),
    (OPEN, CLOSE, QUOTE, "<|channel>", "<channel|>", "thought", "call"),
)
