"""Options that are the fields of a struct: a command's parameter of its class stands for them.

    @dataclass(frozen=True, kw_only=True)
    class Waiting(CommandOptions):
        wait: Annotated[int, typer.Option("--wait")] = 0

    @with_options
    def command(name: str, options: Waiting) -> None: ...      # command NAME --wait N

Cost: some µs for each option when a command is registered. Threads: pure.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


class CommandOptions:
    """The base of a struct whose fields are options, each annotated as typer reads it."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of a class of `CommandOptions` stand for its fields."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    options = {
        one.name: (one.annotation, inspect.signature(one.annotation, eval_str=True).parameters)
        for one in own
        if isinstance(one.annotation, type) and issubclass(one.annotation, CommandOptions)
    }

    @wraps(command)
    def run(*given: Any, **arguments: Any) -> None:
        made = {
            name: make(**{option: arguments.pop(option) for option in names})
            for name, (make, names) in options.items()
        }
        command(*given, **arguments, **made)

    parameters: list[inspect.Parameter] = []
    for one in own:
        parameters += options[one.name][1].values() if one.name in options else [one]
    use_signature(run, parameters)
    return run


def use_signature(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give a function that takes keyword arguments the signature that typer is to read."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in parameters}
