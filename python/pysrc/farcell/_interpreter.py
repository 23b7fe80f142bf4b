"""The native module works in the main interpreter of a process alone.

From Python 3.12 on the native module is refused to others by Python itself. Before,
it would come in, with the classes of the main one, and confuse the two.
"""

import sys

if sys.version_info < (3, 12):
    try:
        import _xxsubinterpreters as _interpreters
    except ImportError:
        # No program makes any here.
        pass
    else:
        if _interpreters.get_current() != _interpreters.get_main():
            raise ImportError(
                "farcell works in the main interpreter of a process and in no sub-interpreter: "
                "use threads, or processes of multiprocessing, to which handles can be sent"
            )
