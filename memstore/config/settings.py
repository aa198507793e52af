"""What can be configured, with the limits of every value. ``memstore/defaults.toml`` gives the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _not_empty(value: Any) -> Any:
    if value == "":  # a path would become the current directory
        raise ValueError("must not be empty")
    return value


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):  # which pydantic would take for 0 or 1
        raise ValueError("must be a number")
    return value


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # which pydantic would let through
        raise ValueError(f"{path.parts[0]} is nobody's home directory") from error


AUTO = "auto"  # in the place of a backend: one is chosen

Name = Annotated[str, BeforeValidator(_not_empty)]
Folder = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_expanded)]
Count = Annotated[int, BeforeValidator(_no_switch), Field(ge=0)]
Share = Annotated[float, BeforeValidator(_no_switch), Field(gt=0, le=1)]


class StoreSettings(_Section):
    """``[store]``: where memories are kept, and by which record backend."""

    path: Folder
    records: Name


class AutoSettings(_Section):
    """``[index.auto]``: how ``backend = "auto"`` chooses.

    It takes ``small`` up to ``exact_tokens`` tokens, and where nothing faster is known to reach ``target_mass``, the
    share of the attention that a search must find.
    """

    exact_tokens: Count
    target_mass: Share
    small: Name

    @field_validator("small")
    @classmethod
    def _is_a_backend(cls, small: str) -> str:
        if small == AUTO:
            raise ValueError(f'must name a backend, which "{AUTO}" is not')
        return small


class IndexSettings(_Section):
    """``[index]``: which backend searches a memory; ``options`` are checked by that backend when it is loaded.

    The backend ``auto`` is no plugin: it stands for a choice by the size of the memory.
    """

    backend: Name
    options: dict[str, Any]
    auto: AutoSettings

    @field_validator("options")
    @classmethod
    def _are_of_a_plugin(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if options and info.data.get("backend") == AUTO:
            raise ValueError(f'the backend "{AUTO}" has no options; those of a backend are set where it is named')
        return options


class Settings(_Section):
    """All that can be configured."""

    store: StoreSettings
    index: IndexSettings
