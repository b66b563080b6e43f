"""Models of a plan: a local folder with config.json, a repository of which Hugging Face's cache has
it, or one of the public configurations here.

models/<name>/config.json holds numbers that the model's publisher gave; no weights, no tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

_MODELS = Path(__file__).with_name("models")


def names() -> list[str]:
    """The names that stand for a configuration."""
    return sorted(path.name for path in _MODELS.iterdir() if path.is_dir())


def folder(model: str, flag: str) -> Path:
    """The folder of `model`; ValueError where it has no config.json that can be read."""
    known = _MODELS / model
    if "/" not in model and known.is_dir():
        return known
    path = Path(model).expanduser()
    if not path.is_dir():
        path = _cached(model)
    if path is None:
        raise ValueError(
            f"{flag} {model}: there is no such folder, and no configuration of that name; "
            f"a plan downloads nothing. Give a folder with config.json, a repository after `hf "
            f"download REPOSITORY config.json`, or one of {', '.join(names())}"
        )
    config = path / "config.json"
    try:
        if not isinstance(json.loads(config.read_text("utf-8")), dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError:
        raise ValueError(f"{flag} {model}: there is no config.json in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{flag} {model}: its config.json cannot be read: {reason}") from None
    return path


def _cached(model: str) -> Path | None:
    """Where Hugging Face's cache has the config.json of the repository `model`."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # it is a path
        return None
    return Path(found).parent if isinstance(found, str) else None
