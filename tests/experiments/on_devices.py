"""Run command lines of the experiments one after the other in one process, for `test_mesh`.

    python on_devices.py '[["lm", "--steps", "20"], [7, "lm", "--steps", "20"]]'

A number before the words is the step at which the process gets SIGTERM. The last line printed is
the exit codes, and how many training batches were made.
"""

import json
import os
import signal
import sys

from experiments.__main__ import main
from experiments.data.packed import Packed

made = Packed.batch
state = {"at": None, "steps": 0}


def batch(self, step, size):
    if self.seed is not None:
        state["steps"] = max(state["steps"], step + 1)
        if step == state["at"]:
            os.kill(os.getpid(), signal.SIGTERM)
    return made(self, step, size)


if __name__ == "__main__":
    Packed.batch = batch
    codes = []
    for words in json.loads(sys.argv[1]):
        state["at"] = words.pop(0) if isinstance(words[0], int) else None
        codes.append(main(words))
    print(json.dumps({"codes": codes, "steps": state["steps"]}), flush=True)
