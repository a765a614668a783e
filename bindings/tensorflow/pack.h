#pragma once

/// Small tensors that travel as one.
///
///   packed = HerringPack(values)            all of their elements, in a vector
///   values = HerringUnpack(packed, shapes)  the way back; shapes: of each, its number of dimensions and then those
///
/// On a GPU, where Herring is told how to find TensorFlow's stream (gpu_stream.h), one kernel moves all of them there.
namespace herring::tensorflow_binding {

/// Registers both for GPUs. Those of int32 lie in the host's memory, as TensorFlow's own operations have them.
void serve_packs_by_stream();

}  // namespace herring::tensorflow_binding
