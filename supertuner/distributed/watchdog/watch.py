"""A thread beside training that knows how the other processes are, and ends this one when the job cannot go on.

Each process writes a report into the store that all of them meet at, twice a second, and reads those of others. Who is
gone, stopped or hanging becomes one verdict, the same for all (`verdict.py` decides). A process whose main thread
cannot be reached, in a collective that will never end, is ended here: after a verdict none outlives a few seconds.

The store is the launcher's, and a launcher that is stopped is asked for ever. So a second thread, that asks nobody,
looks at the first.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from supertuner.config.sources.launcher import Launched
from supertuner.core import processes
from supertuner.core.errors import PeerError
from supertuner.distributed.watchdog.collective_errors import is_broken_connection
from supertuner.distributed.watchdog.diagnosis import Report, Seen, State, Verdict, judged, of, report_to_text
from supertuner.distributed.watchdog.heartbeat import Pulse
from supertuner.distributed.watchdog.liveness import Life
from supertuner.distributed.watchdog.peer_reports import Others
from supertuner.distributed.watchdog.signals import signal_of, terminable
from supertuner.distributed.watchdog.timeout import within

BEAT_S = 0.5
GRACE_S = 3.0
"""After a verdict: for the main thread to end by itself, by the error of a broken connection."""
END_S = 6.0
"""After an error of the main thread: for everything to be closed."""
FIND_S = 5.0
"""After a broken connection: to find out who is gone."""
SILENT_S = 3.0
"""And then, who has not been heard for so long is."""
GOES_ON = "the next start goes on from the last checkpoint"
STANDARD_ERROR = 2
VERDICT = "watch/verdict"
NOBODY = -1
"""Of the processes is to blame."""


class Watch:
    """Of one process. `start`, and then `leave` or `failed`, by the main thread."""

    def __init__(self, store: Store, place: Launched, pulse: Pulse, *, timeout_s: float) -> None:
        self._store, self._place, self._pulse = store, place, pulse
        self._patience_s = max(timeout_s / 2, timeout_s - GRACE_S - END_S - 2 * BEAT_S)  # the end is within the time
        self._beat_s = min(BEAT_S, timeout_s / 8)
        pid = os.getpid()
        self._self = Report(
            place.rank, place.local_rank, platform.node(), processes.namespace(), pid, processes.born(pid)
        )
        self._others = Others(store, self._self, place.ranks)
        self._life = Life(pulse, chunk_s=self._patience_s / 10)
        self._beats = 0
        self._verdict: Verdict | None = None
        self._decided, self._broken, self._spoken = threading.Event(), threading.Event(), threading.Event()
        self._done, self._all_left, self._leaving = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._guard = threading.Thread(target=self._look_at_watch, name="watch's guard", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._guard.start()

    def leave(self) -> None:
        """All is done here. Nobody goes before all are done: a launcher ends the others when the first one goes with
        anything but 0, and the store may be the first process's own."""
        self._done.set()
        while not self._all_left.wait(self._beat_s / 4):
            if self._decided.is_set():
                break
        self._leaving.set()
        verdict = self._verdict
        if verdict is not None and verdict.rank != NOBODY and not self._all_left.is_set():
            raise self._blaming(verdict)
        self._thread.join(BEAT_S)  # it may be in a call that never returns, and ends with the process then

    def failed(self, error: BaseException) -> BaseException | None:
        """The main thread ends with an error: tell the others, or learn from them why. What to raise instead, if it is
        another process's fault. Whatever happens from here on, this process ends soon."""
        terminated = signal_of(error)
        instead: BaseException | None = None
        if terminated or isinstance(error, PeerError) or is_broken_connection(error):
            self._broken.set()
            self._decided.wait(SILENT_S / 2 if terminated else FIND_S)
            instead = self._blamed(error, terminated)
        else:
            self._tell(of(self._report(), failure := f"failed: {_first_lines(error)}"))
            if self._said_elsewhere(failure):
                instead = SystemExit(getattr(error, "exit_code", 1))
        self._leaving.set()
        if not isinstance(instead, PeerError | SystemExit):
            self._end_soon(_first_lines(error))
        return instead

    def _blamed(self, error: BaseException, terminated: str | None) -> BaseException | None:
        verdict = self._verdict
        if verdict is not None and verdict.rank != self._place.rank:
            return self._blaming(verdict)
        if terminated:
            self._tell(of(self._report(), f"was ended by {terminated}"))
            return None
        if isinstance(error, PeerError):
            self._tell(of(self._report(), f"failed: {_first_lines(error)}"))
            return None
        why = f"lost its connection to the others, and nobody said why: {_first_lines(error)}"
        self._tell(of(self._report(), why))
        self._end_soon(said := f"{self._self.named()} {why}; {GOES_ON}")
        return PeerError(said)

    def _said_elsewhere(self, failure: str) -> bool:
        """What is wrong for all, another process has said; this one need not, if it is not its node's first."""
        verdict = self._verdict
        of_another = verdict is not None and verdict.rank != self._place.rank and verdict.text.endswith(failure)
        return of_another and self._place.local_rank > 0

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                self._beat()
                if self._decided.is_set():
                    break
                if self._leaving.wait(self._beat_s / 4 if self._done.is_set() else self._beat_s):
                    return
        except RuntimeError as error:  # torch's, of a store that is not there
            if not self._leaving.is_set() and not self._decided.is_set():
                self._without_store(f"is gone: {_first_lines(error)}", self._patience_s)
            return
        assert self._verdict is not None
        if self._verdict.rank == NOBODY or self._leaving.wait(GRACE_S):
            return
        self._exit(self._words(self._verdict))

    def _look_at_watch(self) -> None:
        """Half of the time is for the launcher to answer, the other half for saving."""
        limit_s = left_s = self._patience_s / 2
        beats = 0
        while not self._leaving.wait(self._beat_s) and not self._decided.is_set():
            if self._beats != beats:
                left_s, beats = limit_s, self._beats
                continue
            left_s -= self._beat_s  # however long that was: this process may have been stopped itself
            if left_s <= 0:
                self._without_store(f"has not answered for {limit_s:.0f} s: it is stopped, or cut off", limit_s)
                return

    def _beat(self) -> None:
        done = self._done.is_set()  # looked at once: nobody goes who has not told the others that it may
        self._life.beat()
        self._others.beat(self._life.elapsed_s)
        own = self._report(left=done)
        self._say(own)
        if self._store.check([VERDICT]):
            self._hear(Verdict.from_bytes(self._store.get(VERDICT)))
            return
        broken = self._broken.is_set()
        idle = self._life.idle_s >= self._patience_s
        seen = [*self._others.seen(everybody=broken or done or idle), Seen(own.rank, own, 0.0, State.ALIVE)]
        if done and all(one.report is not None and one.report.left for one in seen):
            self._all_left.set()
            return
        silent_s = min(SILENT_S, self._patience_s) if broken else None
        verdict = judged(seen, self._patience_s, silent_s=silent_s)
        if verdict is not None:
            self._hear(self._pronounced(verdict))

    def _say(self, report: Report) -> None:
        self._store.set(f"watch/{report.rank}", report_to_text(report))

    def _report(self, *, left: bool = False) -> Report:
        self._beats += 1
        own, at = self._self, self._life.at
        return Report(
            own.rank,
            own.local_rank,
            own.host,
            own.node,
            own.pid,
            own.born,
            beat=self._beats,
            doing=self._pulse.doing,
            step=self._pulse.step,
            idle_s=self._life.idle_s,
            waits=at.waits,
            where=at.where,
            left=left,
        )

    def _pronounced(self, verdict: Verdict) -> Verdict:
        """What counts: the first verdict of all."""
        found = self._store.compare_set(VERDICT, "", verdict.to_text())
        return Verdict.from_bytes(found)

    def _hear(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._others.end(verdict)
        self._decided.set()

    def _tell(self, verdict: Verdict) -> None:
        """By the main thread."""
        with suppress(RuntimeError, TimeoutError):  # a store that is gone has nobody left to tell
            self._verdict = self._verdict or within(FIND_S, lambda: self._pronounced(verdict))
            self._decided.set()

    def _without_store(self, what: str, limit_s: float) -> None:
        """The launcher of the first node ended without ending us, or is stopped, or that node is gone. Processes that
        are whole save and stop, as if the launcher had passed on a signal; where they are not, the error of it comes by
        itself."""
        if self._done.is_set():
            self._all_left.set()  # nobody can be asked any more: it went with its owner, who was done as well
            return
        self._verdict = Verdict(NOBODY, NOBODY, "", f"the launcher of the first node {what}")
        self._decided.set()
        _print(f"{self._verdict.text}; saving and stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._leaving.wait(limit_s):
            self._exit(self._words(self._verdict))

    # ------------------------------------------------------------------ the end

    def _words(self, verdict: Verdict) -> str:
        return f"{verdict.text}; rank {self._place.rank} ends with it, and {GOES_ON}"

    def _speaks(self, verdict: Verdict) -> bool:
        """One process of each node does: the first that is not the one it is about."""
        about_first = verdict.node == self._self.node and verdict.local_rank == 0
        return self._place.local_rank == (1 if about_first else 0)

    def _blaming(self, verdict: Verdict) -> BaseException:
        """What ends this process for another one's fault."""
        self._end_soon(words := self._words(verdict))
        return PeerError(words) if self._speaks(verdict) else SystemExit(1)

    def _end_soon(self, said: str) -> None:
        """From here on this process has so long to close everything by itself, and to say why it ends."""
        self._tell_launcher(said)
        atexit.register(self._spoken.set)
        threading.Thread(target=self._end, args=(said,), name="end", daemon=True).start()

    def _end(self, said: str) -> None:
        time.sleep(END_S)
        if self._spoken.is_set():
            os._exit(1)
        self._exit(said)

    def _exit(self, said: str) -> None:
        _print(said)
        self._tell_launcher(said)
        os._exit(1)

    def _tell_launcher(self, said: str) -> None:
        """Where torchrun looks for the reason of a failure; it tells the first of them."""
        path = self._place.error_file
        if path is not None and not path.exists():
            told = {"message": {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}}
            with suppress(OSError):  # it was said on screen; the launcher's own report is only kinder with it
                path.write_text(json.dumps(told))


@contextmanager
def watching(store: Store, place: Launched, pulse: Pulse, *, timeout_s: float) -> Iterator[None]:
    """While inside, the others are watched, and this process is watched by them."""
    own = _connected_anew(store, timeout_s)
    watch = Watch(own, place, pulse, timeout_s=timeout_s)
    with terminable() as signals:
        watch.start()
        try:
            yield
        except BaseException as error:
            signals.ignore()  # it ends anyway, and not for a signal that follows
            instead = watch.failed(error)
            if instead is None:
                raise
            raise instead from error
        watch.leave()


def _connected_anew(store: Store, timeout_s: float) -> Store:
    """The same store; its calls wait, and must not make those of others wait."""
    try:
        own: Store = within(timeout_s, store.clone)  # type: ignore[attr-defined]  # torch's stubs do not know it
    except TimeoutError as error:
        raise PeerError(
            f"the launcher of the first node has not answered for {timeout_s:g} s; see that it runs"
        ) from error
    own.set_timeout(timedelta(seconds=timeout_s))  # less would end a job whose launcher is slow once
    return own


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:8]) or type(error).__name__


def _print(text: str) -> None:
    """Straight to the descriptor: the main thread may hold any lock."""
    with suppress(OSError):  # nobody may be listening there
        os.write(STANDARD_ERROR, f"{text}\n".encode())
