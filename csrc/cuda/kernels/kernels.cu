// The kernels: each thread does what body.h says. Compiled by csrc/cuda/kernels/generate.py into ptx.h, which is checked
// in: nvcc is never needed to build or to install.
#include "cuda/kernels/body.h"

namespace {

__device__ herring::cuda::body::Position here() { return {blockIdx.x, gridDim.x, threadIdx.x, blockDim.x}; }

}  // namespace

extern "C" __global__ void __launch_bounds__(herring::cuda::kThreads)
    herring_pack(const __grid_constant__ herring::cuda::PackParameters parameters) {
  herring::cuda::body::pack(parameters, here());
}

extern "C" __global__ void __launch_bounds__(herring::cuda::kSumThreads)
    herring_sum(const __grid_constant__ herring::cuda::SumParameters parameters) {
  herring::cuda::body::sum(parameters, here());
}
