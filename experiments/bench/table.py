"""The whole table of cases, in the order of the report."""

from experiments.bench.contest import Case


def table() -> list[Case]:
    """Every case there is; nothing is compiled or run yet."""
    from experiments.bench import accelerator, exact, families, modules

    return [*exact.cases(), *families.cases(), *modules.cases(), *accelerator.cases()]
