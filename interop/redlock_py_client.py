"""redlock-py: redlock.Redlock. See src/foreign.rs for what it is asked."""

import sys

from redlock import Redlock

manager = Redlock([{"host": "127.0.0.1", "port": int(sys.argv[1])}], retry_count=1)
held = None
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "lock":
        name, milliseconds = arguments
        lock = manager.lock(name, int(milliseconds))
        held = lock or held
        answer = "locked" if lock else "busy"
    elif command == "extend":
        answer = "cannot"
    else:
        # It does not tell whether the lock was its own.
        manager.unlock(held)
        answer = "unlocked"
    print(answer, flush=True)
