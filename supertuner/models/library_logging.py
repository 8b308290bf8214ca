"""Silences progress bars and log messages of diffusers and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import diffusers
import transformers


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside the block the libraries log only errors and show no bars. Callers check and report what matters."""
    verbosities = diffusers.logging.get_verbosity(), transformers.logging.get_verbosity()
    bars_enabled = transformers.logging.is_progress_bar_enabled()
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers.logging.set_verbosity(verbosities[0])
        transformers.logging.set_verbosity(verbosities[1])
        if bars_enabled:
            transformers.logging.enable_progress_bar()
