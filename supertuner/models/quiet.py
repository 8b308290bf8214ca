"""The model libraries without their own bars and remarks, for as long as we call them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import diffusers
import transformers


@contextmanager
def quietly() -> Iterator[None]:
    """What matters of it is checked by the caller, and told by us; afterwards everything is as it was."""
    before = diffusers.logging.get_verbosity(), transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers.logging.set_verbosity(before[0])
        transformers.logging.set_verbosity(before[1])
        if bars:
            transformers.logging.enable_progress_bar()
