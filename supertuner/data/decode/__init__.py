"""From a file's bytes to pictures and sounds: a decoder per kind; whatever is wrong with the bytes is a BrokenMedia."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from supertuner.core.errors import BrokenMediaError


@contextmanager
def raising_broken_media(label: str) -> Iterator[None]:
    """Whatever goes wrong inside is the fault of the bytes of `name`, and says so.

    Decoders raise dozens of types on damaged bytes, struct.error and MemoryError among them; none is more telling
    than its text, and the original stays attached.
    """
    try:
        yield
    except BrokenMediaError as error:
        raise BrokenMediaError(f"{label}: {error}") from error
    except Exception as error:
        raise BrokenMediaError(f"{label}: cannot be decoded ({type(error).__name__}: {error})") from error
