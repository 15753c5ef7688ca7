"""JAX arrays; those of GPUs as far as this can be told without one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from tests.moving import move

from gpucoll.arrays.operands import prepare, template_like, template_of
from gpucoll.errors import ArgumentTypeError
from gpucoll.types import DTYPES

jax = pytest.importorskip("jax", reason="JAX is not installed")

WIDE = ("int64", "uint64", "float64", "complex128")
"""Off in JAX unless asked for; see test_64_bits."""

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in WIDE])
def test_dtypes_have_our_names(dtype):
    x = jax.numpy.ones(3, dtype)

    assert template_of(x)[:2] == ((3,), dtype)
    same = move(x)
    assert isinstance(same, jax.Array)
    assert same.dtype == x.dtype
    assert (same == x).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5, 7)])
def test_shapes(shape):
    x = jax.numpy.full(shape, 2.5)

    same = move(x)
    assert same.shape == shape
    assert (same == x).all()
    assert same.devices() == x.devices()


def test_nothing_is_copied():
    x = jax.numpy.arange(1000.0)

    arguments = prepare(x)
    assert arguments.source.address == x.unsafe_buffer_pointer()
    result = arguments.finish()
    assert result.unsafe_buffer_pointer() == arguments.destination.address
    assert arguments.lasting is None


def test_a_layout_that_a_user_asked_for():
    layout = pytest.importorskip("jax.experimental.layout")
    rows = jax.numpy.arange(6.0).reshape(2, 3)
    columns = jax.device_put(rows, layout.Format(layout.Layout((1, 0)), rows.sharding))
    assert columns.format.layout.major_to_minor == (1, 0)

    same = move(columns)
    assert np.array_equal(same, rows)
    assert same.format.layout.major_to_minor == (0, 1)


def as_on_a_gpu(x):
    """Return what is seen of an array of the host's where its memory is looked at as a GPU's is."""
    from gpucoll.arrays import jax_arrays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_arrays, "_place", lambda device: "cuda:0")
        return jax_arrays.look(x, "x")


def test_a_gpus_memory_is_looked_at_in_row_major_order():
    layout = pytest.importorskip("jax.experimental.layout")
    rows = jax.numpy.arange(6.0).reshape(2, 3)
    columns = jax.device_put(rows, layout.Format(layout.Layout((1, 0)), rows.sharding))

    view = as_on_a_gpu(rows)
    assert (view.address, view.owner is rows) == (rows.unsafe_buffer_pointer(), True)
    view = as_on_a_gpu(columns)
    assert view.address == view.owner.unsafe_buffer_pointer() != columns.unsafe_buffer_pointer()
    values = (ctypes.c_float * 6).from_address(view.address)
    assert list(values) == [0, 1, 2, 3, 4, 5]


def test_results_on_a_gpu_are_arrays_while_a_function_is_traced():
    from gpucoll.arrays import jax_arrays

    x, made = jax.numpy.ones(3), []

    @jax.jit
    def call(traced):
        made.append(jax_arrays.new(as_on_a_gpu(x).template, (5,)))
        return traced

    call(x)
    assert made[0].finish().shape == (5,)
    assert not made[0].finish().committed
    assert made[0].buffer.address == made[0].finish().unsafe_buffer_pointer()


def test_elements_that_share_bytes_on_a_gpu_are_refused_there():
    x = jax.numpy.arange(5, dtype="int4")

    assert move(x).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ArgumentTypeError, match="int4, whose elements share bytes on a GPU"):
        as_on_a_gpu(x)
    assert as_on_a_gpu(x.astype("int8")).template.dtype == "int8"


def test_an_array_of_a_gpu_that_lies_in_host_memory_is_refused():
    x = jax.numpy.ones(3)
    moved = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))

    with pytest.raises(ArgumentTypeError, match=r"host memory \(pinned_host\): bring it back"):
        as_on_a_gpu(moved)
    back = jax.device_put(moved, moved.sharding.with_memory_kind(x.sharding.memory_kind))
    assert as_on_a_gpu(back).template.device == "cuda:0"
    assert (move(moved) == x).all()


def test_results_keep_their_memory():
    results = [move(jax.numpy.full(1000, value)) for value in range(20)]

    for value, result in enumerate(results):
        assert (result == value).all()


def test_64_bits():
    with jax.enable_x64(True):
        x = jax.numpy.ones(3, "float64")
        assert move(x).dtype == "float64"
    with pytest.raises(ArgumentTypeError, match="JAX would make float32 of the result's float64"):
        prepare(x)


def test_no_out():
    x = jax.numpy.ones(3)

    with pytest.raises(ArgumentTypeError, match="JAX arrays are immutable: omit out="):
        prepare(x, jax.numpy.zeros(3))
    with pytest.raises(ArgumentTypeError, match=r"x's library, a JAX array; got numpy.ndarray"):
        prepare(x, np.zeros(3, np.float32))


def test_tracers_are_refused():
    @jax.jit
    def call(x):
        with pytest.raises(ArgumentTypeError, match=r"x is being traced.*outside of jax.jit"):
            prepare(x)
        return x

    call(jax.numpy.ones(3))


def test_keys_and_deleted_arrays_are_refused():
    with pytest.raises(ArgumentTypeError, match="key_data"):
        prepare(jax.random.key(0))
    x = jax.numpy.ones(3)
    x.delete()
    with pytest.raises(ArgumentTypeError, match="x was deleted"):
        prepare(x)


def test_results_lie_on_the_input_s_device():
    x = jax.device_put(np.ones(3, np.float32), jax.devices()[1])

    assert move(x).devices() == {jax.devices()[1]}


@pytest.mark.parametrize("place", [0, 1])
def test_results_are_committed_to_a_device_where_their_inputs_are(place):
    device, other = jax.devices()[place], jax.device_put(np.ones(3), jax.devices()[1 - place])
    with jax.default_device(device):
        free = jax.numpy.ones(3)

    same = move(free)
    assert (same.devices(), same.committed) == ({device}, False)
    assert (same + other).devices() == other.devices()
    committed = move(jax.device_put(free, device))
    assert (committed.devices(), committed.committed) == ({device}, True)
    with pytest.raises(ValueError, match="incompatible devices"):
        committed + other


def test_arrays_of_several_devices_are_refused():
    mesh = jax.make_mesh((2,), ("rows",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    x = jax.device_put(np.ones((4, 2)), spread)

    with pytest.raises(ArgumentTypeError, match=r"x lies on 2 devices.*addressable_shards"):
        prepare(x)
    assert move(x.addressable_shards[0].data).shape == (2, 2)


def test_described():
    template = template_like((2,), "bfloat16", jax.numpy.ones(3))
    assert template[:2] == ((2,), "bfloat16")
    assert template.device == "cpu"


@pytest.mark.parametrize(
    ("platform", "version", "name"),
    [("gpu", "PJRT C API\ncuda 12090", "cuda:1"), ("gpu", "rocm 60200", "rocm:1"),
     ("cuda", "", "cuda:1"), ("tpu", "", "tpu:1"), ("cpu", "", "cpu")],
)  # fmt: skip
def test_devices_have_our_names(platform, version, name):
    from gpucoll.arrays import jax_arrays

    client = SimpleNamespace(platform_version=version)
    device = SimpleNamespace(platform=platform, client=client, local_hardware_id=1)

    assert jax_arrays._place(device) == name
