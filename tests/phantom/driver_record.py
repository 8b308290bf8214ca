"""The fake driver's record of a program (FAKECUDA_LOG) read as what streams do: what comes before what, and what races.

A record has the program's own lines among the driver's: `use 7 backward ADDRESS BYTES` when a block begins that reads
its weights there. Order is worked out by vector clocks: work on one stream is in order, an event carries what its
stream had done to whoever waits for it, and the host, when it waits, to everything it asks for later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

HOST = "host"


@dataclass(frozen=True, slots=True)
class Line:
    """What matters of a line: its verb, addresses and streams as they are written."""

    number: int
    verb: str
    words: tuple[str, ...]


@dataclass(slots=True)
class Work:
    """One copy, or one launch, of the record."""

    line: int
    stream: str
    moment: int
    """Its place among the work of its stream."""
    seen: dict[str, int]
    """Of each stream, how much had been done for certain before this begins."""

    def after(self, other: Work) -> bool:
        return self.seen.get(other.stream, 0) >= other.moment or (
            self.stream == other.stream and self.moment > other.moment
        )


@dataclass(slots=True)
class Copy(Work):
    target: int = 0
    source: int = 0
    nbytes: int = 0

    def writes(self, begin: int, end: int) -> bool:
        return self.target < end and begin < self.target + self.nbytes


@dataclass(slots=True)
class Use:
    """A block at work: its launches read the weights at an address."""

    block: int
    backward: bool
    line: int
    begin: int
    end: int
    launches: list[Work] = field(default_factory=list)


def lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.splitlines()):
        words = line.partition(" -> ")[0].split()
        if words:
            yield Line(number, words[0], tuple(words[1:]))


@dataclass(slots=True)
class Record:
    copies: list[Copy] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    _clocks: dict[str, dict[str, int]] = field(default_factory=dict)
    _events: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Iterable[Line]) -> Record:
        made = cls()
        for line in given:
            made._take(line)
        return made

    def _take(self, line: Line) -> None:
        words = line.words
        match line.verb:
            case "cuEventRecord":
                self._events[words[0]] = dict(self._clock(words[1]))
            case "cuStreamWaitEvent":
                _join(self._clock(words[0]), self._events.get(words[1], {}))
            case "cudaEventSynchronize":
                _join(self._clock(HOST), self._events.get(words[0], {}))
            case "cudaMemcpyAsync":
                seen = self._work(words[3])
                moment = seen[words[3]]
                target, source, nbytes = int(words[0], 16), int(words[1], 16), int(words[2])
                self.copies.append(Copy(line.number, words[3], moment, dict(seen), target, source, nbytes))
            case "cudaLaunchKernel":
                seen = self._work(words[0])
                if self.uses:
                    self.uses[-1].launches.append(Work(line.number, words[0], seen[words[0]], dict(seen)))
            case "use":
                begin = int(words[2], 16)
                self.uses.append(Use(int(words[0]), words[1] == "backward", line.number, begin, begin + int(words[3])))

    def _clock(self, stream: str) -> dict[str, int]:
        return self._clocks.setdefault(stream, {})

    def _work(self, stream: str) -> dict[str, int]:
        """One piece of work more on a stream; what is certain before it ends, itself included."""
        clock = self._clock(stream)
        _join(clock, self._clock(HOST))
        clock[stream] = clock.get(stream, 0) + 1
        return clock


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, done in other.items():
        clock[stream] = max(clock.get(stream, 0), done)
