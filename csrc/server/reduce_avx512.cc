// The reduction for processors with AVX-512 (F, BW, DQ, VL: Skylake-SP and later). The target stays on until the end of
// the file: templates are instantiated there.

#include "server/reduce_internal.h"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace herring::server::internal {
namespace {

constexpr int kVectorBytes = 64;

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
using Floats = VectorOf<float>::Type;

// Masks of all ones: GCC 12 takes the undefined source of the unmasked forms for a bug of ours.
inline Floats halves_to_floats(const std::byte* from) {
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void floats_to_halves(Floats value, std::byte* to) {
  const __m256i halves = _mm512_maskz_cvtps_ph(0xFFFF, value, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

}  // namespace
}  // namespace herring::server::internal

#include "server/reduce_kernel.h"

namespace herring::server::internal {
KernelSet avx512_kernels(ReduceSpec spec) noexcept { return find_kernels(spec); }
}  // namespace herring::server::internal

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace herring::server::internal {
KernelSet avx512_kernels(ReduceSpec) noexcept { return {}; }
}  // namespace herring::server::internal

#endif
