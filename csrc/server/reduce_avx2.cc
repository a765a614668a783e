// The reduction for processors with AVX2 and F16C. The target stays on until the end of the file: templates are
// instantiated there.

#include "server/reduce_internal.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

namespace herring::server::internal {
namespace {

constexpr int kVectorBytes = 32;

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
using Floats = VectorOf<float>::Type;

inline Floats halves_to_floats(const std::byte* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void floats_to_halves(Floats value, std::byte* to) {
  const __m128i halves = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

}  // namespace
}  // namespace herring::server::internal

#include "server/reduce_kernel.h"

namespace herring::server::internal {
KernelSet avx2_kernels(ReduceSpec spec) noexcept { return find_kernels(spec); }
}  // namespace herring::server::internal

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace herring::server::internal {
KernelSet avx2_kernels(ReduceSpec) noexcept { return {}; }
}  // namespace herring::server::internal

#endif
