"""Finding a compiler of device code, reading what it says, naming what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xpuc.artifact import GPU_ARCHS
from xpuc.codegen.cuda import archs, find, ptxas
from xpuc.codegen.cuda.compiler import Fatbin
from xpuc.codegen.cuda.nvrtc import Nvrtc
from xpuc.codegen.target import resolve
from xpuc.errors import UnsupportedError, XpucError

LOG = """
xpuc.cu(12): warning #177-D: variable "v" was declared but never referenced
ptxas info    : 47 bytes gmem, 208 bytes cmem[4]
ptxas info    : Compiling entry function 'norm_kernel' for 'sm_80'
ptxas info    : Function properties for norm_kernel
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers, 544 bytes smem, 388 bytes cmem[0]
ptxas info    : Compile time = 7.127 ms
ptxas info    : Compiling entry function 'gemm_kernel' for 'sm_90a'
ptxas info    : Function properties for gemm_kernel
    24 bytes stack frame, 32 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
ptxas info    : Function properties for __internal_trig_reduction_slowpathf
    40 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""


def test_a_report_is_read_whole() -> None:
    assert ptxas.parse(LOG) == (
        ptxas.KernelUsage("norm_kernel", "sm_80", 38, 544, 0, 0, 0, 1),
        ptxas.KernelUsage("gemm_kernel", "sm_90a", 255, 0, 40, 36, 64, 0),
    )
    assert ptxas.parse("") == ()


NVCC = """#!/bin/sh
[ "$1" = --version ] && echo 'Cuda compilation tools, release {release}, V{release}.7' && exit
echo "$@" > {folder}/asked
[ -n "{error}" ] && {{ echo 'note'; echo '{error}' >&2; exit 2; }}
while [ "$1" != -o ]; do shift; done
printf machine > "$2"
echo "ptxas info    : Compiling entry function 'k_kernel' for 'sm_80'" >&2
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" >&2
echo "ptxas info    : Used 9 registers" >&2
"""


def stand_in(folder: Path, release: str = "13.1", error: str = "") -> Path:
    """A toolkit's folder with an nvcc that notes its options."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(NVCC.format(folder=folder, release=release, error=error))
    path.chmod(0o755)
    return path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(find, "nvrtc_version", lambda: None)
    return monkeypatch


def test_the_wheel_s_compiler_goes_before_a_toolkit_s(
    tmp_path: Path, no_compiler: pytest.MonkeyPatch
) -> None:
    no_compiler.setattr(find, "nvrtc_version", lambda: "13.0.88")
    no_compiler.setattr(find, "wheel_folder", lambda: tmp_path)
    no_compiler.setenv("CUDA_HOME", str(tmp_path))
    nvcc = stand_in(tmp_path)
    assert find.find_compiler() == Nvrtc(tmp_path, "13.0.88")
    no_compiler.setenv("CUDACXX", str(nvcc))
    assert find.find_compiler().name == "nvcc 13.1.7"


def test_a_toolkit_s_compiler_is_found_and_asked_for_one_fatbin(
    tmp_path: Path, no_compiler: pytest.MonkeyPatch
) -> None:
    no_compiler.setenv("CUDA_HOME", str(tmp_path))
    stand_in(tmp_path)
    no_compiler.setenv("PATH", "/usr/bin:/bin")
    made = find.find_compiler().compile("source", ("sm_80", "sm_90a"))
    usage = (ptxas.KernelUsage("k_kernel", "sm_80", 9, 0, 0, 0, 0, 0),)
    assert made == Fatbin(b"machine", usage, "source")
    asked = (tmp_path / "asked").read_text().split()
    codes = [option for option in asked if option.startswith("--generate-code")]
    assert codes == [
        "--generate-code=arch=compute_80,code=sm_80",
        "--generate-code=arch=compute_90a,code=sm_90a",
    ]
    assert "--fmad=false" in asked
    assert not [option for option in asked if "fast_math" in option]


def test_no_compiler_says_how_to_get_one(tmp_path: Path, no_compiler: pytest.MonkeyPatch) -> None:
    no_compiler.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(XpucError, match="no CUDA compiler") as caught:
        find.find_compiler()
    assert "pip install 'xpuc[cuda]'" in caught.value.hint


@pytest.mark.parametrize(
    ("release", "message"), [("12.8", "CUDA 12.8.7, xpuc needs CUDA 13"), ("", "its release")]
)
def test_a_toolkit_of_another_release_is_refused(
    release: str, message: str, tmp_path: Path, no_compiler: pytest.MonkeyPatch
) -> None:
    no_compiler.setenv("CUDACXX", str(stand_in(tmp_path, release)))
    with pytest.raises(XpucError, match=message):
        find.find_compiler()


def test_an_nvcc_that_is_not_there_is_named(no_compiler: pytest.MonkeyPatch) -> None:
    no_compiler.setenv("CUDACXX", "/no/such/nvcc")
    with pytest.raises(XpucError, match="/no/such/nvcc: cannot be started"):
        find.find_compiler()


def test_source_that_does_not_compile_is_quoted(
    tmp_path: Path, no_compiler: pytest.MonkeyPatch
) -> None:
    no_compiler.setenv("CUDACXX", str(stand_in(tmp_path, error="k.cu(3): error: no such name")))
    compiler = find.find_compiler()
    no_compiler.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(XpucError, match=r"compile for sm_80 \(k.cu\(3\): error: no such name\)"):
        compiler.compile("source", ("sm_80",))


def test_a_target_names_its_architectures() -> None:
    machine = resolve("cuda -arch=sm_90a,sm_80")
    assert machine.archs == ("sm_80", "sm_90a")
    assert machine.facts.cpu == "sm_80,sm_90a"
    assert machine.facts.shared_bytes == 163 << 10
    assert "mma" in machine.facts.features
    assert "wgmma" not in machine.facts.features
    assert resolve("cuda", "sm_80,sm_90a").facts == machine.facts
    assert machine.as_manifest()["kind"] == "cuda"
    assert int(machine.tvm.attrs["max_shared_memory_per_block"]) == 163 << 10


def test_one_architecture_has_all_it_can() -> None:
    facts = resolve("cuda -arch=sm_90a").facts
    assert {"wgmma", "tma", "mma"} <= facts.features
    assert facts.shared_bytes == 227 << 10


def test_the_runtime_knows_what_the_compiler_has_code_for() -> None:
    assert tuple(archs.ARCHS) == GPU_ARCHS


def test_no_architecture_named_is_the_common_ones() -> None:
    assert resolve("cuda").archs == tuple(a.name for a in archs.DEFAULT)


@pytest.mark.parametrize(
    ("target", "cpu", "message"),
    [
        ("cuda -arch=sm_91a", None, "unknown GPU architecture: 'sm_91a'"),
        ("cuda -arch=", None, "'-arch=' is not an option"),
        ("cuda -arch=sm_80,", None, "unknown GPU architecture: ''"),
        ("cuda -mcpu=sm_80", None, "'-mcpu=sm_80' is not an option"),
        ("llvm -arch=sm_80", None, "'-arch=sm_80' is not an option"),
        ("cuda -arch=sm_80", "sm_90a", "they differ"),
        ("", None, "unknown target: ''"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(
    target: str, cpu: str | None, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        resolve(target, cpu)


@pytest.mark.slow
def test_tvm_s_cuda_half_loads_where_no_driver_and_no_toolkit_is() -> None:
    code = (
        "from xpuc.codegen.cuda import driver\n"
        "driver._can_load = lambda library: False\n"
        "driver.load()\n"
        "import tvm\n"
        "print(driver._is_loaded(), tvm.cuda(0).exist)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.slow
def test_without_the_wheels_the_install_is_named() -> None:
    code = (
        "from xpuc.codegen.cuda import driver, wheels\n"
        "driver._can_load = lambda library: False\n"
        "wheels.wheel_folder = lambda: None\n"
        "driver.load()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "libcudart.so.13 is not installed\npip install 'xpuc[cuda]'" in done.stderr
