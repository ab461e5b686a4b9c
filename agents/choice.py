"""Which chat format a tokenizer or a model folder gets."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from toolgym.agents.chat import ChatFormat, TemplateWarning, read_json
from toolgym.agents.probes import TOOLS_NOT_SHOWN
from toolgym.agents.renderer_chat import RendererChatFormat, known_family
from toolgym.agents.template import ChatTemplate, choose_template, read_template
from toolgym.agents.template_chat import TemplateChatFormat
from toolgym.envs.errors import ConfigurationError

# Families for folders without a template, by their config's model type.
_FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "gpt_oss": "gpt-oss"}
# What a template reads beside its options.
_RESERVED = {"messages", "tools", "add_generation_prompt", "documents"}
_GIVEN = {"raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"}


def format_of_folder(folder: Path, *, family: str | None, syntax: str | None, options: Mapping[str, Any]) -> ChatFormat:
    """See `load_chat_format`."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    config = read_json(folder / "config.json")
    special = _special_tokens(folder)
    stops = [tokenizer.token_to_id(special["eos_token"])] if "eos_token" in special else []
    if (folder / "generation_config.json").is_file():
        found = read_json(folder / "generation_config.json").get("eos_token_id")
        stops += list(found) if isinstance(found, list) else [] if found is None else [found]
    template = read_template(folder)
    if template is None and family is None:
        family = _FAMILIES.get(str(config.get("model_type")))
        if family is None:
            raise ConfigurationError(
                f"{folder} has no chat template, and no chat format is known for model type "
                f"{config.get('model_type')!r}: put its chat_template.jinja there, or name a family"
            )
        said = f"{folder} has no chat template: by its model type it gets the format of renderers' {family}"
        warnings.warn(said, TemplateWarning, stacklevel=3)
    return _choose(
        tokenizer,
        template,
        name=folder.name,
        hub_name=str(config.get("_name_or_path", "")),
        family=family,
        syntax=syntax,
        stops=[stop for stop in stops if stop is not None],
        variables=special,
        options=options,
    )


def format_of_tokenizer(
    tokenizer: Any,
    *,
    template: str | None,
    family: str | None,
    syntax: str | None,
    stops: Sequence[int],
    options: Mapping[str, Any],
) -> ChatFormat:
    """See `ChatFormat.for_tokenizer`."""
    if isinstance(tokenizer, tokenizers.Tokenizer):
        special, name, own = {}, "the tokenizer", None
        fast: Any = tokenizer
    else:
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(fast, tokenizers.Tokenizer):
            raise ConfigurationError(f"expected a fast tokenizer, actual {type(tokenizer).__name__}")
        special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        name, own = str(tokenizer.name_or_path or "the tokenizer"), tokenizer.chat_template
        if tokenizer.eos_token_id is not None:
            stops = [*(stops if isinstance(stops, Sequence) else [stops]), int(tokenizer.eos_token_id)]
    if template is None and own is not None:
        template = choose_template(own, name)
    if template is None and family is None:
        raise ConfigurationError(f"{name} has no chat template: give one, or name a family of the renderers library")
    return _choose(
        fast,
        template,
        name=Path(name).name,
        hub_name=name,
        family=family,
        syntax=syntax,
        stops=stops,
        variables=special,
        options=options,
    )


def _choose(
    tokenizer: tokenizers.Tokenizer,
    template: str | None,
    *,
    name: str,
    hub_name: str,
    family: str | None,
    syntax: str | None,
    stops: Sequence[int],
    variables: Mapping[str, Any],
    options: Mapping[str, Any],
) -> ChatFormat:
    for what, given in (("family", family), ("syntax", syntax)):
        if given is not None and not isinstance(given, str):
            raise ConfigurationError(f"expected the {what} as text, actual {given!r:.60}")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ConfigurationError(f"expected options by name, actual {options!r:.60}")
    if family is not None and syntax is not None:
        raise ConfigurationError(f"family {family!r} has its own syntax of calls: give a family or a syntax")
    _check_stops(tokenizer, stops, name)
    if template is None:
        assert family is not None  # whoever calls has seen to one of them
        return RendererChatFormat(tokenizer, family, stops=stops, name=name, options=options)
    if reserved := sorted(set(options) & _RESERVED):
        raise ConfigurationError(f"{reserved[0]!r} is no option of a chat template: it is what it renders")
    reads = ChatTemplate(template, {}, name).reads
    unknown = sorted(option for option in set(options) - reads if not option.endswith("_token"))
    if unknown and family is None:
        offered = ", ".join(sorted(reads - _RESERVED - _GIVEN)) or "none"
        raise ConfigurationError(f"the chat template of {name} reads no {unknown[0]!r}; its options: {offered}")
    generic = TemplateChatFormat(
        tokenizer, template, variables={**variables, **options}, stops=stops, syntax=syntax, name=name
    )
    if generic.certificate is not None and TOOLS_NOT_SHOWN in generic.certificate["P8"].notes:
        warnings.warn(f"{name}: {TOOLS_NOT_SHOWN}", TemplateWarning, stacklevel=4)
    if family is not None:
        return RendererChatFormat(tokenizer, family, stops=stops, reference=generic, name=name, options=options)
    known = known_family(hub_name) if syntax is None else None
    if known is not None:
        # The name alone proves nothing: what does not fit, or refuses something, is not taken.
        with contextlib.suppress(ConfigurationError):
            found = RendererChatFormat(tokenizer, known, stops=stops, reference=generic, name=name, options=options)
            if found.certificate is not None and not found.certificate.refused:
                return found
    return generic


def _check_stops(tokenizer: tokenizers.Tokenizer, stops: Sequence[Any], name: str) -> None:
    if isinstance(stops, str) or not isinstance(stops, Sequence):
        raise ConfigurationError(f"expected stop_token_ids as a list of ids, actual {stops!r:.60}")
    for stop in stops:
        known = isinstance(stop, int) and not isinstance(stop, bool) and 0 <= stop < 2**31
        if not known or tokenizer.id_to_token(stop) is None:
            raise ConfigurationError(f"{stop!r}, which is to end turns, is no token of {name}")


def _special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by name, as templates read them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        for key, value in read_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found
