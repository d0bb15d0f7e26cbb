"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere.

Everything goes to stderr, so that stdout holds results only.
"""

import sys
import time
from types import TracebackType

from xtrain.command.streams import shown

PLAIN_EVERY_S = 10.0


class Progress:
    """Shows steps, loss and speed. A context manager; `show` is called once a logged step."""

    def __init__(self, total: int, start: int):
        self.total, self.start = total, start
        self._bar = self._task = None
        self._printed = 0.0

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                "train", total=self.total, completed=self.start, facts=""
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: int, values: dict) -> None:
        """A training record: loss, lr, tok_s."""
        facts = f"loss {values['loss']:.4f}  {values['tok_s']:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
            return
        now = time.monotonic()
        if now - self._printed >= PLAIN_EVERY_S or step == self.total:
            self._printed = now
            self.say(f"step {step}/{self.total}  {facts}  lr {values['lr']:.2e}")

    def say(self, line: str) -> None:
        """A line above the bar."""
        line = shown(line)
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)
