"""Kernels for host memory.

Two compilers, one back end (LLVM, through llvmlite):

- `codegen`, `elements`, `operations`, `reduce`, `copy`, `convert`, `pack`, `quantise_kernels` and
  what these import emit LLVM IR: Numba's language has no vector types, and these loops decide the
  speed (`docs/decisions/0002-llvm-kernels.md`).
- `jit`, `memory` and `builtins` are what the loops *around* them, written in Numba, stand on.

`cache`, and what it imports, keeps what is compiled on disk; `linking` makes one library of it
(`elf_object`, `elf_machines`, `elf_library` are the linker), `library` loads that, and `addresses`
says where kernels are. `addresses`, `jit`, `memory`, `cache` and `library` import neither Numba nor
LLVM (`docs/decisions/0035-one-linked-library.md`).
"""
