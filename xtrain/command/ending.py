"""How a command ends: one exit code, and one line for all that is not a bug.

0 done   1 internal error   2 usage   128 + n interrupted by signal n
"""

import sys
import traceback
from collections.abc import Callable

from xtrain.command.signals import leaving
from xtrain.command.streams import shown, sturdy
from xtrain.errors import Interrupted, OutOfDeviceMemory, UsageError, WriteError, is_of_the_disk


def run_command(program: str, function: Callable[..., int], *arguments: object) -> int:
    """The exit code of a command: its streams are sturdy, and signals end it in order."""
    with leaving(program), sturdy() as (stdout, _):
        code = guarded(program, function, *arguments)
        stdout.flush()
        if stdout.failure is None or stdout.reader_is_gone:
            return code
        print(f"{program}: cannot write stdout: {stdout.failure.strerror}", file=sys.stderr)
        return code or 1


def guarded(program: str, function: Callable[..., int], *arguments: object) -> int:
    """The exit code of a call, whatever it raises."""
    try:
        return function(*arguments)
    except UsageError as error:
        code, line = 1 if isinstance(error, OutOfDeviceMemory) else 2, str(error)
    except Interrupted as error:
        code, line = 128 + error.signal, str(error)
    except KeyboardInterrupt:
        code, line = 130, "interrupted"
    except MemoryError as error:
        code, line = 1, f"memory is full: {error}"
    except Exception as error:
        code = 1
        if not isinstance(error, WriteError) and not is_of_the_disk(error):
            print(shown(traceback.format_exc()), end="", file=sys.stderr)
            return code
        line = str(error)
    print(f"{program}: {shown(' '.join(line.split()))}", file=sys.stderr)
    return code
