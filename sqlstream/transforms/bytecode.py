"""What becomes of a value on the stack, as the instructions of Python 3.11 to 3.14 say."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence

ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
"""Names of the instructions that get an attribute."""
_HAS_METHOD_BIT = sys.version_info.minor >= 12
"""An argument of these, not the name `LOAD_METHOD`, says that what they get is called at once."""
_NULL_IS_ABOVE = sys.version_info.minor >= 13
"""Of what is called without an object: NULL is pushed behind it, not before it."""
_CALLS = ("PRECALL",) if sys.version_info.minor == 11 else ("CALL", "CALL_KW")
"""Instructions whose argument is the number of arguments, which are above what they call."""
_PUSHES = tuple("EXTENDED_ARG KW_NAMES LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_GLOBAL LOAD_SMALL_INT NOP PUSH_NULL".split())
"""Beginnings of the names of instructions that take nothing from the stack."""
_TAKES = tuple("BINARY_ BUILD_ CALL COMPARE_ CONTAINS_ FORMAT_ IS_OP LOAD_ATTR LOAD_METHOD UNARY_".split())
"""Beginnings of those that take as many values as it becomes shorter, and one more, for what they put there."""


def is_called_at_once(instruction: dis.Instruction) -> bool:
    """Return whether the attribute that an instruction of `ATTRIBUTE_LOADS` gets is called, and gets nowhere else."""
    return bool((instruction.arg or 0) & 1) if _HAS_METHOD_BIT else instruction.opname == "LOAD_METHOD"


def is_called_later(instructions: Sequence[dis.Instruction]) -> bool:
    """Return whether the value that the first instruction pushes is called, after its arguments, and gets nowhere else.

    Args:
        instructions: That one, `LOAD_GLOBAL` or `LOAD_DEREF`, and all that follow.
    """
    loads, *others = instructions
    num_above = int(_NULL_IS_ABOVE and loads.opname == "LOAD_GLOBAL" and bool((loads.arg or 0) & 1))
    for instruction in others:
        operation, number = instruction.opname, instruction.arg
        effect = dis.stack_effect(instruction.opcode, number, jump=False)
        if instruction.is_jump_target:
            return False
        if operation in _CALLS:
            num_above_called = (number or 0) + int(_NULL_IS_ABOVE) + int(operation == "CALL_KW")
            if num_above <= num_above_called + 1:
                return num_above == num_above_called
        elif not operation.startswith(_PUSHES) and not (operation.startswith(_TAKES) and num_above >= max(1, 1 - effect)):
            return False
        num_above += effect
    return False
