"""Which syntax a model speaks: found by reading back what its own template has written."""

from collections.abc import Callable

from toolgym.agents.calls.channels import AtemGrammar, HarmonyGrammar
from toolgym.agents.calls.deepseek_calls import DeepSeekCalls
from toolgym.agents.calls.json_calls import HermesCalls, MistralCalls
from toolgym.agents.calls.literal_calls import GemmaCalls, LfmCalls
from toolgym.agents.calls.llama_calls import LlamaCalls, PythonCalls
from toolgym.agents.calls.syntax import CallSyntax, Mark
from toolgym.agents.calls.tagged_calls import GlmCalls, XmlCalls

# How formats set reasoning off.
REASONING_TAGS = (
    ("<|channel>thought\n", "<channel|>"),
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
# From those that are told by their markers to those that are bare text.
SYNTAXES: dict[str, Callable[[Mark], CallSyntax]] = {
    made.name: made
    for made in (
        GemmaCalls,
        DeepSeekCalls,
        MistralCalls,
        XmlCalls,
        GlmCalls,
        HermesCalls,
        LfmCalls,
        LlamaCalls,
        PythonCalls,
    )
}


def scaffold() -> list[str]:
    """All literals that some format writes in a turn of the model's: tokens of these texts are control tokens."""
    written = [tag for pair in REASONING_TAGS for tag in pair]
    written += [*HarmonyGrammar(str).markers, *AtemGrammar(str).markers]
    for make in SYNTAXES.values():
        written += make(str).markers
    return written
