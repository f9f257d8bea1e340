"""Device code for NVIDIA GPUs, made on any machine: no GPU, no driver, no CUDA toolkit.

archs.py        what a kernel may use on each architecture
compiler.py     what a compiler is, and how it compiles: no fast math, no contraction
find.py         which one: PyPI's NVRTC (nvrtc.py, wheels.py), or a toolkit's nvcc (nvcc.py)
device_code.py  the build: TVM's CUDA source through that compiler, the result checked
driver.py       TVM's CUDA half where there is no driver
pipeline.py     TVM's lowering for both its dialects
ptxas.py        what each kernel takes: registers, shared memory, spills
room.py         registers before occupancy: what spills is compiled again
sass.py         what it executes: its machine code, read by NVIDIA's disassembler

The code for all architectures is one fatbin: the driver picks from it at load, and TVM's module
hands it over as it is. The alternative, a cubin for each and a choice of ours at load, would be a
second copy of the driver's rules.
"""

from xpuc.codegen.cuda.device_code import DeviceCode, check_no_source, compiling, require
from xpuc.codegen.cuda.pipeline import PIPELINE, bind_threads
from xpuc.codegen.cuda.ptxas import KernelUsage

__all__ = ["PIPELINE", "DeviceCode", "KernelUsage", "bind_threads", "check_no_source", "compiling",
           "require"]  # fmt: skip
