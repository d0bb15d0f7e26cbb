"""What a mutant is: one line of the project replaced by a wrong one, and who must notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in `file` and becomes `new`.

    test: the fast test, a pytest node, that must fail. gate: `t6:step_inputs`, a gate and one of
    its measures, whose bars must be missed; "" where no milestone speaks of it.
    """

    file: str
    old: str
    new: str
    test: str
    gate: str = ""

    @property
    def name(self) -> str:
        """Short, and the same as long as the mutant is."""
        return f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def apply(self, text: str) -> str:
        """The file with the fault. Raises ValueError unless `old` stands there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands there {text.count(self.old)} times")
        return text.replace(self.old, self.new)
