"""From a file's bytes to pictures and sounds: a decoder per kind; whatever is wrong with the bytes is a BrokenMedia."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from supertuner.core.errors import BrokenMedia


@contextmanager
def broken_means(name: str) -> Iterator[None]:
    """Whatever goes wrong inside is the fault of the bytes of `name`, and says so.

    Decoders raise dozens of types on damaged bytes, struct.error and MemoryError among them; none is more telling
    than its text, and the original stays attached.
    """
    try:
        yield
    except BrokenMedia as error:
        raise BrokenMedia(f"{name}: {error}") from error
    except Exception as error:
        raise BrokenMedia(f"{name}: cannot be decoded ({type(error).__name__}: {error})") from error
