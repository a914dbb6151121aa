"""Keeps secrets and long values out of messages: finds secrets in names and text, and masks and shortens values.

`errors` calls it for each `ConfigError`, `config.secrets` refuses the secrets that it finds, and pages about runs hide
them. It must never return a secret, and never build a text much longer than the one shown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

HIDDEN = "***"
LONGEST = 200
"""Maximum length of a value in a message, in characters."""
_SEARCHED = 20 * LONGEST
_BEGINNING = 40
_DEEPEST = 8
"""Maximum nesting of values in a message, in levels."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRETS: tuple[str, ...] = ("password", "passwd", "pwd", "passphrase", "secret", "credential", "authorization")
_SECRETS += ("bearer", "apikey")
_SECRETS += ("passwords", "secrets", "credentials", "apikeys", "accesskey", "secretkey", "privatekey")
_KEYS = {"api", "access", "private", "secret", "auth", "account", "encryption", "signing", "license", "master", "ssh"}
_KEYS |= {"session", "client", "service", "openai", "anthropic", "wandb", "hf", "azure", "google"}
"""Words before `key` that make the name a secret's."""
_PASSES = {"db", "database", "user", "admin", "proxy", "smtp", "ftp", "mysql", "postgres", "pg", "redis", ""}
"""Words before `pass` that make it a password."""
_SPECIAL_TOKENS = {"bos", "eos", "pad", "unk", "stop", "start", "end", "mask", "sep", "cls", "image", "video", "audio"}
_SPECIAL_TOKENS |= {"special", "think", "reasoning", "per", "each", "next", "first", "last", "max", "min", "a", "the"}
"""Words before `token` that make it a model's token, not an account's."""
_UNSHOWN_FIELDS = (".api_key_env",)
"""Fields into which a user may put the secret by mistake."""
_ADDRESS_FIELDS = {"uri", "url", "urls", "proxy", "proxies", "address", "endpoint", "dsn"}

_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-(?=[\w-]{0,200}\d)[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,2000}\.eyJ[\w-]{8,}[\w.-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Formats of the keys of known services."""
_ADDRESS = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_USER_INFO = re.compile(r"(?<![^\s=\"'])[^\s/:@=\"']{1,200}:[^\s/@]{1,500}@[\w.\[\]:-]+")
"""`user:password@host` without a scheme."""
_GIVEN = re.compile(
    r"(?<![\w.-])([\w.-]+)[\"']?\s*[=:](?=\s*(?:(?:bearer|basic|token)\s+)?[\"']?([^\s\"',;&}\])]+))", re.IGNORECASE
)
"""`name=value`, `name: value` and `"name": "value"`; a value may be another such pair."""
_BEARER = re.compile(r"\b(bearer)\s+([^\s\"']{6,})", re.IGNORECASE)
_REFERENCE = re.compile(r"\$(\w+|\{\w+[^}]*\}?|\(.*)|<[\w -]+>|\*{3}|none|null|true|false", re.IGNORECASE)
"""A value that only refers to a secret, or says that there is none."""
_NAME_AND_PASSWORD = re.compile(r"[^\s:$/]+:(?!\d+$)[^\s$]+")
"""The argument of curl's `--user`."""
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")


def is_secret_name(name: str) -> bool:
    """Whether a field, parameter, variable, header or option with this name holds a secret."""
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
    """The kind of secret in a text, in words; empty if there is none. `field`: the field that holds the text."""
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
    """The option, variable or header of a command line that holds a secret; empty if none does."""
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
    """A text with every secret found in it replaced by `***`."""
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


def without_secrets(value: Any, name: str = "") -> Any:
    """A configuration for a page, with every secret found in it replaced by `***`. `name`: the field that holds it."""
    secret = is_secret_name(name)
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, name if secret else str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, name) for inner in value]
    if secret and value not in (None, "") and not isinstance(value, bool):
        return HIDDEN
    return masked(value) if isinstance(value, str) else value


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text of at most `longest` characters unchanged; a longer one as its beginning, its end and its length."""
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]}…{text[-longest // 4 :]} ({len(text)} characters)"


def described(field: str, value: Any) -> str:
    """The representation of a field's value for a message: without secrets, of bounded length."""
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
    return field.endswith(_UNSHOWN_FIELDS) or is_secret_name(field.rpartition(".")[2])


def _shown_text(field: str, text: str) -> str:
    """A text for a message. If it is too long to search for secrets, only its first characters."""
    if len(text) > _SEARCHED:
        return f"{masked(text[:_SEARCHED])[:_BEGINNING]}… ({len(text)} characters)"
    text = masked(text)
    if field == "--set" and (given := text.partition("="))[1] and is_secret_name(given[0]):
        text = f"{given[0]}={HIDDEN}"
    return shortened(text)


def _pieces_of(field: str, value: Any, depth: int) -> Iterator[str]:
    """The representation of a value in pieces, so that the caller can stop early."""
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
    """The words of an argument that is itself a command line, as for `sh -c`."""
    return word.replace('"', " ").replace("'", " ").split() if any(map(str.isspace, word)) else []


def _secret_in_address(text: str) -> str:
    try:
        address = urlsplit(text)
        parameters = [*parse_qsl(address.query), *parse_qsl(address.fragment)]
        if "@" in text:
            address.port  # noqa: B018 (raises if a password with a slash was parsed as a port)
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
    """An address, without its user and parameters if it holds a secret."""
    if not _secret_in_address(text):
        return text
    scheme, _, rest = text.partition("://")
    place = re.split(r"[?#]", rest)[0].rpartition("@")
    return f"{scheme}://{HIDDEN}{place[1]}{place[2]}" if place[1] else f"{scheme}://{place[2]}?{HIDDEN}"


def _secrets_given(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, start of the value, end of the value) of every named secret in a text."""
    for found in _GIVEN.finditer(text):
        if is_secret_name(found[1]) and not _REFERENCE.fullmatch(found[2]):
            yield found[1], found.start(2), found.end(2)
