"""The studies, one a file, found by scanning this folder.

A study is a frozen dataclass derived from `experiments.core.settings.StudyOptions`. Its docstring
is its label: the question, the paper and table, the command, the expected time and result. Its
module stays light (no JAX at import), so that ``--help`` answers at once.
"""

import importlib
import pkgutil

from experiments.core.settings import StudyOptions, TrainingOptions

# The order in which they are listed; others come after these.
_ORDER = (
    "compare", "scaling", "cost", "bench", "long", "positions", "distill", "prune", "stability",
    "lm", "doctor",
)  # fmt: skip


def _found() -> dict[str, type[StudyOptions]]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if not module.name.endswith("_report"):  # of another file, which loads it when it is done
            importlib.import_module(module.name)
    kinds = StudyOptions.__subclasses__() + TrainingOptions.__subclasses__()
    studies = {kind.study: kind for kind in kinds if kind.__module__.startswith(__name__)}
    return dict(sorted(studies.items(), key=lambda item: (*_ORDER, item[0]).index(item[0])))


STUDIES: dict[str, type[StudyOptions]] = _found()
