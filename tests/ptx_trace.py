"""Runs the integers of a Hopper kernel's PTX on the CPU: which blocks it loads, multiplies and stores, in which order.

One thread of every warp is followed, the one that is elected; warps advance from barrier to barrier. Floating-point values
are unknown. Copies land at once, so this finds wrong addresses, wrong loop counts, copies into blocks that are still being
multiplied and waits that would never end, and no races of the copy engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Trace", "parameters", "run"]

Box = tuple[int, tuple[int, ...]]  # parameter of the descriptor, coordinates: innermost first
_SHARED = 1024  # where shared memory begins
_WORDS = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^\s,]+")


@dataclass
class Trace:
    """What happened.

    Attributes:
        products: of each warp, one entry for each group of matrix instructions: the ``(left, right)`` boxes that they
            multiply.
        events: ``("load", box)``, ``("product", warp)`` and ``("store", box)`` in order, of all warps.
    """

    products: list[list[list[tuple[Box, Box]]]]
    events: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class _Barrier:
    arrivals: int
    phase: int = 0
    pending: int = 0
    bytes: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals


@dataclass
class _Machine:
    program: int
    parameters: dict[int, int]  # values of scalar and pointer parameters
    memory: dict[int, int]  # 32-bit words by address
    message_bytes: dict[int, int]  # of a load by the descriptor of a parameter
    trace: Trace
    barriers: dict[int, _Barrier] = field(default_factory=dict)
    boxes: dict[int, tuple[int, Box]] = field(default_factory=dict)  # by shared address: bytes, what lies there
    in_use: list[list[set[int]]] = field(default_factory=list)  # of each warp: addresses of groups not waited for

    def holding(self, address: int) -> int:
        return max(base for base, (size, _) in self.boxes.items() if base <= address < base + size)

    def load(self, address: int, box: Box, barrier: int) -> None:
        size = self.message_bytes[box[0]]
        self.trace.events.append(("load", box))
        for groups in self.in_use:
            assert all(address not in group for group in groups), f"{box} over a block that is being multiplied"
        self.boxes = {
            base: held for base, held in self.boxes.items() if base + held[0] <= address or base >= address + size
        }
        self.boxes[address] = (size, box)
        self.barriers[barrier].bytes -= size
        self.barriers[barrier].settle()


def _parse(ptx: str) -> tuple[list[tuple[str, bool, str, list[str]]], dict[str, int]]:
    body = ptx[ptx.index("{", ptx.index(".reqntid")) + 1 :]
    code: list[tuple[str, bool, str, list[str]]] = []
    labels: dict[str, int] = {}
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        label = re.match(r"(\$\w+):", line)
        if label:
            labels[label[1]] = len(code)
            line = line[label.end() :].strip()
        if not line or line[0] in ".{})" or "waitLoop" in line:
            continue
        for statement in filter(None, (part.strip() for part in line.split(";"))):
            found = re.match(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", statement)
            assert found is not None, statement
            code.append((found[2] or "", found[1] == "!", found[3], _WORDS.findall(found[4])))
    return code, labels


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _integer(operation: str, x: Sequence[int]) -> int | None:
    """The result of an instruction on integers; ``None`` for any other. ``x``: its operands, unsigned."""
    name, *kinds = operation.split(".")
    kind = kinds[-1]
    bits = int(kind[1:]) if kind[1:].isdigit() else 1
    signed = [_signed(v, bits) for v in x] if kind[0] == "s" else list(x)
    match name:
        case "mov" | "cvta":
            return x[0]
        case "add":
            return x[0] + x[1]
        case "sub":
            return x[0] - x[1]
        case "mul" if "wide" in kinds or kind[0] in "su":
            return signed[0] * signed[1]
        case "mad":
            return signed[0] * signed[1] + (x[2] if "lo" in kinds else _signed(x[2], 64))
        case "shl":
            return x[0] << x[1]
        case "shr":
            return signed[0] >> x[1]
        case "and":
            return x[0] & x[1]
        case "or":
            return x[0] | x[1]
        case "xor":
            return x[0] ^ x[1]
        case "not":
            return ~x[0]
        case "bfe":
            return (x[0] >> x[1]) & ((1 << x[2]) - 1)
        case "selp":
            return x[0] if x[2] else x[1]
        case "min":
            return min(signed)
        case "max":
            return max(signed)
        case "setp":
            compare = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}
            return int(getattr(signed[0], compare[kinds[0]])(signed[1]))
        case "cvt" if kinds[0][0] in "su" and kinds[1][0] in "su":
            return _signed(x[0], int(kinds[1][1:])) if kinds[1][0] == "s" else x[0] & ((1 << int(kinds[1][1:])) - 1)
    return None


class _Warp:
    def __init__(self, machine: _Machine, number: int, code: Any, labels: dict[str, int]) -> None:
        self.machine, self.number, self.code, self.labels = machine, number, code, labels
        self.values: dict[str, int | None] = {}
        self.groups: list[set[int]] = []
        machine.in_use.append(self.groups)
        self.open: list[tuple[Box, Box]] = []
        self.used: set[int] = set()

    def value(self, word: str) -> int | None:
        if word.startswith("%"):
            special = {"%tid.x": 32 * self.number, "%ctaid.x": self.machine.program}
            return special[word] if word in special else self.values.get(word)
        if word == "global_smem":
            return _SHARED
        parameter = re.search(r"_param_(\d+)$", word)
        if parameter:
            return self.machine.parameters[int(parameter[1])]
        return None if re.match(r"0[fd][0-9a-fA-F]{8}", word) else int(word, 0)

    def known(self, word: str) -> int:
        value = self.value(word)
        assert value is not None, f"{word} depends on numbers that are not integers"
        return value

    def address(self, word: str) -> int:
        base, _, offset = word.strip("[] ").partition("+")
        return self.known(base.strip()) + (int(offset, 0) if offset else 0)

    def box(self, word: str) -> Box:
        found = re.match(r"\[\s*(%\w+),\s*\{(.*)\}\s*\]", word)
        assert found is not None, word
        inner = tuple(_signed(self.known(c.strip()), 32) for c in found[2].split(","))
        descriptors = {value: number for number, value in self.machine.parameters.items()}
        return descriptors[self.known(found[1])], inner

    def set(self, word: str, value: int | None) -> None:
        bits = {"%p": 1, "%rs": 16, "%r": 32, "%rd": 64}[re.match(r"%[a-z]+", word)[0]]  # type: ignore[index]
        self.values[word] = None if value is None else value & ((1 << bits) - 1)

    def run(self) -> Iterator[str]:
        """Yields at every barrier of the program."""
        at = 0
        while at < len(self.code):
            predicate, inverted, operation, words = self.code[at]
            at += 1
            if predicate:
                if operation.split(".")[0] in ("st", "ld") and self.values.get(predicate) is None:
                    continue
                if bool(self.known(predicate)) == inverted:
                    continue
            if operation.startswith("bra"):
                at = self.labels[words[0]]
            elif operation.startswith("ret"):
                return
            elif operation.startswith("bar.sync"):
                yield "barrier"
            elif operation.startswith("mbarrier.try_wait"):
                barrier, parity = self.address(words[1]), self.known(words[2])
                while self.machine.barriers[barrier].phase % 2 == parity:
                    yield "wait"
            else:
                self.execute(operation, words)

    def execute(self, operation: str, words: list[str]) -> None:
        machine = self.machine
        if operation.startswith("mbarrier.init"):
            count = self.known(words[1])
            machine.barriers[self.address(words[0])] = _Barrier(count, pending=count)
        elif operation.startswith("mbarrier.arrive.expect_tx"):
            barrier = machine.barriers[self.address(words[1])]
            barrier.pending -= 1
            barrier.bytes += self.known(words[2])
            barrier.settle()
        elif operation.startswith("cp.async.bulk.tensor") and operation.split(".")[5].startswith("shared"):
            machine.load(self.address(words[0]), self.box(words[1]), self.address(words[2]))
        elif operation.startswith("cp.async.bulk.tensor"):
            machine.trace.events.append(("store", self.box(words[0])))
        elif operation.startswith("wgmma.mma_async"):
            left, right = (machine.holding((self.known(word) & 0x3FFF) << 4) for word in words[1:3])
            self.used |= {left, right}
            self.open.append((machine.boxes[left][1], machine.boxes[right][1]))
        elif operation.startswith("wgmma.commit_group"):
            machine.trace.products[self.number].append(self.open)
            machine.trace.events.append(("product", self.number))
            self.groups.append(self.used)
            self.open, self.used = [], set()
        elif operation.startswith("wgmma.wait_group"):
            del self.groups[: max(0, len(self.groups) - int(words[0]))]
        elif operation.startswith("ld.param"):
            self.set(words[0], self.value(words[1].strip("[]")))
        elif operation.startswith("ld.global"):
            self.set(words[0].strip("{} "), machine.memory.get(self.address(words[1])))
        elif operation.startswith("elect.sync"):
            self.set(words[0].split("|")[1], 1)
        elif operation.startswith("shfl.sync.idx"):
            self.set(words[0].split("|")[0], self.value(words[1]))
        elif words and words[0].startswith("%") and re.match(r"%(p|r|rd|rs)\d+$", words[0]):
            inputs = [self.value(word) if not word.startswith("{") else None for word in words[1:]]
            if operation.endswith(("f32", "f16", "f16x2", "bf16", "bf16x2")) or any(v is None for v in inputs):
                self.set(words[0], self.boolean(operation, inputs))
                return
            self.set(words[0], _integer(operation, [v for v in inputs if v is not None]))

    @staticmethod
    def boolean(operation: str, inputs: list[int | None]) -> int | None:
        """``and`` and ``or`` of predicates of which one is unknown."""
        if operation == "and.pred" and 0 in inputs:
            return 0
        return 1 if operation == "or.pred" and 1 in inputs else None


def parameters(ptx: str) -> dict[str, list[int]]:
    """Numbers of the kernel's parameters that are ``"descriptors"``, ``"pointers"`` and ``"integers"`` of 32 bits."""
    head = ptx[: ptx.index(".reqntid")]
    patterns = {
        "descriptors": r"_param_(\d+)\[128\]",
        "pointers": r"\.ptr .*_param_(\d+)",
        "integers": r"\.u32 \S+_param_(\d+)",
    }
    return {kind: [int(n) for n in re.findall(pattern, head)] for kind, pattern in patterns.items()}


def run(
    ptx: str, warps: int, program: int, values: dict[int, int], memory: dict[int, int], message_bytes: dict[int, int]
) -> Trace:
    """Runs one program.

    Args:
        values: of parameters by number: addresses of pointers, integers. Others must not matter.
        memory: 32-bit words by address.
        message_bytes: of one load through the descriptor of a parameter.

    Raises:
        AssertionError: a copy into a block that is still being multiplied, waits that never end, or warps that part.
    """
    trace = Trace(products=[[] for _ in range(warps)])
    numbers = re.findall(r"_param_(\d+)[,\[\n]", ptx[: ptx.index(".reqntid")])
    everything = {int(n): values.get(int(n), (int(n) + 1) << 12) for n in numbers}
    machine = _Machine(program, everything, memory, message_bytes, trace)
    code, labels = _parse(ptx)
    running = [_Warp(machine, number, code, labels).run() for number in range(warps)]
    while True:
        states = [next(warp, "end") for warp in running]
        while "wait" in states:  # for what other warps have started by now
            again = [
                next(warp, "end") if state == "wait" else state for warp, state in zip(running, states, strict=True)
            ]
            assert again != states, "waits that never end"
            states = again
        assert len(set(states)) == 1, f"some warps end where others wait: {states}"
        if states[0] == "end":
            return trace
