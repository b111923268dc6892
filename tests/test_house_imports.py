"""What `import attention_jax` costs, and what it leaves alone, as a fresh interpreter tells."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def ask(program: str) -> dict:
    """Runs `program`, which prints one line of JSON, in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_front_door_loads_nothing_that_it_does_not_need():
    loaded = ask(
        "import sys, json, attention_jax; print(json.dumps({'modules': sorted(sys.modules)}))"
    )["modules"]
    heavy = {"flax", "optax", "orbax", "matplotlib", "hypothesis", "beartype", "experiments"}
    assert not heavy & {name.split(".")[0] for name in loaded}
    assert not [name for name in loaded if name.startswith("jax.experimental.pallas")]
    assert not [name for name in loaded if name.startswith("attention_jax.nnx")]


def test_importing_starts_no_device_and_changes_no_setting():
    program = """
import json, jax
before = dict(jax.config.values)
import attention_jax, attention_jax.nnx, attention_jax.testing
after = dict(jax.config.values)
changed = sorted(k for k in after if before.get(k) != after[k])
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend runs
print(json.dumps({"changed": changed, "devices": len(jax.devices("cpu"))}))
"""
    assert ask(program) == {"changed": [], "devices": 3}


def test_the_library_adds_little_to_the_time_jax_takes():
    program = """
import json, time
import jax, jax.numpy, chex, einops, jaxtyping
start = time.perf_counter()
import attention_jax
print(json.dumps({"seconds": time.perf_counter() - start}))
"""
    assert ask(program)["seconds"] < 2.0  # about 0.1 s; the rest is room for a busy machine
