"""What every pass stands on: an editable view of a step function's dataflow block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tvm import IRModule, relax

from xpuc.ir import ops, scope

Var = Any
Expr = Any
Visit = Callable[["Editor", Var, Expr], "Expr | None"]


@dataclass
class Report:
    """What a pass did to a step: how many matches it rewrote, and why it left others."""

    applied: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # reason -> matches

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def join(self, other: Report) -> None:
        """Take in the report of another variant of the same step: the larger numbers stand."""
        self.applied = max(self.applied, other.applied)
        for reason, matches in other.refused.items():
            self.refused[reason] = max(matches, self.refused.get(reason, 0))


class Editor:
    """One function being rewritten, binding by binding, from first to last.

    `definition`, `users`, `only_user` and `readers` look at the function as it was; `emit` adds to
    the new one, `new` translates an old operand. A binding whose variable was given to `replace` is
    dropped when its turn comes; what nothing reads any more is dropped at the end.
    """

    def __init__(self, name: str, function: relax.Function, report: Report) -> None:
        self.name, self.function, self.report = name, function, report
        self.memo: dict[Var, Var] = {}  # a pass's own: what it has emitted for an old variable
        blocks = function.body.blocks
        assert len(blocks) == 1, "a step is one dataflow block"
        self.bindings = list(blocks[0].bindings)
        self._definitions = {b.var: b.value for b in self.bindings}
        self._users: dict[Var, list[tuple[Var, Expr]]] = {}
        for b in self.bindings:
            for operand in set(_operands(b.value)):
                self._users.setdefault(operand, []).append((b.var, b.value))
        self._new: dict[Var, Expr] = {}
        self.builder = relax.BlockBuilder()

    def definition(self, var: Var, name: str | None = None) -> Expr | None:
        """The call that computes `var`, if it is one (of the operation `name`)."""
        value = self._definitions.get(var)
        if value is None or ops.name_of(value) is None:
            return None
        return value if name in (None, ops.name_of(value)) else None

    def users(self, var: Var) -> list[tuple[Var, Expr]]:
        """The bindings (variable, value) that read `var`."""
        return self._users.get(var, [])

    def only_user(self, var: Var, name: str) -> tuple[Var, Expr] | None:
        """The single reader of `var`, if it is a call of the operation `name`."""
        users = self.users(var)
        return users[0] if len(users) == 1 and ops.name_of(users[0][1]) == name else None

    def readers(self, var: Var, name: str) -> Iterator[tuple[Var, Expr]]:
        """The calls of the operation `name` that read `var`."""
        return ((v, e) for v, e in self.users(var) if ops.name_of(e) == name)

    def new(self, operand: Expr) -> Expr:
        """What stands for an old operand in the new function."""
        return self._new.get(operand, operand)

    def emit(self, value: Expr) -> Var:
        """Add a value (its operands already new) and name it."""
        return self.builder.emit(value)

    def op(self, name: str, *operands: Expr, **attrs: Any) -> Var:
        """Emit an operation; old operands are translated, new ones stay."""
        return self.emit(ops.call(name, *(self.new(o) for o in operands), **attrs))

    def item(self, value: Var, index: int) -> Var:
        return self.emit(relax.TupleGetItem(value, index))

    def replace(self, old: Var, new: Expr) -> None:
        """From here on `new` stands for `old`, which is no longer computed."""
        self._new[old] = new

    def run(self, visit: Visit) -> relax.Function:
        """Visit every binding; `visit` returns what stands for it now, or None to keep it."""
        with scope.function(self.builder, self.name, self.function.params):
            with self.builder.dataflow():
                for b in self.bindings:
                    if b.var in self._new:
                        continue
                    value = visit(self, b.var, b.value)
                    self._new[b.var] = self._copy(b.value) if value is None else value
                out = self.builder.emit_output(self._new[self.function.body.body])
            self.builder.emit_func_output(out)
        return self.builder.finalize()[self.name]

    def _copy(self, value: Expr) -> Expr:
        if isinstance(value, relax.Var):
            return self.new(value)
        if isinstance(value, relax.TupleGetItem):
            return self.item(self.new(value.tuple_value), value.index)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self.new(f) for f in value.fields])
        return self.emit(relax.Call(value.op, [self.new(a) for a in value.args], value.attrs, []))


def rewrite(module: IRModule, visit: Visit) -> tuple[IRModule, Report]:
    """Apply `visit` to every step function of the module and drop what it made dead."""
    joined, functions = Report(), {}
    for gv, function in module.functions_items():
        report = Report()
        functions[gv.name_hint] = Editor(gv.name_hint, function, report).run(visit)
        joined.join(report)
    return relax.transform.DeadCodeElimination()(IRModule(functions)), joined


def _operands(value: Expr) -> list[Var]:
    if isinstance(value, relax.Var):
        return [value]
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    if isinstance(value, relax.Tuple):
        return [f for f in value.fields if isinstance(f, relax.Var)]
    return [a for a in value.args if isinstance(a, relax.Var)]
