#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/operation.h"

/// What reduce.cc, the scalar twin and the vector kernels agree on. Not for use outside reduce*.cc.
///
/// Pointers instead of spans here: the vector kernels are compiled for more than the base instruction set, so they must
/// not instantiate library templates that the linker could share with code that runs everywhere.
namespace herring::server::internal {

/// Vector kernels work on multiples of this many bytes of elements; the scalar twin does the rest.
inline constexpr std::size_t kVectorStepBytes = 64;

/// One pass over one block: out = ((tree(inputs) op rights[last]) op ...) op rights[0].
/// `rights` are accumulators of subtrees further right that were reduced before.
struct KernelCall {
  const std::byte* const* inputs = nullptr;  ///< As many as the kernel takes.
  std::size_t offset = 0;                    ///< Where the block starts in each of them, in bytes.
  std::size_t bytes = 0;                     ///< Bytes of elements; a multiple of kVectorStepBytes.
  const std::byte* const* rights = nullptr;
  std::size_t right_count = 0;
  std::byte* out = nullptr;        ///< Start of the block: elements where finish, else accumulators.
  bool finish = false;             ///< Divide, make NaNs canonical, round to the element type.
  std::uint32_t average_over = 1;  ///< Floating types only; integers are divided by divide_integers().
};
using Kernel = void (*)(const KernelCall&);

/// Largest tree that one kernel call reduces in registers.
inline constexpr std::size_t kRegisterInputs = 8;

/// Kernels for one (type, operator) on one instruction set.
struct KernelSet {
  /// [n - 1] takes n inputs. Always there for powers of two; sums of floating types have all, for other operators 3, 5,
  /// 6 and 7 inputs are put together from those.
  std::array<Kernel, kRegisterInputs> by_count{};
};

/// For a spec that check() accepts.
KernelSet neon_kernels(ReduceSpec spec) noexcept;
KernelSet avx2_kernels(ReduceSpec spec) noexcept;
KernelSet avx512_kernels(ReduceSpec spec) noexcept;

/// The plain twin: out[:] = reduction of `bytes` bytes at `offset` of `count` inputs, any size, any alignment, finished
/// except for the division of integers.
void reduce_scalar(ReduceSpec spec, const std::byte* const* inputs, std::size_t count, std::size_t offset,
                   std::size_t bytes, std::byte* out);

/// data[:] /= average_over, toward zero.
void divide_integers(DataType dtype, std::byte* data, std::size_t bytes, std::uint32_t average_over);

}  // namespace herring::server::internal
