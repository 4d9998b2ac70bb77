"""Combine the files of a tokenizer into one tokenizer.json, so that no engine needs transformers to
read texts.

tokenizer.json is a whole tokenizer. But transformers lets tokenizer_config.json, added_tokens.json
and special_tokens_map.json change it, and a model was trained with what they make together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
ADDED_TOKENS_FILE, SPECIAL_TOKENS_FILE = "added_tokens.json", "special_tokens_map.json"
# Not every model has these. An artefact has a copy of those that there are.
OPTIONAL_FILES = (ADDED_TOKENS_FILE, SPECIAL_TOKENS_FILE)

# Classes of transformers, or types of models, that build their tokenizer around the vocabulary of
# tokenizer.json, with these settings, here with their defaults.
_BERT_LIKE = (
    *("bert", "distilbert", "electra", "layoutlm"),
    *("lxmert", "megatron-bert", "mobilebert", "squeezebert"),
)
_BYTE_LEVEL = (
    *("bart", "deberta", "gpt2", "led", "longformer"),
    *("mvp", "roberta", "roberta-prelayernorm"),
)
_DEFAULTS: dict[str, dict[str, Any]] = {
    **{
        kind: {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
        for kind in _BERT_LIKE
    },
    **{kind: {"add_prefix_space": False} for kind in _BYTE_LEVEL},
}
_NORMALIZER_FLAGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Classes that take tokenizer.json as it is, and types of models that never do, whatever class is
# named.
_GENERIC = ("pretrained", "tokenizersbackend", "pythonbackend")
_OWN_CLASS_ALWAYS = (
    *("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_text"),
    *("hyperclovax_vision_v2", "siglip2"),
)
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def combined(
    tokenizer_json: str,
    files: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
) -> str:
    """Return tokenizer.json as the other files change it.

    Args:
        files: the contents of `SETTINGS_FILE` and `OPTIONAL_FILES`, as far as they exist, by name.
        config: the contents of config.json. Its type of model decides if the settings name no
            class.

    Raises:
        ValueError: the files contradict each other; the message names both.
    """
    content = _read(tokenizer_json)
    before = _without_model(content)
    settings = files.get(SETTINGS_FILE, {})
    _set_direction(content, settings)
    config = config or {}
    name = class_of(settings, config)
    kind = _kind(name or config.get("model_type"))
    is_known = kind in _DEFAULTS
    # A type of model alone does not say that transformers made the tokenizer.
    if name and is_known and (found := _other_kind(content, kind)):
        raise _contradiction("the kind of tokenizer", kind, found)
    values = {**_DEFAULTS.get(kind, {}), **settings}
    _set_normalizer(content, values, obeyed=is_known)
    _set_prefix_space(content, values, obeyed=is_known)
    if settings.get("split_special_tokens"):
        what = "special tokens in a text are never split"
        raise _contradiction("split_special_tokens", True, what)
    _add_tokens(content, files, config.get("vocab_size") or 0)
    # What nothing changes stays as it is, to the byte: cached tokens are found by a hash of it.
    if _without_model(content) == before:
        return tokenizer_json
    return json.dumps(content, ensure_ascii=False)


def _read(tokenizer_json: str) -> dict[str, Any]:
    content = json.loads(tokenizer_json)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError(f"{TOKENIZER_FILE} holds no tokenizer")
    return content


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The class of the tokenizer in transformers; empty if the type of model decides."""
    return str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "")


def is_built_by_its_class(
    tokenizer_json: str, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> bool:
    """Whether transformers takes little more than the vocabulary from tokenizer.json, in ways that
    `combined` does not know: XLM-RoBERTa, DeBERTa-v2, ALBERT and many others have classes that
    normalize and split texts in their own way.
    """
    model_type = str(config.get("model_type") or "")
    if not (name := class_of(settings, config)):
        return bool(model_type) and (
            model_type not in _DEFAULTS or bool(_other_kind(json.loads(tokenizer_json), model_type))
        )
    kind = _kind(name)
    if kind in _GENERIC:
        return model_type in _OWN_CLASS_ALWAYS
    alike = next((names for names in (_BERT_LIKE, _BYTE_LEVEL) if kind in names), ())
    return not alike or model_type not in ("", *alike)


def without_unused_tokens(made: str, before: str, num_weights: int) -> str:
    """Drop the tokens that a class adds to every tokenizer, if the model has no weights for them.

    With such a token in a text, transformers makes an id that the model does not have, and fails.
    """
    content = json.loads(made)
    kept = {token["content"] for token in json.loads(before).get("added_tokens") or []}
    # The template of special tokens names those that every text gets, which are needed.
    used = json.dumps(content.get("post_processor"))
    tokens = content.get("added_tokens") or []
    content["added_tokens"] = [
        token
        for token in tokens
        if token["id"] < num_weights
        or token["content"] in kept
        or json.dumps(token["content"]) in used
    ]
    if len(content["added_tokens"]) == len(tokens):
        return made
    return json.dumps(content, ensure_ascii=False)


def _kind(name: Any) -> str:
    return str(name or "").lower().removesuffix("fast").removesuffix("tokenizer")


def _without_model(content: Mapping[str, Any]) -> str:
    """All that may change; the vocabulary is large and stays."""
    return json.dumps({name: part for name, part in content.items() if name != "model"})


def _contradiction(name: str, value: Any, found: str) -> ValueError:
    return ValueError(
        f"{SETTINGS_FILE} and {TOKENIZER_FILE} disagree: {name} is {value!r}, but {found}"
    )


def _set_direction(content: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """On which side long texts are cut; how long they may be is said elsewhere."""
    truncation = content.get("truncation") or {}
    side = settings.get("truncation_side") or str(truncation.get("direction", "right")).lower()
    if side not in ("left", "right"):
        raise ValueError(f"truncation_side {side!r} in {SETTINGS_FILE} must be left or right")
    if truncation or side == "left":
        usual = {"max_length": 512, "strategy": "LongestFirst", "stride": 0}
        content["truncation"] = {**usual, **truncation, "direction": side.capitalize()}


def _other_kind(content: Mapping[str, Any], kind: str) -> str:
    """Some classes split texts in one way only, whatever tokenizer.json says."""
    wanted = ("BertNormalizer", "BertPreTokenizer") if kind in _BERT_LIKE else (None, "ByteLevel")
    for part, name in zip(("normalizer", "pre_tokenizer"), wanted, strict=True):
        if (found := (content.get(part) or {}).get("type")) != name:
            return f"its {part} is {found}, not {name}"
    return ""


def _set_normalizer(content: dict[str, Any], values: Mapping[str, Any], *, obeyed: bool) -> None:
    """Whether texts become lower case, lose accents, and have spaces around Chinese characters."""
    nodes = list(_nodes(content.get("normalizer"), "normalizers"))
    bert = [node for node in nodes if node.get("type") == "BertNormalizer"]
    for name, flag in _NORMALIZER_FLAGS.items():
        if name not in values:
            continue
        value = values[name]
        _check_normalizer_value(name, value)
        if bert and obeyed:
            for node in bert:
                node[flag] = value
        elif found := _found_instead(nodes, bert, name, value):
            raise _contradiction(name, value, found)


def _check_normalizer_value(name: str, value: Any) -> None:
    if not isinstance(value, bool) and not (name == "strip_accents" and value is None):
        raise ValueError(f"{name} {value!r} in {SETTINGS_FILE} must be true or false")


def _found_instead(
    nodes: list[dict[str, Any]], bert: list[dict[str, Any]], name: str, value: bool | None
) -> str:
    """What the normalizers do against this setting; empty if nothing shows a difference."""
    flag = _NORMALIZER_FLAGS[name]
    effects = [_in_effect(node, flag) for node in bert]
    if effects:
        differs = value is not None and effects != [value] * len(effects)
        return f"{flag} of its normalizer is {effects[0]!r}" if differs else ""
    # Normalizers of other kinds only show whether there is one for lower case.
    if name != "do_lower_case" or not nodes:
        return ""
    found = any(node.get("type") == "Lowercase" for node in nodes)
    does = "makes" if found else "does not make"
    return "" if found == value else f"its normalizer {does} lower case"


def _in_effect(node: Mapping[str, Any], flag: str) -> Any:
    # Who makes lower case strips accents too, unless told otherwise.
    return node["lowercase"] if node.get(flag) is None else node[flag]


def _set_prefix_space(content: dict[str, Any], values: Mapping[str, Any], *, obeyed: bool) -> None:
    """Whether a text's first word is read like one after a space."""
    value = values.get("add_prefix_space")
    if value is None:
        return
    if not isinstance(value, bool):
        raise ValueError(f"add_prefix_space {value!r} in {SETTINGS_FILE} must be true or false")
    for node in _nodes(content.get("pre_tokenizer"), "pretokenizers"):
        if node.get("type") == "ByteLevel":
            found = node.get("add_prefix_space")
        elif node.get("type") == "Metaspace":
            found = node.get("prepend_scheme", "always") != "never"
        else:
            continue
        if found != value and not obeyed:
            raise _contradiction(
                "add_prefix_space", value, f"that of its pre-tokenizer is {found!r}"
            )
        node["add_prefix_space"] = value


def _nodes(node: Any, parts: str) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer, or those in its sequence."""
    if isinstance(node, dict):
        yield node
        for part in node.get(parts) or []:
            yield from _nodes(part, parts)


def _add_tokens(
    content: dict[str, Any], files: Mapping[str, Mapping[str, Any]], num_weights: int
) -> None:
    """Tokens that are matched before a text is split; the model has weights for so many."""
    known = {token["content"]: token for token in content.get("added_tokens") or []}
    vocabulary = _vocabulary(content["model"])
    found = _found_tokens(known, vocabulary, files, num_weights)
    if not found:
        return
    ids = {**vocabulary, **{text: token["id"] for text, token in known.items()}}
    taken = {index: text for text, index in vocabulary.items()}
    taken |= {token["id"]: token["content"] for token in known.values()}
    # Ids are compared before anything is added: the tokenizers library would number a token itself
    # and not say that the model was trained with another id for it.
    for file, token in found:
        text, index = token["content"], token["id"]
        other = taken.get(index, text)
        has = ids.get(text, index)
        if other != text or has != index:
            what = f"has the id {index}, not {has if has != index else f'that of {other!r}'}"
            raise ValueError(f"{file} and {TOKENIZER_FILE} disagree: the token {text!r} {what}")
        known[text] = token
        ids[text], taken[index] = index, text
    content["added_tokens"] = sorted(known.values(), key=itemgetter("id"))
    _check_numbers(content["added_tokens"], vocabulary)


def _found_tokens(
    known: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    files: Mapping[str, Mapping[str, Any]],
    num_weights: int,
) -> list[tuple[str, dict[str, Any]]]:
    """The tokens in the other files, each with the name of its file."""
    settings = files.get(SETTINGS_FILE, {})
    named = _special_tokens({**files.get(SPECIAL_TOKENS_FILE, {}), **settings})
    found = [(SETTINGS_FILE, token) for token in _decoder_tokens(settings)]
    seen = {*known, *(token["content"] for _, token in found)}
    for text, index in files.get(ADDED_TOKENS_FILE, {}).items():
        if text not in seen:
            found.append((ADDED_TOKENS_FILE, _token(index, text, is_special=text in named)))
            seen.add(text)
    # Special tokens that are only named get the ids behind all others, one after the other.
    numbered = [*known.values(), *(token for _, token in found)]
    free = max([len(vocabulary) - 1, *map(itemgetter("id"), numbered)]) + 1
    for text in named:
        index = vocabulary.get(text, free)
        # Without a weight for it, no model was trained to read it.
        if text in seen or (index == free and free >= num_weights):
            continue
        free += index == free
        found.append((SETTINGS_FILE, _token(index, text, is_special=True)))
    return found


def _decoder_tokens(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The tokens that the settings list by their ids, with the flags that each has."""
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        token = token if isinstance(token, dict) else {"content": str(token)}
        usual = _token(int(index), token["content"], is_special=bool(token.get("special", False)))
        yield usual | {flag: bool(token[flag]) for flag in _FLAGS if flag in token}


def _token(index: int, text: str, *, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(_FLAGS, False) | {"special": is_special, "normalized": not is_special}
    return {"id": index, "content": text, **flags}


def _check_numbers(tokens: list[dict[str, Any]], vocabulary: Mapping[str, int]) -> None:
    """Whatever id a file gives, the tokenizers library numbers tokens behind the vocabulary."""
    highest = len(vocabulary) - 1
    for token in tokens:
        given = vocabulary.get(token["content"], highest + 1)
        if given != token["id"]:
            what = f"the token {token['content']!r} has the id {token['id']}"
            what += f", and reading the vocabulary gives {given}"
            raise ValueError(f"{SETTINGS_FILE} and {TOKENIZER_FILE} disagree: {what}")
        highest = max(highest, given)


def _special_tokens(settings: Mapping[str, Any]) -> list[str]:
    """The tokens that settings name for a purpose, such as ``cls_token``."""
    named = (
        token.get("content") if isinstance(token, dict) else token
        for token in _named_tokens(settings)
    )
    return list(dict.fromkeys(text for text in named if isinstance(text, str) and text))


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in settings.items():
        # Such as add_bos_token, which says whether a text begins with it.
        if key.endswith("_token") and not key.startswith("add_"):
            yield value
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key) or []
        yield from more.values() if isinstance(more, dict) else more


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    found = model.get("vocab")
    if isinstance(found, list):  # Unigram: pieces with their scores
        return {piece[0]: index for index, piece in enumerate(found)}
    return found or {}
