// What packing tensors into a bucket costs, beside one memcpy of as many bytes; and whether a second thread pays.
//
//   cmake -S . -B build -G Ninja -DHERRING_BENCHMARKS=ON && ninja -C build pack_bench && build/pack_bench
//
// GB/s = bytes / median seconds, 1 GB = 1e9 bytes. "Cold": tensors and bucket were driven out of the caches before each
// call, as gradients are after a backward pass; "warm": they were not. Two threads: the second one sleeps and is woken
// for each bucket, as it would be between two steps. "Busy": every core but the caller's has a thread that computes, as
// the other ranks of a host have.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "fusion_buffer/fusion_buffer.h"

namespace {

using namespace herring;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

/// A thread that sleeps until there is something to copy.
class Helper final {
 public:
  Helper() : thread_([this] { loop(); }) {}
  ~Helper() {
    ends_ = true;
    start([] {});
    thread_.join();
  }
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  void start(std::function<void()> task) {
    task_ = std::move(task);
    begun_.fetch_add(1);
    begun_.notify_one();
  }
  void wait() const {
    while (ended_.load() != begun_.load()) std::this_thread::yield();
  }

 private:
  void loop() {
    for (std::uint32_t seen = 0; !ends_;) {
      begun_.wait(seen);
      seen = begun_.load();
      task_();
      ended_ = seen;
    }
  }

  std::function<void()> task_;
  std::atomic<bool> ends_{false};
  std::atomic<std::uint32_t> begun_{0};
  std::atomic<std::uint32_t> ended_{0};
  std::thread thread_;
};

/// Threads that compute on their own, while it lives.
class Others final {
 public:
  explicit Others(unsigned count) {
    for (unsigned i = 0; i < count; ++i) threads_.emplace_back([this] { compute(); });
  }
  ~Others() {
    ends_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Others(const Others&) = delete;
  Others& operator=(const Others&) = delete;

 private:
  void compute() const {
    double value = 1;
    while (!ends_) {
      for (int i = 0; i < 1000; ++i) value = value * 1.0000001 + 1e-9;
      asm volatile("" : : "r"(&value) : "memory");
    }
  }

  std::atomic<bool> ends_{false};
  std::vector<std::thread> threads_;
};

/// Tensors, and the bucket that they are packed into.
struct Case {
  Case(std::size_t count, std::size_t bytes) : total(count * bytes), bucket(total), from(total), caches(96 << 20) {
    for (std::size_t i = 0; i < count; ++i) {
      tensors.emplace_back(bytes, std::byte{1});
      sources.emplace_back(tensors.back());
      slices.push_back({i * bytes, bytes});
    }
  }

  void pack_part(std::size_t first, std::size_t last) {
    std::vector<TensorSlice> part(slices.begin() + static_cast<std::ptrdiff_t>(first),
                                  slices.begin() + static_cast<std::ptrdiff_t>(last));
    const std::uint64_t start = part.front().offset;
    for (TensorSlice& slice : part) slice.offset -= start;
    pack(std::span(sources).subspan(first, last - first), part,
         std::span(bucket).subspan(start, part.back().offset + part.back().bytes));
  }
  void pack_all() { pack(sources, slices, bucket); }
  void pack_by_two(Helper& helper) {
    const std::size_t half = slices.size() / 2;
    helper.start([this, half] { pack_part(half, slices.size()); });
    pack_part(0, half);
    helper.wait();
  }
  void copy() { std::memcpy(bucket.data(), from.data(), total); }
  void chill() {
    for (std::size_t at = 0; at < caches.size(); at += 64) caches[at] ^= std::byte{1};
  }

  std::size_t total;
  std::vector<Bytes> tensors;
  std::vector<std::span<const std::byte>> sources;
  std::vector<TensorSlice> slices;
  Bytes bucket;
  Bytes from;
  Bytes caches;
};

double gigabytes(Case& on, bool is_cold, const std::function<void()>& call) {
  std::vector<double> seconds;
  call();
  for (int i = 0; i < (is_cold ? 41 : 201); ++i) {
    if (is_cold) on.chill();
    const auto begin = Clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::ranges::nth_element(seconds, seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2));
  return static_cast<double>(on.total) / seconds[seconds.size() / 2] / 1e9;
}

void measure(std::size_t count, std::size_t bytes) {
  Case on(count, bytes);
  Helper helper;
  for (const bool is_cold : {false, true}) {
    const double memcpy_rate = gigabytes(on, is_cold, [&] { on.copy(); });
    const double one = gigabytes(on, is_cold, [&] { on.pack_all(); });
    const double two = gigabytes(on, is_cold, [&] { on.pack_by_two(helper); });
    const Others others(std::max(std::thread::hardware_concurrency(), 2U) - 1);
    const double one_busy = gigabytes(on, is_cold, [&] { on.pack_all(); });
    const double two_busy = gigabytes(on, is_cold, [&] { on.pack_by_two(helper); });
    std::printf(
        "%5zu x %4zu KB %s  memcpy %6.2f  pack %6.2f  two threads %6.2f (%.2fx)  busy: pack %6.2f  two %6.2f (%.2fx)\n",
        count, bytes >> 10, is_cold ? "cold" : "warm", memcpy_rate, one, two, two / one, one_busy, two_busy,
        two_busy / one_busy);
  }
}

}  // namespace

int main() {
  std::printf("GB/s, %u cores\n", std::thread::hardware_concurrency());
  measure(1000, 4 << 10);
  measure(64, 64 << 10);
  measure(64, 256 << 10);
  measure(16, 1 << 20);
}
