// How fast one core reduces, beside what its memcpy does in the same run.
//
//   cmake -S . -B build -G Ninja -DHERRING_BENCHMARKS=ON && ninja -C build bench_reduce && build/bench_reduce
//
// read GB/s = inputs x bytes / median seconds, 1 GB = 1e9 bytes. Two yardsticks: memcpy that reads as many bytes as the
// reduction ("same read"), and memcpy of one input ("one input"), which has less memory to go through. Each result is
// checked once before it is timed.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "server/reduce.h"

namespace {

using namespace herring;

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

/// Page-aligned, as the memory of the runtime is, and touched.
class Buffer final {
 public:
  explicit Buffer(std::size_t bytes)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))), bytes_(bytes) {
    if (memory_ == nullptr) {
      std::fprintf(stderr, "no memory for %zu bytes\n", bytes);
      std::exit(1);
    }
    std::memset(memory_.get(), 0, bytes);
  }
  std::span<std::byte> span() const { return {memory_.get(), bytes_}; }

 private:
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_;
};

/// Median seconds of a call over about 0.15 s of calls, at least nine.
template <class Call>
double median_seconds(Call&& call) {
  using Clock = std::chrono::steady_clock;
  call();
  std::vector<double> seconds;
  const auto stop = Clock::now() + std::chrono::milliseconds(150);
  while (seconds.size() < 9 || (Clock::now() < stop && seconds.size() < 20000)) {
    const auto begin = Clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::ranges::nth_element(seconds, seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2));
  return seconds[seconds.size() / 2];
}

double memcpy_gigabytes(std::size_t bytes) {
  const Buffer from(bytes), to(bytes);
  return static_cast<double>(bytes) / median_seconds([&] {
           std::memcpy(to.span().data(), from.span().data(), bytes);
           // The compiler must not drop a copy that nothing reads.
           asm volatile("" : : "r"(to.span().data()) : "memory");
         }) /
         1e9;
}

/// Fills every input with 1 and checks that every element of the sum is n.
bool is_right(DataType dtype, std::span<const std::byte> sum, std::size_t inputs) {
  const float expected = static_cast<float>(inputs);
  for (std::size_t at = 0; at < sum.size(); at += element_bytes(dtype)) {
    float value = 0;
    if (dtype == DataType::kFloat32) {
      std::memcpy(&value, sum.data() + at, sizeof(value));
    } else {
      std::memcpy(reinterpret_cast<std::byte*>(&value) + 2, sum.data() + at, 2);
    }
    if (value != expected) return false;
  }
  return true;
}

void bench(DataType dtype, std::size_t count, std::size_t bytes, server::Isa isa) {
  std::vector<Buffer> buffers;
  for (std::size_t i = 0; i <= count; ++i) buffers.emplace_back(bytes);
  std::vector<std::span<const std::byte>> inputs;
  const float one = 1;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t at = 0; at < bytes; at += element_bytes(dtype)) {
      const auto* bits = reinterpret_cast<const std::byte*>(&one) + (dtype == DataType::kFloat32 ? 0 : 2);
      std::memcpy(buffers[i].span().data() + at, bits, element_bytes(dtype));
    }
    inputs.push_back(buffers[i].span());
  }
  const std::vector<std::span<std::byte>> outputs{buffers[count].span()};
  const ReduceSpec spec{dtype, ReduceOp::kSum, 1};
  const double seconds = median_seconds([&] { server::reduce(spec, inputs, outputs, isa); });
  if (!is_right(dtype, outputs[0], count)) {
    std::fprintf(stderr, "WRONG RESULT\n");
    std::exit(1);
  }
  const double read = static_cast<double>(count * bytes) / seconds / 1e9;
  const double same = memcpy_gigabytes(count * bytes);
  const double single = memcpy_gigabytes(bytes);
  std::printf("%-9s %-7s %6zu %10zu %10.1f %10.1f %5.0f%% %10.1f %5.0f%%\n", name(dtype).data(),
              server::name(isa).data(), count, bytes, read, same, 100 * read / same, single, 100 * read / single);
}

}  // namespace

int main() {
  const server::Isa isa = server::best_isa();
  std::printf("%-9s %-7s %6s %10s %10s %17s %17s\n", "dtype", "isa", "inputs", "bytes", "read GB/s", "memcpy same read",
              "memcpy one input");
  for (const DataType dtype : {DataType::kFloat32, DataType::kBFloat16}) {
    for (const std::size_t count : {2, 3, 4, 8, 16}) {
      for (const std::size_t kilobytes : {64, 128, 1024, 5 * 1024, 25 * 1024})
        bench(dtype, count, kilobytes << 10, isa);
    }
  }
  bench(DataType::kFloat32, 8, 128 << 10, server::Isa::kScalar);
  return 0;
}
