"""Megatron-Core 0.16.1, the newest for Python 3.11, as far as it goes without a GPU.

Everything imports without a GPU (warning that Transformer Engine and Apex are not there). What runs
on CPUs runs on the backend; what does not does not on gloo either, since it asks PyTorch for a CUDA
device ("Torch not compiled with CUDA enabled"):

- runs: ``parallel_state.initialize_model_parallel``, all groups of tensor and pipeline parallelism;
  with ``use_cpu_initialization`` the layers ``ColumnParallelLinear``, ``RowParallelLinear`` and
  ``VocabParallelEmbedding``, forwards and backwards, the gradients' all_reduce asynchronous;
  ``vocab_parallel_cross_entropy``; ``all_to_all``, and the regions that copy and reduce; the
  modules ``MLP`` and ``LanguageModelEmbedding``; a whole ``GPTModel`` of local layers, once the
  core of its attention is replaced.
- does not: its ``DotProductAttention`` (a buffer in GPU memory); sequence parallelism, and every
  other region that gathers or scatters (an array on the current CUDA device); ``broadcast_data``;
  ``model_parallel_cuda_manual_seed``; its ``DistributedDataParallel`` (a buffer of gradients), and
  the optimizers, which ask for it; the pipeline schedules (a count in GPU memory).
"""

from __future__ import annotations


def test_a_gpt_of_megatron_core_learns_as_one_process(torchrun, needed):
    needed("megatron")

    lines = torchrun("examples/torch/megatron_gpt.py").splitlines()

    assert lines[-3] == "2 ranks, backend gpucoll"
    assert lines[-1] == "the same losses as one process, up to rounding: True", lines
