// The reduction for aarch64, whose processors all have NEON: nothing has to be switched on.

#include "server/reduce_internal.h"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace herring::server::internal {
namespace {

constexpr int kVectorBytes = 16;

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
using Floats = VectorOf<float>::Type;

inline Floats halves_to_floats(const std::byte* from) {
  float16x4_t halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return reinterpret_cast<Floats>(vcvt_f32_f16(halves));
}

inline void floats_to_halves(Floats value, std::byte* to) {
  const float16x4_t halves = vcvt_f16_f32(reinterpret_cast<float32x4_t>(value));
  __builtin_memcpy(to, &halves, sizeof(halves));
}

}  // namespace
}  // namespace herring::server::internal

#include "server/reduce_kernel.h"

namespace herring::server::internal {
KernelSet neon_kernels(ReduceSpec spec) noexcept { return find_kernels(spec); }
}  // namespace herring::server::internal

#else

namespace herring::server::internal {
KernelSet neon_kernels(ReduceSpec) noexcept { return {}; }
}  // namespace herring::server::internal

#endif
