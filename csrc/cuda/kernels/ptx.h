#pragma once

/// The kernels as text, which the driver compiles for the GPU that is there (and keeps, in ~/.nv/ComputeCache).
namespace herring::cuda {

inline constexpr char kKernelsPtx[] =
#include "cuda/kernels/kernels.ptx.inc"
    ;

/// By KernelId. What packs also unpacks: the tiles say which way.
inline constexpr const char* kKernelNames[] = {"herring_pack", "herring_pack", "herring_sum"};

}  // namespace herring::cuda
