"""Guards around calls that load or build modules: one at a time in the process, and without the libraries' messages.

While diffusers loads a model, accelerate replaces `nn.Module.register_parameter` for all threads, and transformers
replaces the functions of `torch.nn.init`. A module that another thread builds meanwhile gets parameters without values,
and two loads at once can leave the replacements in place for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_construction_lock = RLock()
"""Of the process, because what the libraries replace is of the process."""


@contextmanager
def exclusive_construction() -> Iterator[None]:
    """Inside the block, or a function that this decorates, no other thread loads or builds modules."""
    with _construction_lock:
        yield


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """`exclusive_construction`, and the libraries log only errors and show no bars. Callers report what matters."""
    import diffusers
    import transformers

    with exclusive_construction():
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
