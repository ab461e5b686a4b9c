"""The families, and what reads their outputs: chat formats made of templates, with made-up tokenizers."""

from functools import cache

from templates import template, tokenizer_for, tokenizer_of

from completions.atem import ATEM
from completions.case import TOOLS, Case, Family, Plain
from completions.deepseek import DEEPSEEK
from completions.gemma import GEMMA
from completions.glm import GLM
from completions.harmony import HARMONY
from completions.hermes import HERMES
from completions.lfm import LFM
from completions.llama import LLAMA_JSON, LLAMA_PYTHON
from completions.mistral import MISTRAL
from completions.qwen_xml import NEMOTRON, QWEN_XML
from toolgym.agents.chat import ChatFormat
from toolgym.agents.codec import TokenCodec
from toolgym.envs import AssistantMessage, UserMessage

FAMILIES = (
    HERMES, QWEN_XML, NEMOTRON, GLM, LLAMA_JSON, LLAMA_PYTHON, LFM, MISTRAL, DEEPSEEK, HARMONY, GEMMA, ATEM,
)  # fmt: skip
# Like Mistral's own: answers and later turns are not what is tested here.
MISTRAL_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'tool' -%}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls -%}{{ message.content }}
{%- for call in message.tool_calls -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor -%}</s>
{%- else -%}{{ message.content }}</s>
{%- endif -%}
{%- endfor -%}"""


class Reader:
    """A family's chat format with the tokenizer that it was made of."""

    def __init__(self, family: Family) -> None:
        if family.template is None:
            source = MISTRAL_TEMPLATE
            self.tokenizer = tokenizer_for(source, "[ARGS]", "[CALL_ID]", "</s>")
        else:
            source, self.tokenizer = template(family.template), tokenizer_of(family.template)
        self.chat = ChatFormat.for_tokenizer(self.tokenizer, template=source, syntax=family.syntax)
        self.codec = TokenCodec(self.tokenizer, family.name)
        self.prompt = self.chat.open([UserMessage("Hi.")], TOOLS)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def completion(self, case: Case) -> list[int]:
        ids: list[int] = []
        for part in case.parts:
            ids += self.codec.encode_text(part.text) if isinstance(part, Plain) else self.ids(part)
        if case.ended:
            ids.append(self.chat.stop_token_ids[0] if case.stop is None else self.tokenizer.token_to_id(case.stop))
        return ids

    def read(self, case: Case) -> AssistantMessage:
        return self.chat.parse(self.completion(case), self.prompt + self.ids(case.prompt), TOOLS)


@cache
def reader_of(name: str) -> Reader:
    return Reader(next(family for family in FAMILIES if family.name == name))
