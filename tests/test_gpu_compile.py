"""What the other tests of compiled kernels rest on: copies, spills and order are seen as they are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import gpu_compile
from support.gpu_compile import ARCHITECTURES, TARGETS, compile_for

pytestmark = [
    pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not())),
    pytest.mark.parametrize("target", TARGETS),
]

ROWS = jax.ShapeDtypeStruct((40, 1024), jnp.float32)
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
LAYOUT = plgpu.Layout.WG_STRIDED((1024,), 4)


def add_in_place(rows, *numbers):
    """Adds each number to the first row, one kernel after the other."""
    ref = jax.new_ref(rows)
    for number in numbers:

        def body(rows, number=number):
            rows[0] = plgpu.load(rows.at[0], layout=LAYOUT, optimized=False) + number

        body.__name__ = f"add_{number}"  # names the kernel
        plgpu.kernel(body, out_type=(), compiler_params=PARAMS)(ref)
    return jax.freeze(ref)


def add_sum_of_rows(rows):
    """A kernel that needs more registers than there are: all rows at once."""

    def body(rows, out):
        loaded = [plgpu.load(rows.at[i], layout=LAYOUT, optimized=False) for i in range(rows.shape[0])]
        total = functools.reduce(jnp.add, loaded)
        for i, row in enumerate(loaded):
            out[i] = row + total

    return plgpu.kernel(body, out_type=rows, compiler_params=PARAMS)(rows)


def add_in_shared_memory(rows):
    """A kernel of 100 KiB of shared memory."""

    def body(rows, out, staged):
        staged[...] = jnp.zeros_like(staged)
        out[0] = plgpu.load(rows.at[0], layout=LAYOUT, optimized=False) + staged[0, 0]

    scratch = [plgpu.SMEM((100, 256), jnp.float32)]
    return plgpu.kernel(body, out_type=rows, scratch_types=scratch, compiler_params=PARAMS)(rows)


def add_three(rows):
    return add_in_place(rows, 3)


def add_five_and_three(rows):
    return add_in_place(rows, 5, 3)


def names(program: gpu_compile.CompiledProgram) -> list[str]:
    return [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in program.kernels]


@pytest.mark.full
def test_a_program_in_place_holds_only_the_kernel(target):
    program = compile_for(target, add_three, ROWS, donate_argnums=0)
    assert program.device_ops == ("custom-call",)
    assert program.alias_size == program.argument_size == ROWS.size * 4
    assert program.temp_size == 0


def test_the_copy_of_an_undonated_argument_is_reported(target):
    program = compile_for(target, add_three, ROWS)
    assert program.device_ops == ("copy", "custom-call")
    assert program.alias_size == 0


def test_the_architecture_is_the_targets(target):
    [kernel] = compile_for(target, add_three, ROWS).kernels
    assert kernel.target == ARCHITECTURES[target]
    assert kernel.spill_bytes == 0


def test_kernels_come_in_the_order_of_the_program_also_when_one_was_compiled_before(target):
    assert names(compile_for(target, add_three, ROWS)) == ["add_3"]
    assert names(compile_for(target, add_five_and_three, ROWS)) == ["add_5", "add_3"]
    assert names(compile_for(target, add_five_and_three, ROWS)) == ["add_5", "add_3"]


def test_spills_are_reported(target):
    [kernel] = compile_for(target, add_sum_of_rows, ROWS).kernels
    assert kernel.registers == 255
    assert kernel.spill_bytes > 0


def test_more_shared_memory_than_the_target_has_is_refused(target):
    if target == "rtx6000pro":
        with pytest.raises(ValueError, match=f"smem_bytes={100 * 1024} > max_smem_bytes={99 * 1024}"):
            compile_for(target, add_in_shared_memory, ROWS)
    else:
        assert compile_for(target, add_in_shared_memory, ROWS).kernels


def test_a_process_compiles_for_one_target_alone(target):
    compile_for(target, add_three, ROWS)
    other, *_ = TARGETS.keys() - {target}
    with pytest.raises(RuntimeError, match=f"'{other}'"):
        gpu_compile._compiler(target).submit(gpu_compile.compile_here, other, add_three, ROWS).result()
