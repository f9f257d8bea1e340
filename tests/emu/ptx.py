"""Inline PTX to C++: each instruction becomes a statement over the functions of the fake driver.

An instruction that has no row in `INSTRUCTIONS` is an error when the kernel is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import emu.inline_asm as inline_asm

Translate = Callable[[re.Match[str], "Operands"], str]

TYPES = {
    "pred": "bool",
    **{f"{sign}{bits}": f"uint{bits}_t" for sign in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
}
ELEMENTS = {"f16": "EMU_F16", "bf16": "EMU_BF16", "s8": "EMU_S8", "u8": "EMU_U8"}


class UnsupportedPtx(NotImplementedError):
    """An instruction the emulator does not know."""


class Operands:
    """The operands of one instruction, as C++."""

    def __init__(self, text: str, expressions: tuple[str, ...]) -> None:
        self.expressions = expressions
        self.texts = _split(text)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        """A register, immediate or [address]: a C++ expression."""
        return self.expression(self.texts[index])

    def vector(self, index: int) -> list[str]:
        """The registers of {a, b}; a scalar is a vector of one."""
        text = self.texts[index]
        inside = text[1:-1] if text.startswith("{") else text
        return [self.expression(part) for part in _split(inside)]

    def tensor(self, index: int) -> tuple[str, list[str]]:
        """The map and the coordinates of TMA's [map, {x, y}]."""
        pointer, coordinates = _split(self.texts[index][1:-1])
        return self.expression(pointer), [
            self.expression(part) for part in _split(coordinates[1:-1])
        ]

    def expression(self, text: str) -> str:
        text = text.strip()
        if text.startswith("["):
            return self.expression(text[1:-1])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"__uint_as_float(0x{text[2:]}u)"
        if sum_ := re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", text):
            return f"emu_offset({self.expression(sum_[1])}, {sum_[2]})"
        if numbered := re.fullmatch(r"%(\d+)", text):
            return f"({self.expressions[int(numbered[1])]})"
        return text.replace("%", "reg_")


def _split(text: str) -> list[str]:
    """Comma-separated operands; commas in brackets and braces stay."""
    depth, parts = 0, [""]
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


# ---- the instructions


def _nothing(_match: re.Match[str], _operands: Operands) -> str:
    return ";"


def _call(form: str) -> Translate:
    """A statement with {0}, {1} for the operands."""
    return lambda _match, operands: form.format(*(operands[i] for i in range(len(operands))))


def _assign(form: str) -> Translate:
    """The first operand gets an expression of the others, {1}, {2}."""
    return _call("emu_set({0}, " + form + ");")


def _load(match: re.Match[str], operands: Operands) -> str:
    registers, address = operands.vector(0), _address(match, operands[1])
    element = f"emu_element<{TYPES[match['type']]}>"
    return " ".join(
        f"emu_set({register}, *{element}({address}, {i}, {len(registers)}));"
        for i, register in enumerate(registers)
    )


def _store(match: re.Match[str], operands: Operands) -> str:
    registers, address = operands.vector(1), _address(match, operands[0])
    element = f"emu_element<{TYPES[match['type']]}>"
    return " ".join(
        f"emu_set(*{element}({address}, {i}, {len(registers)}), {register});"
        for i, register in enumerate(registers)
    )


def _address(match: re.Match[str], pointer: str) -> str:
    return f"emu_{'shared' if match['space'] == 'shared' else 'global'}_address({pointer})"


def _ldmatrix(match: re.Match[str], operands: Operands) -> str:
    out = operands.vector(0)
    transposed = "true" if match["trans"] else "false"
    return (
        f"{{ uint32_t out_[{len(out)}]; "
        f"emu_ldmatrix({len(out)}, {transposed}, {operands[1]}, out_); "
        + " ".join(f"emu_set({register}, out_[{i}]);" for i, register in enumerate(out))
        + " }"
    )


def _mma(match: re.Match[str], operands: Operands) -> str:
    kind, number = ("float", "float") if match["sum"] == "f32" else ("int", "uint32_t")
    a, b = (_list("uint32_t", operands.vector(i)) for i in (1, 2))
    return (
        f"{{ uint32_t a_[] = {a}, b_[] = {b}; {number} c_[] = {_list(number, operands.vector(3))}; "
        f"emu_mma_{kind}({ELEMENTS[match['type']]}, {match['k']}, c_, a_, b_); "
        + " ".join(f"emu_set({d}, c_[{i}]);" for i, d in enumerate(operands.vector(0)))
        + " }"
    )


def _list(type_: str, values: list[str]) -> str:
    return "{" + ", ".join(f"{type_}({value})" for value in values) + "}"


def _wgmma(match: re.Match[str], operands: Operands) -> str:
    is_float = match["sum"] == "f32"
    number = "float" if is_float else "uint32_t"
    registers = ", ".join(f"({number}*)&{d}" for d in operands.vector(0))
    held = operands.texts[1].startswith("{")
    a_registers = _list("uint32_t", operands.vector(1)) if held else "{0}"
    a = "a_, 0" if held else f"nullptr, {operands[1]}"
    signs = [operands[i] for i in range(4, len(operands))]
    if any(transposed != "0" for transposed in signs[2:]):
        raise UnsupportedPtx(f"{match.string}: an operand that is not K-major")
    extra = f", {signs[0]}, {signs[1]}" if is_float else ""
    return (
        f"{{ {number}* const d_[] = {{{registers}}}; "
        f"[[maybe_unused]] const uint32_t a_[] = {a_registers}; "
        f"emu_wgmma_{'float' if is_float else 'int'}({ELEMENTS[match['type']]}, {match['n']}, d_, "
        f"{a}, {operands[2]}, {operands[3]}{extra}); }}"
    )


def _cp_async(_match: re.Match[str], operands: Operands) -> str:
    source_bytes = operands[3] if len(operands) > 3 else operands[2]
    return f"emu_cp_async({operands[0]}, {operands[1]}, {operands[2]}, {source_bytes});"


def _tma_load(_match: re.Match[str], operands: Operands) -> str:
    pointer, coordinates = operands.tensor(1)
    return (
        f"{{ const int at_[] = {_list('int', coordinates)}; "
        f"emu_tma_load({operands[0]}, (const void*)({pointer}), at_, {operands[2]}); }}"
    )


def _tma_store(_match: re.Match[str], operands: Operands) -> str:
    pointer, coordinates = operands.tensor(0)
    return (
        f"{{ const int at_[] = {_list('int', coordinates)}; "
        f"emu_tma_store({operands[1]}, (const void*)({pointer}), at_); }}"
    )


def _barrier(match: re.Match[str], operands: Operands) -> str:
    if len(operands) == 1 and match["how"] == "sync":
        if operands[0] != "0":
            raise UnsupportedPtx(f"{match.string}: a named barrier without a number of threads")
        return "__syncthreads();"
    return (
        f"emu_named_barrier({operands[0]}, {operands[1]}, "
        f"{'true' if match['how'] == 'sync' else 'false'});"
    )


def _elect(_match: re.Match[str], operands: Operands) -> str:
    predicate = operands[0].split("|")[1]
    return f"{predicate} = emu_elect({operands[1]});"


def _half2(operation: str) -> Translate:
    return _assign(
        "emu_bits<unsigned>("
        + operation.format(*(f"emu_half2({{{i}}})" for i in range(1, 4)))
        + ")"
    )


_SPACE = r"(?P<space>global|shared)(::\w+)?"
_ORDER = r"(\.weak|\.relaxed|\.acquire|\.release|\.volatile)?(\.cta|\.gpu|\.sys)?"
_CACHE = r"(\.nc)?(\.c[agsv]|\.wb|\.wt|\.lu)?(\.L1::\w+)?(\.L2::\w+)?(\.v[24])?"
_SMEM = r"(\.shared(::\w+)?)?"

INSTRUCTIONS: list[tuple[str, Translate]] = [
    (rf"ld{_ORDER}\.{_SPACE}{_CACHE}\.(?P<type>\w+)", _load),
    (rf"st{_ORDER}\.{_SPACE}{_CACHE}\.(?P<type>\w+)", _store),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x[124](?P<trans>\.trans)?\.shared(::cta)?\.b16", _ldmatrix),
    (
        r"mma\.sync\.aligned\.m16n8k(?P<k>8|16|32)\.row\.col\.(?P<sum>f32)"
        r"\.(?P<type>f16|bf16)\.(?P=type)\.(?P=sum)",
        _mma,
    ),
    (
        r"mma\.sync\.aligned\.m16n8k(?P<k>16|32)\.row\.col\.(?P<sum>s32)"
        r"\.(?P<type>s8|u8)\.(?P=type)\.(?P=sum)",
        _mma,
    ),
    (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16\.(?P<sum>f32)"
        r"\.(?P<type>f16|bf16)\.(?P=type)",
        _wgmma,
    ),
    (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k32\.(?P<sum>s32)"
        r"\.(?P<type>s8|u8)\.(?P=type)",
        _wgmma,
    ),
    (r"wgmma\.fence\.sync\.aligned", _call("emu_wgmma_fence();")),
    (r"wgmma\.commit_group\.sync\.aligned", _call("emu_wgmma_commit();")),
    (r"wgmma\.wait_group\.sync\.aligned", _call("emu_wgmma_wait({0});")),
    (r"cp\.async\.c[ag]\.shared(::cta)?\.global(\.L2::\w+)?", _cp_async),
    (r"cp\.async\.commit_group", _call("emu_cp_async_commit();")),
    (r"cp\.async\.wait_group", _call("emu_cp_async_wait({0});")),
    (r"cp\.async\.wait_all", _call("emu_cp_async_wait_all();")),
    (
        r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cluster|cta)\.global(\.tile)?"
        r"\.mbarrier::complete_tx::bytes",
        _tma_load,
    ),
    (
        r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(\.tile)?\.bulk_group",
        _tma_store,
    ),
    (r"cp\.async\.bulk\.commit_group", _call("emu_tma_store_commit();")),
    (r"cp\.async\.bulk\.wait_group(\.read)?", _call("emu_tma_store_wait({0});")),
    (rf"mbarrier\.init{_SMEM}\.b64", _call("emu_mbarrier_init({0}, {1});")),
    (
        rf"mbarrier\.arrive\.expect_tx(\.\w+\.\w+)?{_SMEM}\.b64",
        lambda _, o: f"emu_mbarrier_arrive({o[len(o) - 2]}, {o[len(o) - 1]});",
    ),
    (
        rf"mbarrier\.arrive(\.release\.cta)?{_SMEM}\.b64",
        lambda _, o: f"emu_mbarrier_arrive({o[len(o) - 1]}, 0);",
    ),
    (rf"mbarrier\.expect_tx(\.\w+\.\w+)?{_SMEM}\.b64", _call("emu_mbarrier_expect({0}, {1});")),
    (
        rf"mbarrier\.(try|test)_wait\.parity(\.acquire)?(\.cta|\.cluster)?{_SMEM}\.b64",
        _call("{0} = emu_mbarrier_try_wait({1}, {2});"),
    ),
    (rf"mbarrier\.inval{_SMEM}\.b64", _nothing),
    (r"(bar|barrier)(\.cta)?\.(?P<how>sync|arrive)(\.aligned)?", _barrier),
    (r"bar\.warp\.sync", _call("__syncwarp({0});")),
    (r"elect\.sync", _elect),
    (r"fence\.(proxy\.async|mbarrier_init)(\W.*)?", _call("emu_fence_proxy_async();")),
    (r"(fence|membar|griddepcontrol|prefetch|prefetchu|setmaxnreg)\..*", _nothing),
    (
        r"atom\.(relaxed|acquire|release|acq_rel)\.gpu\.global\.add\.s32",
        _call("{0} = atomicAdd((int*)({1}), int({2}));"),
    ),
    (r"createpolicy\..*", _call("{0} = 0;")),
    (r"setp\.ne\.\w+", _call("{0} = ({1}) != ({2});")),
    (r"setp\.eq\.\w+", _call("{0} = ({1}) == ({2});")),
    (r"selp\.\w+", _assign("({3}) ? ({1}) : ({2})")),
    (r"mov\.\w+", _assign("{1}")),
    (r"cvta\.to\.shared\.u64", _assign("uint64_t(__cvta_generic_to_shared((const void*)({1})))")),
    (r"cvta\.to\.global\.u64", _assign("uint64_t({1})")),
    (r"cvt\.u32\.u64", _assign("uint32_t({1})")),
    (r"dp4a\.s32\.s32", _assign("__dp4a(int({1}), int({2}), int({3}))")),
    (r"dp4a\.u32\.u32", _assign("__dp4a(unsigned({1}), unsigned({2}), unsigned({3}))")),
    (r"dp4a\.u32\.s32", _assign("emu_dot4<uint8_t, int8_t>({1}, {2}, {3})")),
    (r"dp4a\.s32\.u32", _assign("emu_dot4<int8_t, uint8_t>({1}, {2}, {3})")),
    (r"prmt\.b32", _assign("__byte_perm({1}, {2}, {3})")),
    (r"lop3\.b32", _assign("emu_lop3({1}, {2}, {3}, {4})")),
    (r"ex2\.approx\.f32", _assign("exp2f({1})")),
    (r"ex2\.approx\.ftz\.f32", _assign("emu_flush(exp2f({1}))")),
    (r"rcp\.approx(\.ftz)?\.f32", _assign("1.0f / ({1})")),
    (r"add(\.rn)?\.f16x2", _half2("{0} + {1}")),
    (r"sub(\.rn)?\.f16x2", _half2("{0} - {1}")),
    (r"mul(\.rn)?\.f16x2", _half2("{0} * {1}")),
    (r"fma\.rn\.f16x2", _half2("__hfma2({0}, {1}, {2})")),
]
_COMPILED = [(re.compile(pattern), translate) for pattern, translate in INSTRUCTIONS]
_STATEMENT = re.compile(
    r"(?:@(?P<not>!?)(?P<guard>[%\w]+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<rest>.*)", re.S
)
_LABEL = re.compile(r"([A-Za-z_$]\w*):(?!:)\s*(.*)", re.S)


def translate(source: str) -> str:
    """The source with its inline assembly as C++, line by line where it was."""
    result, position = [], 0
    for statement in inline_asm.find(source):
        lines = "\n" * source.count("\n", statement.begin, statement.end)
        result += [source[position : statement.begin], _block(statement), lines]
        position = statement.end
    return "".join([*result, source[position:]])


def _block(statement: inline_asm.InlineAsm) -> str:
    text = re.sub(r"//[^\n]*", "", statement.text).replace("%%", "%")
    scope = f"at_{statement.begin}_"  # labels are the C++ function's
    parts = [_statement(part, statement.operands, scope) for part in text.split(";")]
    return "{ " + " ".join(part for part in parts if part) + " }"


def _statement(text: str, expressions: tuple[str, ...], scope: str) -> str:
    text = text.strip().lstrip("{}").strip()  # those of a PTX block
    if label := _LABEL.fullmatch(text):
        return f"{scope}{label[1]}: {_statement(label[2], expressions, scope) or ';'}"
    if not text:
        return ""
    if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S):
        names = (name.strip().replace("%", "reg_") for name in declared[2].split(","))
        return " ".join(f"{TYPES[declared[1]]} {name} = 0;" for name in names)
    parts = _STATEMENT.fullmatch(text)
    if parts is None:
        raise UnsupportedPtx(text)
    if re.fullmatch(r"bra(\.uni)?", parts["opcode"]):
        body = f"goto {scope}{parts['rest'].strip()};"
    else:
        body = _instruction(parts["opcode"], parts["rest"], expressions)
    if parts["guard"]:
        return f"if ({parts['not']}{parts['guard'].replace('%', 'reg_')}) {{ {body} }}"
    return body


def _instruction(opcode: str, rest: str, expressions: tuple[str, ...]) -> str:
    for pattern, translator in _COMPILED:
        if match := pattern.fullmatch(opcode):
            return translator(match, Operands(rest, expressions))
    raise UnsupportedPtx(f"{opcode} {rest}".strip())
