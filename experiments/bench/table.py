"""The whole table of cases, in the order of the report."""

from experiments.bench.contest import Case


def table() -> list[Case]:
    """Every case there is; nothing is compiled or run yet."""
    from experiments.bench import accelerator, exact, families, insight, modules

    parts = (exact, families, modules, insight, accelerator)
    return [case for part in parts for case in part.cases()]
