"""The studies, one a file: a new one is a new file here and one line in ``STUDIES``.

A study is a frozen dataclass derived from `experiments.core.settings.StudyOptions`. Its docstring
is its label: the question, the paper and table, the command, the expected time and result. Its
module stays light (no JAX at import), so that ``--help`` answers at once.
"""

from experiments.core.settings import StudyOptions
from experiments.studies.bench import Bench
from experiments.studies.compare import Compare
from experiments.studies.cost import Cost
from experiments.studies.distill import Distill
from experiments.studies.doctor import Doctor
from experiments.studies.lm import Lm
from experiments.studies.long import Long
from experiments.studies.positions import Positions
from experiments.studies.prune import Prune
from experiments.studies.scaling import Scaling
from experiments.studies.stability import Stability

STUDIES: dict[str, type[StudyOptions]] = {
    "compare": Compare,
    "scaling": Scaling,
    "cost": Cost,
    "bench": Bench,
    "long": Long,
    "positions": Positions,
    "distill": Distill,
    "prune": Prune,
    "stability": Stability,
    "lm": Lm,
    "doctor": Doctor,
}
