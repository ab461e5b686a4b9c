"""DeepSeek's calls: V3 writes a type, a name and fenced JSON, V3.1 a name and bare JSON."""

from completions.case import Case, Family, Fault, Plain, arguments_of, call, fault
from completions.values import JSON_ARGUMENTS
from toolgym.envs import CallFault

BEGINS, ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CLOSED = "\n</think>\n\n"
ALPHA = call(text="alpha")
BOTH = (*ALPHA, *call("clock"))


def fenced(name: str, arguments: str) -> str:
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def bare(name: str, arguments: str) -> str:
    return f"{BEGIN}{name}{SEP}{arguments}{END}"


def framed(*calls: str) -> str:
    return f"{BEGINS}{''.join(calls)}{ENDS}"


LOOK, CLOCK = fenced("look_up", '{"text": "alpha"}'), fenced("clock", "{}")
BARE_LOOK, BARE_CLOCK = bare("look_up", '{"text": "alpha"}'), bare("clock", "{}")

_CASES = (
    Case("one fenced call", framed(LOOK), calls=ALPHA),
    Case("one bare call", framed(BARE_LOOK), calls=ALPHA),
    Case(
        "a fence that names no language", framed(f"{BEGIN}function{SEP}clock\n```\n{{}}\n```{END}"), calls=call("clock")
    ),
    Case("several fenced calls", framed(LOOK, "\n", CLOCK), calls=BOTH),
    Case("several bare calls", framed(BARE_LOOK, BARE_CLOCK), calls=BOTH),
    Case(
        "text before, between and after calls",
        f"One. {BEGINS}{LOOK} Two. {CLOCK}{ENDS} Three.",
        "One.  Two.  Three.",
        BOTH,
    ),
    Case("calls without their frame", LOOK + BARE_CLOCK, calls=BOTH),
    Case("two frames", f"{framed(LOOK)}{framed(CLOCK)}", calls=BOTH),
    Case("a tool that nobody has", framed(bare("fly", '{"to": "moon"}')), calls=call("fly", to="moon")),
    Case(
        "reasoning, text and a call", f"Hm.\n</think>\n\nYes.{framed(LOOK)}", "Yes.", ALPHA, "Hm.", prompt="<think>\n"
    ),
    Case("a call in closed reasoning is a draft", f"So {LOOK}</think>No.", "No.", (), f"So {LOOK}", prompt="<think>\n"),
    Case(
        "a call in reasoning that never ends",
        f"So {framed(LOOK)}",
        "",
        fault(CallFault.IN_REASONING, "look_up"),
        f"So {framed(LOOK)}",
        prompt="<think>\n",
    ),
    Case("no separator", framed(f"{BEGIN}clock{{}}{END}"), calls=fault(CallFault.NO_NAME)),
    Case("no name in a fenced call", framed(fenced("", "{}")), calls=fault(CallFault.NO_NAME)),
    Case("no name in a bare call", framed(bare("", "{}")), calls=fault(CallFault.NO_NAME)),
    Case("no arguments", framed(bare("clock", "")), calls=fault(CallFault.BAD_JSON, "clock")),
    Case("an empty call", framed(BEGIN + END), calls=fault(CallFault.NO_NAME)),
    Case("a frame with nothing in it", framed(), calls=fault(CallFault.MALFORMED)),
    Case("a frame with words in it", framed("look up alpha"), calls=fault(CallFault.MALFORMED)),
    Case("a frame that is cut before its call", f"Yes.{BEGINS}", "Yes.", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "the closing token in an argument",
        framed(bare("run", f'{{"code": "a{END}b"}}')),
        calls=call("run", code=f"a{END}b"),
    ),
    Case(
        "the closing token in a fenced argument",
        framed(fenced("run", f'{{"code": "a{END}b"}}')),
        calls=call("run", code=f"a{END}b"),
    ),
    Case(
        "the opening token in an argument",
        framed(bare("run", f'{{"code": "a{BEGIN}b"}}')),
        calls=call("run", code=f"a{BEGIN}b"),
    ),
    Case(
        "the tokens of the frame in an argument",
        framed(bare("run", f'{{"code": "{BEGINS}a{ENDS}"}}')),
        calls=call("run", code=f"{BEGINS}a{ENDS}"),
    ),
    Case(
        "the separator in an argument",
        framed(bare("run", f'{{"code": "a{SEP}b"}}')),
        calls=call("run", code=f"a{SEP}b"),
    ),
    Case(
        "a fence in an argument",
        framed(fenced("run", r'{"code": "```json\n{}\n```"}')),
        calls=call("run", code="```json\n{}\n```"),
    ),
    Case(
        "all tokens in plain text in an argument",
        (f'{BEGINS}{BEGIN}run{SEP}{{"code": "', Plain(framed(BARE_CLOCK)), f'"}}{END}{ENDS}'),
        calls=call("run", code=framed(BARE_CLOCK)),
    ),
    Case("the tokens in plain text are no tokens", (Plain(framed(BARE_LOOK)),), framed(BARE_LOOK)),
    Case(
        "words behind a fence",
        framed(f"{BEGIN}function{SEP}clock\n```json\n{{}}\n```\nplease{END}"),
        calls=fault(CallFault.BAD_JSON),
    ),
    Case(
        "a fence that is not closed",
        framed(f"{BEGIN}function{SEP}clock\n```json\n{{}}{END}"),
        calls=fault(CallFault.BAD_JSON),
    ),
    Case(
        "two opens and one close",
        f"{BEGINS}{BEGIN}look_up{SEP}{{{BARE_CLOCK}{ENDS}",
        "",
        (Fault(CallFault.CUT_OFF), *call("clock")),
    ),
    Case("a close without an open", f"Done.{END}", f"Done.{END}"),
    Case(
        "a good call and a bad one",
        framed(BARE_LOOK, bare("clock", "{")),
        calls=(*ALPHA, Fault(CallFault.BAD_JSON, "clock")),
    ),
    Case("cut off in the name", f"{BEGINS}{BEGIN}loo", "", fault(CallFault.CUT_OFF), ended=False),
    Case("cut off in the arguments", f'{BEGINS}{BEGIN}look_up{SEP}{{"te', "", fault(CallFault.CUT_OFF), ended=False),
    Case(
        "cut off before the closing token",
        f"{BEGINS}{BARE_LOOK.removesuffix(END)}",
        "",
        fault(CallFault.CUT_OFF),
        ended=False,
    ),
    Case("cut off before the frame is closed", f"{BEGINS}{BARE_LOOK}", "", ALPHA, ended=False),
    Case(
        "a good call and a cut one",
        f"{BEGINS}{BARE_CLOCK}{BEGIN}loo",
        "",
        (*call("clock"), Fault(CallFault.CUT_OFF)),
        ended=False,
    ),
    Case("nothing but white space", " \n ", ""),
    Case("only a stop token", "", ""),
)

_ALL = (
    _CASES
    + arguments_of(JSON_ARGUMENTS, lambda written: framed(bare("look_up", written)), named=True)
    + arguments_of(JSON_ARGUMENTS[::3], lambda written: framed(fenced("look_up", written)), named=True, form=", fenced")
)
DEEPSEEK = Family(
    "deepseek",
    "deepseekv3",
    tuple(Case(c.name, c.said, c.content, c.calls, c.reasoning, c.ended, "" if c.prompt else CLOSED) for c in _ALL),
    (BEGINS, ENDS, BEGIN, END, SEP, "<think>", "</think>", "function", "json"),
)
