"""The lock of Python's redis package: redis.lock.Lock. See src/foreign.rs for what it is asked."""

import sys

import redis
from redis.exceptions import LockError

server = redis.Redis(port=int(sys.argv[1]))
held = None
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "lock":
        name, milliseconds = arguments
        lock = server.lock(name, timeout=int(milliseconds) / 1000, blocking=False)
        held = lock if lock.acquire() else held
        answer = "locked" if held is lock else "busy"
    elif command == "extend":
        try:
            held.reacquire()
            answer = "extended"
        except LockError:
            answer = "lost"
    else:
        try:
            held.release()
            answer = "unlocked"
        except LockError:
            answer = "lost"
    print(answer, flush=True)
