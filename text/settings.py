"""Read what files beside a tokenizer say of its use, in all places where transformers does.

tokenizer_config.json     names of tokens (bos_token, eos_token, ...), tokens, chat templates
special_tokens_map.json   names of tokens, of older models
added_tokens.json         tokens, of older models
generation_config.json    ids that begin a text and end it; without it, config.json has them
chat_template.jinja       the chat template, and others in additional_chat_templates/
"""

from operator import itemgetter
from pathlib import Path
from typing import Any

from plumbing.json_files import JsonFile
from plumbing.messages import UserError

# Those that go with a tokenizer into a checkpoint.
SETTINGS = (
    "tokenizer_config.json special_tokens_map.json added_tokens.json generation_config.json "
    "chat_template.jinja"
).split()
# Of a token, in the words of the package `tokenizers`.
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def folder_of(file: Path) -> Path:
    """Return the directory that a tokenizer's file belongs to: Meta's may be in `original`."""
    return file.parent.parent if file.parent.name == "original" else file.parent


def read_settings(directory: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    """Return the object in one of the files; an empty one if there is no such file."""
    return JsonFile(directory / name) if (directory / name).is_file() else {}


def token_names(directory: Path) -> dict[str, str]:
    """Return bos_token, eos_token, ... as text. A special_tokens_map.json is older than, and gives
    way to, a tokenizer_config.json that lists the tokens."""
    settings = read_settings(directory)
    files = [settings]
    if "added_tokens_decoder" not in settings:
        files.append(read_settings(directory, "special_tokens_map.json"))
    names = {}
    for content in files:
        for name, token in content.items():
            if name.endswith("_token") and not name.startswith("add_") and token is not None:
                text = token.get("content") if isinstance(token, dict) else token
                names[name] = content.checked(name, text, str)
    return names


def special_names(directory: Path) -> list[str]:
    """Return the tokens that begin and end a text, and others that files name as special."""
    names = token_names(directory)
    found = [names[name] for name in ("eos_token", "bos_token") if name in names]
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = read_settings(directory, file)
        for name in ("additional_special_tokens", "extra_special_tokens"):
            more = settings.get(name)
            if not more:
                continue
            tokens = [*more.values()] if isinstance(more, dict) else more
            for token in settings.checked(name, tokens, list):
                text = token.get("content") if isinstance(token, dict) else token
                found.append(settings.checked(name, text, str))
    return list(dict.fromkeys(found))


def listed_tokens(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the ids of the tokens that are listed beside a tokenizer.json, which may lack some of
    them, and what AddedToken of the package takes, in order of id."""
    settings = read_settings(directory)
    listed = []
    if "added_tokens_decoder" in settings:
        named = settings.checked("added_tokens_decoder", settings["added_tokens_decoder"], dict)
        for i, token in named.items():
            token = settings.checked(f"token {i:.20}", token, dict)
            content = settings.checked(f"token {i:.20}", token.get("content"), str)
            flags = {name: token[name] for name in FLAGS if name in token}
            if not i.isdecimal() or not all(type(flag) is bool for flag in flags.values()):
                raise UserError(f"{settings.path} is damaged: it lists a token {i:.20}: {token}")
            listed.append((int(i), {"content": content, **flags}))
    else:
        older = read_settings(directory, "added_tokens.json")
        special = special_names(directory)
        for name, i in older.items():
            content = older.checked("a token", name, str)
            is_special = content in special
            flags = {"content": content, "special": is_special, "normalized": not is_special}
            listed.append((older.checked(f"{content:.60}", i, int, above=-1), flags))
    return sorted(listed, key=itemgetter(0))


def named_ids(directory: Path, name: str) -> list[int]:
    """Return the ids that files name as bos_token_id or as eos_token_id."""
    for file in ("generation_config.json", "config.json"):
        ids = read_settings(directory, file).get(name)
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        for i in ids:
            if type(i) is not int:
                raise UserError(f"{directory / file} has the {name} {i!r:.60}: give a number")
        return ids
    return []


def chat_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates in a directory by name; an only one is called "default"."""
    found = {}
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        found["default"] = read_template(jinja)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_template(path)
    if found:
        return found
    said = read_settings(directory).get("chat_template") or {}
    if isinstance(said, list) and all(isinstance(one, dict) for one in said):
        said = {str(one.get("name")): one.get("template") for one in said}
    templates = said if isinstance(said, dict) else {"default": said}
    for template in templates.values():
        if not isinstance(template, str):
            raise UserError(f"{directory} has a chat template that is no text: {template!r:.60}")
    return templates


def read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8: {error}")


def chat_template(directory: Path, chosen: str | None = None) -> str:
    """Return the chat template of a directory: the one `chosen` by its name, or in a file, or the
    default one; an empty text if there is none. Raise UserError where one has to be chosen."""
    templates = chat_templates(directory)
    names = ", ".join(templates)
    if chosen in templates:
        return templates[chosen]
    if chosen and Path(chosen).is_file():
        return read_template(Path(chosen))
    if chosen:
        raise UserError(
            f"--chat-template {chosen} is no file, and {directory} has no template of this name: "
            f"give a file, or one of {names or 'none'}"
        )
    if templates and "default" not in templates:
        raise UserError(
            f"{directory} has chat templates named {names}, and none named default: choose one by "
            f"--chat-template, or copy it to chat_template.jinja"
        )
    return templates.get("default", "")
