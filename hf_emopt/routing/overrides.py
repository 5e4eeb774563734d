"""``matrix_modules`` and ``aux_modules``: what the user says of parameters, by regular expressions for dotted names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.parameter import Decision, aux, matrix


def _compile(pattern: str, option: str) -> re.Pattern[str]:
    try:
        # A match begins at the start or after a dot, and stops before a dot or at the end.
        return re.compile(rf"(?<![^.])(?:{pattern})(?![^.])")
    except re.error as error:
        raise ValueError(f"{option}: {pattern!r} is not a regular expression ({error})") from None


class Patterns:
    """One option's patterns.

    A pattern may match anywhere in the dotted name, but only whole components: ``gate`` matches ``mlp.gate.weight`` and
    neither ``mlp.gate_proj.weight`` nor ``attn_gated_norm.weight``; ``layers\\.[0-3]`` matches the first four layers.

    Args:
        option: its name, for messages.

    Raises:
        ValueError: a pattern is empty or not a regular expression.
    """

    def __init__(self, patterns: str | Sequence[str] | None, option: str) -> None:
        self.option = option
        texts = [] if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)
        if any(not text for text in texts):
            raise ValueError(f"{option}: a pattern is empty; give the dotted name of a module or parameter")
        self._compiled = {text: _compile(text, option) for text in texts}

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def find(self, names: Iterable[str]) -> str | None:
        """The first pattern that matches one of ``names``, or None."""
        candidates = list(names)
        found = (text for text, compiled in self._compiled.items() if any(map(compiled.search, candidates)))
        return next(found, None)

    def check_matched(self, trainable: Sequence[str], frozen: Sequence[str] = ()) -> None:
        """Every pattern must match a trainable parameter.

        Raises:
            ValueError: names the pattern, and names that are close to it.
        """
        for text, compiled in self._compiled.items():
            if any(compiled.search(name) for name in trainable):
                continue
            hit = next((name for name in frozen if compiled.search(name)), None)
            if hit is not None:
                raise ValueError(
                    f"{self.option}: {text!r} matches frozen parameters only, such as {hit}; unfreeze it or drop it"
                )
            last = re.split(r"\\?\.", text)[-1]
            components = sorted({part for name in trainable for part in name.split(".") if not part.isdigit()})
            close = difflib.get_close_matches(last, components, n=5, cutoff=0.5)
            contains = [part for part in components if last in part and part not in close]
            near = ", ".join((close + contains)[:6]) or ", ".join(components[:8])
            raise ValueError(
                f"{self.option}: {text!r} matches no parameter. Patterns match whole dotted components; "
                f"close names: {near}"
            )


class Overrides:
    """The patterns of ``matrix_modules`` and ``aux_modules``, and what they met while parameters were routed."""

    def __init__(self, matrix_modules: str | Sequence[str] | None, aux_modules: str | Sequence[str] | None) -> None:
        self._matrix, self._aux = Patterns(matrix_modules, "matrix_modules"), Patterns(aux_modules, "aux_modules")
        self._vectors: dict[str, str] = {}
        self._used: set[str] = set()

    def check_matched(self, trainable: Sequence[str], frozen: Sequence[str] = ()) -> None:
        """Raises ``ValueError`` for a pattern that matches no trainable parameter."""
        for patterns in (self._matrix, self._aux):
            patterns.check_matched(trainable, frozen)

    def decide(
        self, names: Sequence[str], label: str, shape: tuple[int, ...], views: Callable[[], tuple[MatrixView, ...]]
    ) -> Decision | None:
        """The decision of the user for one parameter, ``None`` where no pattern names it.

        Args:
            label: the name for messages.
            shape: global shape; ``matrix_modules`` does not apply to a vector.
            views: returns the matrices of the parameter.

        Raises:
            ValueError: both options name the parameter.
        """
        wanted, refused = self._matrix.find(names), self._aux.find(names)
        if wanted is not None and sum(size > 1 for size in shape) < 2:
            self._vectors.setdefault(wanted, label)
            wanted = None
        if wanted is not None and refused is not None:
            raise ValueError(
                f"{label} is claimed by matrix_modules {wanted!r} and by aux_modules {refused!r}; keep one of them"
            )
        if refused is not None:
            return aux(f"aux_modules {refused!r}", "override")
        if wanted is None:
            return None
        self._used.add(wanted)
        return matrix(views(), f"matrix_modules {wanted!r}", "override")

    def check_used(self) -> None:
        """Raises ``ValueError`` for a pattern of ``matrix_modules`` that met nothing but vectors."""
        for pattern, name in self._vectors.items():
            if pattern not in self._used:
                raise ValueError(
                    f"matrix_modules {pattern!r}: {name} is a vector, which cannot be a matrix; name a parameter with two "
                    "dimensions larger than 1, or drop the pattern"
                )
