#include "bindings/tensorflow/pack.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/tensorflow/composed.h"
#include "bindings/tensorflow/on_gpu.h"
#include "bindings/tensorflow/pending.h"
#include "bindings/tensorflow/registry.h"
#include "bindings/tensorflow/status.h"
#include "bindings/tensorflow/tensor.h"
#include "bindings/tensorflow/tf_c_api.h"
#include "core/copy.h"
#include "core/device.h"
#include "cuda/kernels/twins.h"
#include "runtime/device_copies.h"

namespace herring::tensorflow_binding {
namespace {

using Shape = std::vector<std::int64_t>;

enum class Way : std::uint8_t { kPack, kUnpack };

/// The tensors of a kernel, which are all there.
struct Packed {
  std::vector<Tensor> values;
  Tensor whole;
};

std::int64_t elements_of(const Shape& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) elements *= size;
  return elements;
}

Tensor input_of(TF_OpKernelContext* context, int place) {
  const TfStatus status = new_status();
  TF_Tensor* input = nullptr;
  TF_GetInput(context, place, &input, status.get());
  if (!is_ok(status)) throw Error(Code::kInternal, TF_Message(status.get()));
  return Tensor(input);
}

Tensor output_of(TF_OpKernelContext* context, int place, TF_DataType dtype, const Shape& shape, std::size_t bytes) {
  const TfStatus status = new_status();
  Tensor output(
      TF_AllocateOutput(context, place, dtype, shape.data(), static_cast<int>(shape.size()), bytes, status.get()));
  if (!is_ok(status)) throw std::runtime_error(TF_Message(status.get()));
  return output;
}

/// Of so many tensors. Throws Error.
std::vector<Shape> shapes_of(std::span<const std::int32_t> numbers, std::size_t count) {
  const auto is_size = [](std::int32_t number) { return number >= 0; };
  std::vector<Shape> shapes;
  std::span<const std::int32_t> rest = numbers;
  bool is_good = std::ranges::all_of(numbers, is_size);
  while (is_good && !rest.empty()) {
    const auto dims = static_cast<std::size_t>(rest.front());
    rest = rest.subspan(1);
    is_good = dims <= rest.size();
    if (!is_good) break;
    shapes.emplace_back(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(dims));
    rest = rest.subspan(dims);
  }
  if (is_good && shapes.size() == count) return shapes;
  throw Error(Code::kInvalidArgument, "these are not the shapes of " + std::to_string(count) +
                                          " tensors: of each, its number of dimensions and then their sizes");
}

Packed take_for_pack(TF_OpKernelContext* context) {
  Packed packed;
  std::size_t bytes = 0;
  std::int64_t elements = 0;
  for (int place = 0; place < TF_NumInputs(context); ++place) {
    packed.values.push_back(input_of(context, place));
    bytes += TF_TensorByteSize(packed.values.back().get());
    elements += elements_of(shape_of(packed.values.back().get()));
  }
  packed.whole = output_of(context, 0, TF_TensorType(packed.values[0].get()), {elements}, bytes);
  return packed;
}

Packed take_for_unpack(TF_OpKernelContext* context) {
  Packed packed;
  packed.whole = input_of(context, 0);
  const Tensor numbers = input_of(context, 1);
  const std::span shapes_told(static_cast<const std::int32_t*>(TF_TensorData(numbers.get())),
                              TF_TensorByteSize(numbers.get()) / sizeof(std::int32_t));
  const auto count = static_cast<std::size_t>(TF_NumOutputs(context));
  const std::vector<Shape> shapes = shapes_of(shapes_told, count);
  std::int64_t wanted = 0;
  for (const Shape& shape : shapes) wanted += elements_of(shape);
  const std::int64_t elements = elements_of(shape_of(packed.whole.get()));
  if (wanted != elements) {
    throw Error(Code::kInvalidArgument,
                "the shapes have " + std::to_string(wanted) + " elements, and there are " + std::to_string(elements));
  }
  const auto width =
      static_cast<std::int64_t>(TF_TensorByteSize(packed.whole.get())) / std::max<std::int64_t>(elements, 1);
  for (std::size_t i = 0; i < count; ++i) {
    packed.values.push_back(output_of(context, static_cast<int>(i), TF_TensorType(packed.whole.get()), shapes[i],
                                      static_cast<std::size_t>(elements_of(shapes[i]) * width)));
  }
  return packed;
}

void move_on_host(Way way, const Packed& packed) {
  std::span<std::byte> rest = bytes_of(packed.whole);
  for (const Tensor& tensor : packed.values) {
    const std::span<std::byte> value = bytes_of(tensor);
    const std::span<std::byte> place = rest.first(value.size());
    way == Way::kPack ? copy_bytes(value, place) : copy_bytes(place, value);
    rest = rest.subspan(value.size());
  }
}

DeviceSpan span_of(const Tensor& tensor) {
  return {reinterpret_cast<std::uint64_t>(TF_TensorData(tensor.get())), TF_TensorByteSize(tensor.get())};
}

/// Enough blocks to fill a GPU; one takes several tiles where there are more.
constexpr std::size_t kMostBlocks = 528;

/// By one kernel, which reads what to do in memory of the GPU. False: there is no pinned memory to copy that from, or
/// no room on the GPU for kernels.
bool launch(Way way, TF_OpKernelContext* context, const GpuStream& stream, runtime::DeviceCopies::Queue& queue,
            const std::vector<cuda::Tile>& tiles) {
  const std::span<const std::byte> table = std::as_bytes(std::span(tiles));
  const std::shared_ptr<std::byte> here =
      take_pinned(*Process::instance().pinned_memory(), std::max(table.size(), runtime::PinnedMemory::kLeastBytes),
                  copies_of(stream));
  if (!here) return false;
  std::memcpy(here.get(), table.data(), table.size());
  const TfStatus status = new_status();
  TF_AllocatorAttributes attributes{sizeof(TF_AllocatorAttributes), 0};
  const auto bytes = static_cast<std::int64_t>(table.size());
  const Tensor there(TF_AllocateTemp(context, TF_UINT8, &bytes, 1, &attributes, status.get()));
  if (!is_ok(status)) throw std::runtime_error(TF_Message(status.get()));
  cuda::PackParameters parameters;
  parameters.tiles = span_of(there).address;
  parameters.tile_count = static_cast<std::uint32_t>(tiles.size());
  parameters.source_type = parameters.target_type = cuda::Element::kUInt8;
  queue.to_device({parameters.tiles, table.size()}, {here.get(), table.size()}, here).or_throw();
  const Status launched =
      queue.launch(way == Way::kPack ? KernelId::kPack : KernelId::kUnpack, std::as_bytes(std::span(&parameters, 1)),
                   static_cast<std::uint32_t>(std::min(tiles.size(), kMostBlocks)));
  if (launched.code() != Code::kUnavailable) {
    launched.or_throw();
    return true;
  }
  static std::atomic<bool> is_said = false;
  if (!is_said.exchange(true)) {
    log().log(LogLevel::kWarning, launched.message() + "; small tensors on GPUs are copied one by one");
  }
  return false;
}

/// Between the kernels of TensorFlow's stream, whose order is that of the memory it hands out as well.
void move_on_gpu(Way way, TF_OpKernelContext* context, const Packed& packed) {
  const GpuStream stream = stream_of_kernel(context);
  std::vector<std::pair<DeviceSpan, DeviceSpan>> moves;
  std::vector<cuda::Tile> tiles;
  std::size_t begin = 0;
  for (const Tensor& tensor : packed.values) {
    const DeviceSpan value = span_of(tensor);
    if (value.empty()) continue;
    const DeviceSpan place = span_of(packed.whole).subspan(begin, value.bytes);
    const auto& [from, to] = moves.emplace_back(way == Way::kPack ? std::pair(value, place) : std::pair(place, value));
    cuda::cut_tiles(from.address, to.address, from.bytes, cuda::Element::kUInt8, cuda::Element::kUInt8, tiles);
    begin += value.bytes;
  }
  if (moves.empty()) return;
  runtime::DeviceCopies::Queue queue(copies_of(stream), ForeignStream{stream.stream});
  if (launch(way, context, stream, queue, tiles)) return;
  for (const auto& [from, to] : moves) queue.inside(to, from).or_throw();
}

template <Way way, bool is_on_gpu>
void move(void*, TF_OpKernelContext* context) {
  const char* const op = way == Way::kPack ? "HerringPack" : "HerringUnpack";
  try {
    const Packed packed = way == Way::kPack ? take_for_pack(context) : take_for_unpack(context);
    is_on_gpu ? move_on_gpu(way, context, packed) : move_on_host(way, packed);
  } catch (const Error& error) {
    fail_with(context, op, error, code_of(error.status().code()));
  } catch (const std::exception& error) {
    fail_with(context, op, error, TF_RESOURCE_EXHAUSTED);
  }
}

/// When the library is loaded.
[[maybe_unused]] const bool kIsRegistered = [] {
  define("HerringPack", false, {"values: N * T"}, "packed: T", {"N: int >= 1", kTypesAttr});
  define("HerringUnpack", false, {"packed: T", "shapes: int32"}, "values: N * T", {"N: int >= 1", kTypesAttr});
  serve("HerringPack", &create_nothing, &move<Way::kPack, false>, &delete_nothing);
  serve("HerringUnpack", &create_nothing, &move<Way::kUnpack, false>, &delete_nothing);
  return true;
}();

}  // namespace

void serve_packs_by_stream() {
  const TfStatus status = new_status();
  for (const TF_DataType type : kTypes) {
    const bool is_on_host = type == TF_INT32;
    TF_KernelBuilder* const pack =
        TF_NewKernelBuilder("HerringPack", "GPU", &create_nothing,
                            is_on_host ? &move<Way::kPack, false> : &move<Way::kPack, true>, &delete_nothing);
    TF_KernelBuilder* const unpack =
        TF_NewKernelBuilder("HerringUnpack", "GPU", &create_nothing,
                            is_on_host ? &move<Way::kUnpack, false> : &move<Way::kUnpack, true>, &delete_nothing);
    for (TF_KernelBuilder* const builder : {pack, unpack}) {
      TF_KernelBuilder_TypeConstraint(builder, "T", type, status.get());
      if (!is_on_host) continue;
      TF_KernelBuilder_HostMemory(builder, "values");
      TF_KernelBuilder_HostMemory(builder, "packed");
    }
    register_kernel("HerringPack", pack);
    register_kernel("HerringUnpack", unpack, {"shapes"});
  }
}

}  // namespace herring::tensorflow_binding
