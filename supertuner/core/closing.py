"""Closing resources: at the end of the `with` block that uses them, or only after an error in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TypeVar


class CloseOnExit:
    """Base class of resources whose `with` block closes them."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


ResourceT = TypeVar("ResourceT", bound=CloseOnExit)


@contextmanager
def close_on_error(resource: ResourceT) -> Iterator[ResourceT]:
    """Close `resource` only if the block raises."""
    try:
        yield resource
    except BaseException:
        resource.close()
        raise
