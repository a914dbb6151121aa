"""What a configuration names outside itself: the model's directory, prompts, reward; and the room there is for them.

Called by `engine check`, and by a run before anything starts. Reads files; never imports torch, transformers or Ray.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.memory import Model, memory_lines
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.hardware import object_store_limit
from engine.tasks.rewards import load_reward
from engine.tasks.tokenizer import END, PAD, UNKNOWN

if TYPE_CHECKING:
    from engine.tasks.warm_start import WarmStart  # it needs the extra `train`

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
WEIGHTS = ("*.safetensors", "*.bin")
VERSIONS_HELD = 3
"""Weights versions that there is room for: the one in use, the newest, the one being published."""
LEAST_STORE_BYTES = 256 << 20


def check_inputs(config: Config) -> Iterator[str]:
    """Lines like those of `check_config`. Raises: ConfigError for a file that is missing or cannot be used."""
    directory = model_directory(config)
    if directory is not None:
        check_model(directory)
        yield f"ok: model.path {config.model.path} has a model and a tokenizer"
        held = weights_bytes(directory)
        model = None if held is None else Model.of(directory, held // 4)
        if model is not None:
            yield from memory_lines(model, config)
        _check_reference(config, directory)
    elif config.model.path is not None:
        yield f"note: model.path {config.model.path} is a hub name: no such directory was found (./ before it: a path)"
    yield from _check_stop(config, directory)
    yield from _check_store(config, directory)
    if config.model.make is None:
        files = {"data.path": config.data.path, "data.validation_path": config.data.validation_path}
        for field, file in files.items():
            if file is not None:
                from engine.tasks.dataset import Dataset  # late: it needs the extra `train`

                data = Dataset.load(file, prompt_field=config.data.prompt_field, config_field=field)
                yield f"ok: {field} has {len(data)} prompts"
        if config.model.warm_start.path is not None:
            from engine.tasks.warm_start import load_answers

            _, answers = load_answers(warm_start_of(config), config.data.prompt_field)
            yield f"ok: model.warm_start.path has {len(answers)} answers"
    if config.reward.function is not None:
        load_reward(config.reward.function, config.run.code_dir)
        yield f"ok: reward.function {config.reward.function} can be imported"


def warm_start_of(config: Config) -> "WarmStart":
    """What `model.warm_start` asks for, if its path is set."""
    from engine.tasks.warm_start import WarmStart

    section = config.model.warm_start
    assert section.path is not None
    return WarmStart(**section.model_dump(), seed=config.run.seed)


def model_directory(config: Config) -> Path | None:
    """The directory that `model.path` names; None for a hub name, and for a model that is made.

    Raises: ConfigError for a path that leads nowhere.
    """
    path = config.model.path
    if path is None:
        return None
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.is_absolute():
        raise ConfigError(
            "model.path",
            path,
            "is not a directory",
            "give the directory of a model in Hugging Face format, or a hub name",
        )
    return None


def _check_reference(config: Config, directory: Path) -> None:
    """Raises: ConfigError for a reference or teacher whose tokens are not the model's."""
    path = config.trainer.reference_path
    if path is None or not Path(path).is_dir():
        return
    ours, theirs = _vocabulary(directory), _vocabulary(Path(path))
    if ours is None or theirs is None or ours == theirs:
        return
    odd = next(token for token, id in (ours | theirs).items() if ours.get(token) != theirs.get(token, -1))
    law = f"has another tokenizer than model.path: its token {odd!r} is {theirs.get(odd)}, not {ours.get(odd)}"
    raise ConfigError("trainer.reference_path", path, law, "use a model with the same tokenizer")


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Token ids by their text, as tokenizer.json has them; None where it does not say."""
    try:
        plain = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        found = plain["model"]["vocab"]
        tokens = dict(found) if isinstance(found, dict) else {token: id for id, (token, _) in enumerate(found)}
        return tokens | {added["content"]: added["id"] for added in plain["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_model(directory: Path) -> None:
    """Raises: ConfigError where configuration, tokenizer or weights are missing."""
    fix = "give a directory into which save_pretrained wrote both the model and its tokenizer"
    if not (directory / "config.json").is_file():
        raise ConfigError("model.path", str(directory), "has no config.json", fix)
    if not any((directory / name).is_file() for name in TOKENIZERS):
        raise ConfigError("model.path", str(directory), "has no tokenizer, such as tokenizer.json", fix)
    if not any(any(directory.glob(pattern)) for pattern in WEIGHTS):
        raise ConfigError("model.path", str(directory), "has no weights, such as model.safetensors", fix)


def weights_bytes(directory: Path) -> int | None:
    """Bytes of a published version, float32 without what is tied; None where the files do not say it."""
    files = sorted(directory.glob("*.safetensors"))
    try:
        return sum(4 * _numbers_in(file) for file in files) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _numbers_in(file: Path) -> int:
    """How many numbers a safetensors file holds, by its header: 8 bytes of length, then JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("not a safetensors file")
        header = json.loads(opened.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def versions_held(config: Config) -> int:
    """Versions of the weights that may be there at once; one being validated and one that waits for it are kept."""
    return VERSIONS_HELD + 2 * (config.validation.every > 0 and config.held_out)


def object_store_bytes(config: Config, directory: Path | None) -> int | None:
    """What the object store should hold; None where the model's size is not known before it is loaded."""
    if config.rollout.transport != "object_store" or config.model.make is not None:
        return LEAST_STORE_BYTES
    version = None if directory is None else weights_bytes(directory)
    return None if version is None else max(LEAST_STORE_BYTES, versions_held(config) * version)


def _check_store(config: Config, directory: Path | None) -> Iterator[str]:
    wanted, limit = object_store_bytes(config, directory), object_store_limit()
    if wanted is not None and wanted > limit:
        yield (
            f"note: {versions_held(config)} weights versions need {wanted / 1e9:.1f} GB of object store, but only "
            f"{limit / 1e9:.1f} GB are available (30 % of memory, /dev/shm): Ray moves the rest to disk"
        )


def _check_stop(config: Config, directory: Path | None) -> Iterator[str]:
    """Raises: ConfigError for a stop string that is not one token, as far as the tokenizer's file shows it."""
    stop = config.rollout.stop
    if not stop:
        return
    if config.model.make is not None:
        lengths = {text: 1 if text in (END, PAD, UNKNOWN) else len(text) for text in stop}
    elif directory is not None and (directory / "tokenizer.json").is_file():
        lengths = _lengths(directory, stop)
    else:
        yield "note: rollout.stop is checked when the run loads the tokenizer"
        return
    for text, tokens in lengths.items():
        if tokens != 1:
            law = f"must be single tokens, and this model's tokenizer splits {text!r} into {tokens}"
            raise ConfigError("rollout.stop", stop, law, "use strings of one token each")
    yield f"ok: rollout.stop has {len(stop)} string{'s' * (len(stop) > 1)} of one token each"


def _lengths(directory: Path, stop: list[str]) -> dict[str, int]:
    """Tokens of each string. Those that the tokenizer's settings add may be missing from its file: they are one."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing narrower
        law = f"has an unreadable tokenizer.json: {error}"
        raise ConfigError("model.path", str(directory), law, "use a tokenizer that save_pretrained wrote") from None
    added = directory / "tokenizer_config.json"
    settings = added.read_text(encoding="utf-8", errors="replace") if added.is_file() else ""
    return {
        text: 1 if json.dumps(text) in settings else len(tokenizer.encode(text, add_special_tokens=False).ids)
        for text in stop
    }
