"""Makes PyTorch's wheel from PyPI importable without the CUDA libraries that it lists as dependencies.

On Linux the wheel is a CUDA build. Its dependencies (cuBLAS, cuDNN, NCCL and so on) are four gigabytes that a machine
without a GPU never calls, but the loader wants a file for each. This puts a library in each one's place whose functions
all return an error, so that CPU tests can run with the real PyTorch after a download of half a gigabyte.

usage: python lean_torch.py     (run by the Python of the environment that has torch and nvidia-cuda-runtime)
"""

import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

# Libraries that PyTorch links and that only a GPU needs. The CUDA runtime is not among them: it is small, and says
# properly that there is no driver.
ABSENT = re.compile(r"lib(cu(?!dart|da\.)\w*|nccl|nvrtc|nvshmem\w*|nvJitLink)\.so\.\d+")
SYMBOL = re.compile(r"(cu|nv|nccl)\w+")


def said_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(library: str) -> set[str]:
    return {name for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", said_by("readelf", "-d", library)) if ABSENT.fullmatch(name)}


def versions(library: str) -> dict[str, set[str]]:
    """Symbol versions that a library wants, by the file that is to have them: the loader insists on these."""
    wanted: dict[str, set[str]] = {}
    file = ""
    for found in re.finditer(r"File: (\S+)|Name: (\S+)", said_by("readelf", "-V", "-W", library)):
        file = found[1] or file
        if found[2] and file:
            wanted.setdefault(file, set()).add(found[2])
    return wanted


def undefined(library: str) -> set[tuple[str, str]]:
    """Functions that a library wants from elsewhere, with their versions."""
    lines = said_by("nm", "-D", "--undefined-only", library).splitlines()
    pairs = {line.split()[-1].partition("@")[::2] for line in lines if line.strip()}
    return {(name, version) for name, version in pairs if SYMBOL.fullmatch(name) and not name.startswith("cuda")}


def compile_stub(target: pathlib.Path, functions: dict[str, list[str]]) -> None:
    """A library with these functions by version; each returns an error code."""
    with tempfile.TemporaryDirectory() as scratch:
        source, script = pathlib.Path(scratch, "absent.c"), pathlib.Path(scratch, "versions")
        names = [name for group in functions.values() for name in group]
        source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in names))
        nodes = {version: group for version, group in functions.items() if version}
        script.write_text(
            "".join(f"{version} {{ global: {'; '.join(group)}; }};\n" for version, group in nodes.items())
        )
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{target.name}", "-o", str(target), str(source)]
        subprocess.run(command + ([f"-Wl,--version-script={script}"] if nodes else []), check=True)


def main() -> None:
    packages = pathlib.Path(sysconfig.get_paths()["purelib"])
    libraries = [str(path) for path in (packages / "torch" / "lib").glob("lib*.so*")]
    names = sorted(set().union(*map(needed, libraries)))
    if not names:
        print("this PyTorch needs no CUDA libraries")
        return
    # PyTorch's rpath leads here.
    folder = packages / "nvidia" / "cu13" / "lib"
    if not folder.is_dir():
        sys.exit(f"{folder} is not there: install nvidia-cuda-runtime of CUDA 13")
    symbols = set().union(*map(undefined, libraries))
    wanted: dict[str, set[str]] = {}
    for library in libraries:
        for file, found in versions(library).items():
            wanted.setdefault(file, set()).update(found)
    for name in names:
        groups = {
            version: sorted(function for function, of in symbols if of == version)
            for version in wanted.get(name, {""})
        }
        if not (folder / name).exists():
            compile_stub(folder / name, groups)
    print(f"{len(symbols)} functions of {len(names)} absent libraries: {', '.join(names)}")


if __name__ == "__main__":
    main()
