"""Modules as text and back: the TVMScript of `xpuc compile --dump-ir`, read by `xpuc opt`.

TVM has a parser of its own, which evaluates what it reads and takes 13 s for a model of 30 layers.
This one knows only what a dump holds, takes half a second, and runs nothing of it:

    metadata = tvm.ir.load_json(...)                    constants, by kind and number
    n = TypeVar("n")                                    symbols
    class Module:
        def decode(tokens: R.Tensor((n,), dtype="int32"), ...) -> ...:
            with R.dataflow():
                lv: R.Tensor(...) = R.xpuc.embed(tokens, token_embd_weight, scale=1.0)
                lv1: R.Tensor(...) = lv[0]
                gv: R.Tensor(...) = lv1
                R.output(gv)
            return gv
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from tvm import IRModule, ir, relax, tirx
from tvm_ffi import structural_equal

from xpuc.errors import FileError, UnsupportedError, nearest
from xpuc.ir import ops

Type = Any
Var = Any

_HINT = "xpuc opt reads what xpuc compile --dump-ir writes"


def to_text(module: IRModule) -> str:
    """The module as TVMScript, constants included; dots in names become underscores."""
    return f"{module.script(show_meta=True)}\n"


def parse(text: str, path: str = "text") -> IRModule:
    """The module that `to_text` wrote. FileError and UnsupportedError name the line of `path`."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None) or 1
        message = getattr(error, "msg", None) or str(error)
        raise FileError(f"{path}:{line}: not a dump of a module: {message}", _HINT) from None
    reader = _Reader(path)
    for statement in body:
        reader.top_level(statement)
    if not reader.functions:
        raise FileError(f"{path}: holds no module", _HINT)
    return IRModule(reader.functions)


class _Reader:
    """What has been read of a module so far."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.metadata: Any = {}
        self.functions: dict[str, Any] = {}

    def top_level(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(
                targets=[ast.Name("metadata")], value=ast.Call(args=[ast.Constant(str() as json)])
            ):
                self._read_metadata(node, json)
            case (
                ast.Assign(value=ast.Call(func=ast.Name("TypeVar")))
                | ast.Import()
                | ast.ImportFrom()
            ):
                pass
            case ast.ClassDef(body=functions):
                for function in functions:
                    if not isinstance(function, ast.FunctionDef):
                        raise self.refusal(function)
                    self.functions[function.name] = _FunctionReader(self, function).read()
            case _:
                raise self.refusal(node)

    def _read_metadata(self, node: ast.stmt, json: str) -> None:
        try:
            self.metadata = ir.load_json(json)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = (str(error).splitlines() or ["empty"])[0]
            raise FileError(f"{self.at(node)}: damaged constants: {reason}", _HINT) from None

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def refusal(self, node: ast.AST, what: str = "not part of a dump") -> FileError:
        shown = ast.unparse(node).splitlines()[0]
        return FileError(f"{self.at(node)}: {what}: {shown[:80]}", _HINT)


class _FunctionReader:
    """One function: its variables by name, its bindings emitted one by one."""

    def __init__(self, reader: _Reader, node: ast.FunctionDef) -> None:
        self.reader, self.node = reader, node
        self.symbols: dict[str, Var] = {}
        self.values: dict[str, Var] = {}
        self.builder = relax.BlockBuilder()

    def read(self) -> relax.Function:
        for argument in self.node.args.args:
            if argument.annotation is None:
                raise self.reader.refusal(argument, "a parameter without a type")
            self.values[argument.arg] = relax.Var(argument.arg, self.type_of(argument.annotation))
        params = list(self.values.values())
        statements, output = self.dataflow()
        bindings = [self.binding(statement, output) for statement in statements]
        if output not in self.values:
            raise self.reader.refusal(self.node, f"{output} is not computed")
        last = self.values[output]
        body = self.builder.normalize(relax.SeqExpr([relax.DataflowBlock(bindings)], last))
        function = relax.Function(params, body, last.ty)
        return function.with_attr("global_symbol", self.node.name)

    def dataflow(self) -> tuple[list[ast.AnnAssign], str]:
        """The bindings of the function, and the name of the one it returns."""
        match self.node.body:
            case [
                ast.With(body=[*statements, ast.Expr(ast.Call(args=[ast.Name(output)]))]),
                ast.Return(ast.Name(returned)),
            ] if output == returned:
                wrong = next((s for s in statements if not isinstance(s, ast.AnnAssign)), None)
                if wrong is None:
                    return [s for s in statements if isinstance(s, ast.AnnAssign)], output
                raise self.reader.refusal(wrong)
        raise self.reader.refusal(self.node, "not one dataflow block and its result")

    def binding(self, node: ast.AnnAssign, output: str) -> relax.VarBinding:
        """One line: its type is inferred, and must be the declared one."""
        if not isinstance(node.target, ast.Name) or node.value is None:
            raise self.reader.refusal(node)
        name = node.target.id
        value = self.infer(node, self.value_of(node.value))
        if not structural_equal(self.type_of(node.annotation), value.ty):
            raise self.reader.refusal(node, f"{name} is {value.ty}")
        make = relax.Var if name == output else relax.DataflowVar
        self.values[name] = make(name, value.ty)
        return relax.VarBinding(self.values[name], value)

    def infer(self, node: ast.AST, value: Any) -> Any:
        try:
            return self.builder.normalize(value)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise self.reader.refusal(node, f"wrong operands or attributes ({reason})") from None

    def value_of(self, node: ast.expr) -> Any:
        match node:
            case ast.Name():
                return self.operand(node)
            case ast.Subscript(value=ast.Name(), slice=ast.Constant(int() as index)):
                value = self.operand(node.value)
                if not isinstance(value.ty, relax.TupleType) or not 0 <= index < len(
                    value.ty.fields
                ):
                    raise self.reader.refusal(node, "no such item")
                return relax.TupleGetItem(value, index)
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=ast.Name("R"), attr="xpuc"), attr=name)
            ):
                if name not in ops.OPS:
                    raise UnsupportedError(
                        f"{self.reader.at(node)}: unknown operation: {name!r}",
                        nearest(name, ops.OPS),
                    )
                attrs = {str(k.arg): self.literal(k.value) for k in node.keywords}
                return ops.call(name, *map(self.operand, node.args), **attrs)
        raise self.reader.refusal(node)

    def operand(self, node: ast.expr) -> Any:
        """A variable by name, or a constant of the metadata."""
        match node:
            case ast.Name(name) if name in self.values:
                return self.values[name]
            case ast.Name(name):
                raise self.reader.refusal(node, "is not computed before it is read")
            case ast.Subscript(
                value=ast.Subscript(value=ast.Name("metadata"), slice=ast.Constant(kind)),
                slice=ast.Constant(int() as index),
            ):
                if kind in self.reader.metadata and 0 <= index < len(self.reader.metadata[kind]):
                    return self.reader.metadata[kind][index]
                raise self.reader.refusal(node, "no such constant")
        raise self.reader.refusal(node)

    def literal(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self.reader.refusal(node, "not a number, text or list of them") from None

    def type_of(self, node: ast.expr) -> Type:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name("R"), attr="Tensor"),
                args=[ast.Tuple(elts=shape)],
                keywords=[ast.keyword("dtype", ast.Constant(str() as dtype))],
            ):
                return ops.tensor(list(self.dimensions(shape)), dtype)
            case ast.Call(func=ast.Attribute(value=ast.Name("R"), attr="Tuple"), args=fields):
                return relax.TupleType([self.type_of(field) for field in fields])
        raise self.reader.refusal(node, "not a type")

    def dimensions(self, shape: list[ast.expr]) -> Iterator[Any]:
        for node in shape:
            match node:
                case ast.Constant(int() as size):
                    yield size
                case ast.Name(name):
                    yield self.symbols.setdefault(name, tirx.Var(name, "int64"))
                case _:
                    raise self.reader.refusal(node, "not a dimension")
