"""CUDA C, as TVM generates it, to C++ that runs on the fake driver's fibers."""

from __future__ import annotations

import re

import emu.ptx as ptx

_INCLUDE = re.compile(
    r"^[ \t]*#include[ \t]*<(?:cuda[\w/.]*|mma\.h|math_constants\.h|sm_61_intrinsics\.h)>", re.M
)
_QUALIFIER = r"(?:(?:alignas|__align__)\s*\(\s*\d+\s*\)\s*)?"
_DYNAMIC = re.compile(
    rf"extern\s+__shared__\s+{_QUALIFIER}(?P<type>[\w:\s]+?)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(
    rf"__shared__\s+{_QUALIFIER}(?P<type>[\w:\s]+?)\s+(?P<name>\w+)"
    r"(?P<extents>(?:\s*\[[^\]]*\])*)\s*;"
)
_KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\s*\((?P<bound>[^)]*)\)\s*)?"
    r"(?P<name>\w+)\s*\((?P<parameters>[^;{]*)\)\s*\{"
)


def translate(source: str) -> str:
    """The C++ of a CUDA C source. Lines keep their numbers."""
    source = _INCLUDE.sub("", source)
    source = _DYNAMIC.sub(r"\g<type>* \g<name> = (\g<type>*)emu_thread->shared;", source)
    source = _STATIC.sub(_static_array, source)
    kernels = [_kernel(match) for match in _KERNEL.finditer(source)]
    return "\n".join(['#include "cuda_host.h"\n#line 1', ptx.translate(source), *kernels, ""])


def _static_array(match: re.Match[str]) -> str:
    """A reference to the block's array; without extents, to its variable."""
    name = match["name"]
    array = f"emu_array_{name}"
    return (
        f"using {array} = {match['type']}{match['extents']}; static const char emu_key_{name} = 0; "
        f"{array}& {name} = *({array}*)emu_shared_array(&emu_key_{name}, sizeof({array}));"
    )


def _kernel(match: re.Match[str]) -> str:
    """The entry the driver finds a kernel by."""
    name, types = match["name"], [_type(p) for p in _parameters(match["parameters"])]
    sizes = ", ".join(f"unsigned(sizeof({type_}))" for type_ in types) or "0u"
    values = ", ".join(f"*({type_}*)values[{i}]" for i, type_ in enumerate(types))
    bound = (match["bound"] or "0").split(",")[0]
    return (
        f"static void emu_call_{name}(void** values) {{ (void)values; {name}({values}); }}\n"
        f"static const unsigned emu_bytes_{name}[] = {{{sizes}}};\n"
        f'extern "C" EMU_EXPORT const EmuKernel emu_kernel_{name} = '
        f"{{emu_call_{name}, {len(types)}, emu_bytes_{name}, {bound}}};"
    )


def _parameters(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _type(parameter: str) -> str:
    """The type of `const float* __restrict__ x`, which can be read through a pointer."""
    bare = re.sub(r"\b(__restrict__|__grid_constant__|const)\b", " ", parameter)
    return re.sub(r"\w+\s*$", "", bare).strip()
