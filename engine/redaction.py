"""Secrets and sizes in what the engine says: which names hold a secret, where one lies in a text, how a value is shown.

Called by `errors.py` for every `ConfigError`, and by `config.secrets`, which refuses what is found here. It must never
return a secret, nor build a text that is much longer than what is shown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

HIDDEN = "***"
LONGEST = 200
"""Characters of a value in a message."""
_SEARCHED = 20 * LONGEST
_BEGINNING = 40
_DEEPEST = 8
"""Levels of nested values in a message."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRETS: tuple[str, ...] = ("password", "passwd", "pwd", "passphrase", "secret", "credential", "authorization")
_SECRETS += ("bearer", "apikey")
_SECRETS += ("passwords", "secrets", "credentials", "apikeys", "accesskey", "secretkey", "privatekey")
_KEYS = {"api", "access", "private", "secret", "auth", "account", "encryption", "signing", "license", "master", "ssh"}
_KEYS |= {"session", "client", "service", "openai", "anthropic", "wandb", "hf", "azure", "google"}
"""Words that make `key` a secret one."""
_PASSES = {"db", "database", "user", "admin", "proxy", "smtp", "ftp", "mysql", "postgres", "pg", "redis", ""}
"""Words that make `pass` a password."""
_SPECIAL_TOKENS = {"bos", "eos", "pad", "unk", "stop", "start", "end", "mask", "sep", "cls", "image", "video", "audio"}
_SPECIAL_TOKENS |= {"special", "think", "reasoning", "per", "each", "next", "first", "last", "max", "min", "a", "the"}
"""Words that make `token` one of a model's, not of an account."""
_UNSHOWN_FIELDS = ("rollout.api_key_env",)
"""Fields in whose place a user may have put the secret itself."""
_ADDRESS_FIELDS = {"uri", "url", "urls", "proxy", "proxies", "address", "endpoint", "dsn"}

_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-(?=[\w-]{0,200}\d)[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,2000}\.eyJ[\w-]{8,}[\w.-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""What the keys of known services look like."""
_ADDRESS = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_USER_INFO = re.compile(r"(?<![^\s=\"'])[^\s/:@=\"']{1,200}:[^\s/@]{1,500}@[\w.\[\]:-]+")
"""`user:password@host` without a scheme."""
_GIVEN = re.compile(
    r"(?<![\w.-])([\w.-]+)[\"']?\s*[=:](?=\s*(?:(?:bearer|basic|token)\s+)?[\"']?([^\s\"',;&}\])]+))", re.IGNORECASE
)
"""`name=value`, `name: value` and `"name": "value"`; a value may be another such pair."""
_BEARER = re.compile(r"\b(bearer)\s+([^\s\"']{6,})", re.IGNORECASE)
_REFERENCE = re.compile(r"\$(\w+|\{\w+[^}]*\}?|\(.*)|<[\w -]+>|\*{3}|none|null|true|false", re.IGNORECASE)
"""A value that only names a secret, or that says there is none."""
_NAME_AND_PASSWORD = re.compile(r"[^\s:$/]+:(?!\d+$)[^\s$]+")
"""What curl takes as `--user`."""
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")


def is_secret_name(name: str) -> bool:
    """Whether a field, parameter, variable, header or option of this name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name[-LONGEST:])]
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return False
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    if last.endswith("token"):
        return (last.removesuffix("token") or before) not in _SPECIAL_TOKENS
    if last == "pass":
        return before in _PASSES
    return last.endswith(_SECRETS) or (last in ("key", "keys") and before in _KEYS)


def secret_in_text(text: str, field: str = "") -> str:
    """What a text holds that is a secret, in words; nothing where it holds none. `field`: where the text stands."""
    if _TOKEN.search(text):
        return "a key of a known form"
    for address in _ADDRESS.findall(text):
        if what := _secret_in_address(address):
            return f"an address with {what} in it"
    name = (_WORDS.findall(field.lower()) or [""])[-1]
    if name in _ADDRESS_FIELDS and _USER_INFO.search(text):
        return "an address with a user or password in it"
    return ""


def secret_in_command(words: Sequence[Any]) -> str:
    """Where a command line, as its words, holds a secret: the name of the option, variable or header; else nothing."""
    option = ""
    for word in (piece for given in words if isinstance(given, str) for piece in [given, *_pieces(given)]):
        if is_secret_name(option) and not word.startswith("-") and not _REFERENCE.fullmatch(word):
            return option
        if option in ("u", "user") and _NAME_AND_PASSWORD.fullmatch(word):
            return "--user"
        flag = _FLAG.fullmatch(word)
        option = flag[1] if flag is not None else ""
        for name, _, _ in _secrets_given(word):
            return name
        if (bearer := _BEARER.search(word)) and not _REFERENCE.fullmatch(bearer[2]):
            return "Authorization"
        if what := secret_in_text(word, "url"):
            return what
        if re.match(r"(?:--user=|-u)", word) and _NAME_AND_PASSWORD.fullmatch(re.sub("^(?:--user=|-u)", "", word)):
            return "--user"
    return ""


def masked(text: str) -> str:
    """A text with `***` in place of every secret that is found in it."""
    text = _TOKEN.sub(HIDDEN, text)
    text = _ADDRESS.sub(lambda found: _masked_address(found[0]), text)
    text = _USER_INFO.sub(lambda found: f"{HIDDEN}@{found[0].rpartition('@')[2]}", text)
    for _, start, end in reversed(list(_secrets_given(text))):
        text = text[:start] + HIDDEN + text[end:]
    text = _BEARER.sub(lambda found: f"{found[1]} {HIDDEN}", text)
    return re.sub(
        r"(--?)([A-Za-z][\w.-]*)(\s+)([^\s-]\S*)",
        lambda found: f"{found[1]}{found[2]}{found[3]}{HIDDEN}" if is_secret_name(found[2]) else found[0],
        text,
    )


def shortened(text: str, longest: int = LONGEST) -> str:
    """The beginning and the end of a text that is too long, and how long it is."""
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]}…{text[-longest // 4 :]} ({len(text)} characters)"


def described(field: str, value: Any) -> str:
    """The representation of a field's value as a message shows it: without secrets, of bounded length."""
    if _hides(field, value):
        return repr(HIDDEN)
    if isinstance(value, str):
        return repr(_shown_text(field, value))
    text = ""
    for piece in _pieces_of(field, value, 0):
        text += piece
        if len(text) > LONGEST:
            return f"{text[:LONGEST]}…"
    return text


def _hides(field: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    return field in _UNSHOWN_FIELDS or is_secret_name(field.rpartition(".")[2])


def _shown_text(field: str, text: str) -> str:
    """Of a text that is too long to be searched for secrets only the first characters are shown."""
    if len(text) > _SEARCHED:
        return f"{masked(text[:_SEARCHED])[:_BEGINNING]}… ({len(text)} characters)"
    text = masked(text)
    if field == "--set" and (given := text.partition("="))[1] and is_secret_name(given[0]):
        text = f"{given[0]}={HIDDEN}"
    return shortened(text)


def _pieces_of(field: str, value: Any, depth: int) -> Iterator[str]:
    """The representation of a value in pieces, so that whoever has enough need not take the rest."""
    if _hides(field, value):
        yield repr(HIDDEN)
    elif isinstance(value, str):
        yield repr(_shown_text(field, value))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield repr(value) if value.bit_length() < 1000 else "a number of many digits"
    elif depth >= _DEEPEST and isinstance(value, Mapping | list | tuple | set | frozenset):
        yield "…"
    elif isinstance(value, Mapping):
        yield "{"
        for number, (key, inner) in enumerate(value.items()):
            yield ", " if number else ""
            yield f"{_shown_text('', key)!r}: " if isinstance(key, str) else f"{key!r}: "
            yield from _pieces_of(f"{field}.{key}" if isinstance(key, str) else field, inner, depth + 1)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "[" if isinstance(value, list) else "("
        option = False
        for number, inner in enumerate(value):
            yield ", " if number else ""
            yield from [repr(HIDDEN)] if option and isinstance(inner, str) else _pieces_of(field, inner, depth + 1)
            flag = _FLAG.fullmatch(inner) if isinstance(inner, str) else None
            option = flag is not None and is_secret_name(flag[1])
        yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
    else:
        yield _shown_text("", repr(value))


def _pieces(word: str) -> list[str]:
    """A word of a command line that is a command line itself, as `sh -c` takes it, in words."""
    return word.replace('"', " ").replace("'", " ").split() if any(map(str.isspace, word)) else []


def _secret_in_address(text: str) -> str:
    try:
        address = urlsplit(text)
        parameters = [*parse_qsl(address.query), *parse_qsl(address.fragment)]
        if "@" in text:
            address.port  # noqa: B018 (raises where a password with a slash in it was taken for one)
    except ValueError:
        return "a user or password" if "@" in text else ""
    if address.password is not None or ("@" in address.netloc and address.scheme in ("http", "https")):
        return "a user or password"
    named = [name for name, value in parameters if value and is_secret_name(name)]
    if named:
        return f"the parameter {named[0]}"
    inner = next((name for name, _, _ in _secrets_given(unquote(address.query))), "")
    return f"the parameter {inner}" if inner else ""


def _masked_address(text: str) -> str:
    """Without its user and parameters where anything of it is a secret."""
    if not _secret_in_address(text):
        return text
    scheme, _, rest = text.partition("://")
    place = re.split(r"[?#]", rest)[0].rpartition("@")
    return f"{scheme}://{HIDDEN}{place[1]}{place[2]}" if place[1] else f"{scheme}://{place[2]}?{HIDDEN}"


def _secrets_given(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, where the value begins, where it ends) of every secret that a text gives a name to."""
    for found in _GIVEN.finditer(text):
        if is_secret_name(found[1]) and not _REFERENCE.fullmatch(found[2]):
            yield found[1], found.start(2), found.end(2)
