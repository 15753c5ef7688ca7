"""Kernels for host memory.

Two compilers share one back end (LLVM, through llvmlite):

- `codegen`, `elements`, `operations`, `reduce`, `copy`, `convert`, `pack`, `quantise_kernels` and
  the modules that they import emit LLVM IR. Numba's language has no vector types, and these loops
  determine the speed (`docs/decisions/0002-llvm-kernels.md`).
- `jit`, `blocks`, `memory` and `builtins` are the basis of the loops *around* them, which use
  Numba; `block_types` tells it what blocks are.

`cache`, and the modules that it imports, keep compiled code on disk. `linking` makes one library of
it (`elf_object`, `elf_machines`, `elf_library` are the linker), `library` loads that library, and
`addresses` gives the addresses of kernels. `accumulate`, `addresses`, `jit`, `blocks`, `memory`,
`cache` and `library` import neither Numba nor LLVM (`docs/decisions/0035-one-linked-library.md`).
"""
