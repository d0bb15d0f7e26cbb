"""Module: attributes that are parameters or modules are its children, and nothing else."""

from collections.abc import Iterator

from xtrain.engine.params import Parameter


class Module:
    """A tree of parameters. Names are attribute paths: `layers.0.self_attn.o_proj.weight`."""

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """(name, parameter) pairs in the order in which attributes were set."""
        for name, child in vars(self).items():
            path = f"{prefix}{name}"
            if isinstance(child, Parameter):
                yield path, child
            elif isinstance(child, Module):
                yield from child.named_parameters(f"{path}.")
            elif isinstance(child, list):
                for i, item in enumerate(child):
                    if isinstance(item, Module):
                        yield from item.named_parameters(f"{path}.{i}.")
