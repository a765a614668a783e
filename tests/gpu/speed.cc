// How fast Herring's own code is on a GPU, beside what the GPU's copies reach in the same run: kernels against a copy
// inside the device, staging against pinned copies both ways at once. Prints a line of JSON for each; medians.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels/tables.h"
#include "cuda/kernels/twins.h"
#include "staging/pump.h"

namespace {

using namespace herring;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMB = 1 << 20;
constexpr int kRounds = 7;

class Bench {
 public:
  explicit Bench(std::shared_ptr<cuda::Driver> driver)
      : device_(std::move(driver), DeviceId{0}), one_(device_.create_stream()), other_(device_.create_stream()) {}

  void print_pinning();
  void print_copies();
  void print_kernels();
  void print_staging();

 private:
  struct Work {
    std::string name;
    std::size_t bytes;  ///< Read and written, or moved over the bus in each direction.
    std::function<void()> submit;
  };

  DeviceSpan allocate(std::size_t bytes) {
    DeviceSpan memory;
    device_.allocate(bytes, memory).or_throw();
    return memory;
  }
  void finish() {
    Ticket tickets[2];
    device_.record(one_, tickets[0]).or_throw();
    device_.record(other_, tickets[1]).or_throw();
    TicketDone done[2];
    for (std::size_t ended = 0; ended < 2;) {
      const std::size_t count = device_.poll(done);
      for (std::size_t i = 0; i < count; ++i) done[i].status.or_throw();
      ended += count;
    }
  }
  double seconds(const std::function<void()>& submit) {
    const auto begun = Clock::now();
    submit();
    finish();
    return std::chrono::duration<double>(Clock::now() - begun).count();
  }
  /// In turns: A B A B.
  void compare(const std::vector<Work>& works) {
    std::map<std::string, std::vector<double>> taken;
    for (int round = -1; round < kRounds; ++round) {
      for (const Work& work : works) {
        const double took = seconds(work.submit);
        if (round >= 0) taken[work.name].push_back(took);
      }
    }
    const auto median = [&](const Work& work) {
      std::vector<double>& all = taken[work.name];
      std::sort(all.begin(), all.end());
      return all[all.size() / 2];
    };
    const double bound = static_cast<double>(works[0].bytes) / median(works[0]);
    for (const Work& work : works) {
      const double rate = static_cast<double>(work.bytes) / median(work);
      std::printf("{\"what\": \"%s\", \"GB_per_s\": %.1f, \"of_first\": %.3f}\n", work.name.c_str(), rate / 1e9,
                  rate / bound);
    }
    std::fflush(stdout);
  }

  Work pack(const std::string& name, KernelId kernel, std::size_t tensors, cuda::Element to, DeviceSpan source,
            DeviceSpan target, std::size_t shift);

  cuda::CudaDevice device_;
  const StreamHandle one_;
  const StreamHandle other_;
};

/// What Herring's shared memory is.
std::span<std::byte> shared_memory(std::size_t bytes) {
  const int file = memfd_create("speed", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw Error(Code::kUnavailable, "memfd_create");
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  close(file);
  if (address == MAP_FAILED) throw Error(Code::kUnavailable, "mmap");
  return {static_cast<std::byte*>(address), bytes};
}

void Bench::print_pinning() {
  const std::span<std::byte> memory = shared_memory(256 * kMB);
  const auto begun = Clock::now();
  const Status status = device_.pin(memory);
  const double took = std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
  std::printf("{\"what\": \"pin 256 MiB of shared memory\", \"ms\": %.1f, \"status\": \"%s\"}\n", took,
              status.to_string().c_str());
  if (status.is_ok()) device_.unpin(memory).or_throw();
  munmap(memory.data(), memory.size());
}

void Bench::print_copies() {
  constexpr std::size_t kBytes = 512 * kMB;
  const std::span<std::byte> memory = shared_memory(2 * kBytes);
  device_.pin(memory).or_throw();
  const DeviceSpan there = allocate(2 * kBytes);
  const auto out = [&](std::size_t piece) {
    for (std::size_t at = 0; at < kBytes; at += piece) {
      device_.copy_to_host(one_, memory.subspan(at, piece), there.subspan(at, piece)).or_throw();
    }
  };
  const auto back = [&](std::size_t piece) {
    for (std::size_t at = kBytes; at < 2 * kBytes; at += piece) {
      device_.copy_to_device(other_, there.subspan(at, piece), memory.subspan(at, piece)).or_throw();
    }
  };
  std::vector<Work> works;
  for (const std::size_t piece : {32 * kMB, 4 * kMB, kMB / 2, kMB / 8}) {
    const std::string of = " in pieces of " + std::to_string(piece / 1024) + " KiB";
    works.push_back({"copies out" + of, kBytes, [=] { out(piece); }});
    works.push_back({"copies back" + of, kBytes, [=] { back(piece); }});
    works.push_back({"copies both ways" + of, kBytes, [=] {
                       out(piece);
                       back(piece);
                     }});
  }
  compare(works);
  device_.unpin(memory).or_throw();
  munmap(memory.data(), memory.size());
  device_.release(there).or_throw();
}

Bench::Work Bench::pack(const std::string& name, KernelId kernel, std::size_t tensors, cuda::Element to,
                        DeviceSpan source, DeviceSpan target, std::size_t shift) {
  cuda::PackParameters parameters;
  parameters.source_type = cuda::Element::kFloat32;
  parameters.target_type = to;
  const std::size_t elements = source.bytes / 4 / tensors - shift;
  const std::size_t to_bytes = cuda::element_bytes(to);
  std::vector<cuda::Tile> tiles;
  for (std::size_t i = 0; i < tensors; ++i) {
    // The tensors begin at multiples of 512 bytes, as a framework's do; in the bucket they stand close together.
    const std::size_t place = (source.bytes / tensors / 512 * 512) * i;
    cuda::cut_tiles(source.address + place, target.address + i * elements * to_bytes, elements, parameters.source_type,
                    to, tiles);
  }
  const auto bytes = std::as_bytes(std::span(tiles));
  const DeviceSpan table = allocate(bytes.size());
  device_.copy_to_device(one_, table, bytes).or_throw();
  finish();
  parameters.tiles = table.address;
  parameters.tile_count = static_cast<std::uint32_t>(tiles.size());
  const std::size_t moved = tensors * elements * (4 + to_bytes);
  return {name, 10 * moved, [=, this] {
            for (int i = 0; i < 10; ++i) {
              device_.launch(one_, kernel, std::as_bytes(std::span(&parameters, 1)), parameters.tile_count).or_throw();
            }
          }};
}

void Bench::print_kernels() {
  constexpr std::size_t kBytes = 256 * kMB;
  const DeviceSpan source = allocate(kBytes), target = allocate(kBytes);
  std::vector<Work> works{{"copy inside, 256 MiB", 10 * 2 * kBytes, [=, this] {
                             for (int i = 0; i < 10; ++i) device_.copy_inside(one_, target, source).or_throw();
                           }}};
  using cuda::Element;
  works.push_back(pack("pack 1 tensor", KernelId::kPack, 1, Element::kFloat32, source, target, 0));
  works.push_back(pack("pack 300 tensors", KernelId::kPack, 300, Element::kFloat32, source, target, 0));
  works.push_back(pack("pack 300 tensors, not aligned", KernelId::kPack, 300, Element::kFloat32, source, target, 129));
  works.push_back(pack("unpack 300 tensors", KernelId::kUnpack, 300, Element::kFloat32, source, target, 0));
  works.push_back(pack("pack 300 tensors to bfloat16", KernelId::kPack, 300, Element::kBFloat16, source, target, 0));
  for (const std::uint32_t blocks : {8u, 132u, 528u}) {
    cuda::SumParameters sum;
    sum.source_count = 2;
    sum.sources[0] = sum.target = target.address;
    sum.sources[1] = source.address;
    sum.elements = kBytes / 4;
    works.push_back({"sum of 2, " + std::to_string(blocks) + " blocks", 10 * 3 * kBytes, [=, this] {
                       for (int i = 0; i < 10; ++i) {
                         device_.launch(one_, KernelId::kSum, std::as_bytes(std::span(&sum, 1)), blocks).or_throw();
                       }
                     }});
  }
  compare(works);
  device_.release(source).or_throw();
  device_.release(target).or_throw();
}

/// The host has nothing to do with a part: only what staging costs is left.
class AtOnce final : public staging::Owner {
 public:
  void reduce(const staging::Part& part, std::span<std::byte>) override { ready_.push_back(part); }
  void abandon(const staging::Part&) override {}
  void complete(staging::OperationId, const Status& status) override { status.or_throw(); }
  void release(staging::OperationId) override { ++released; }

  void answer(staging::Pump& pump) {
    for (const staging::Part& part : std::exchange(ready_, {})) {
      pump.reduced(Clock::now(), part.operation, part.index, Status::ok());
    }
  }
  std::size_t released = 0;

 private:
  std::vector<staging::Part> ready_;
};

void Bench::print_staging() {
  constexpr std::size_t kBucket = 25 * kMB, kBuckets = 20, kAtOnce = 4;
  const DeviceSpan there = allocate(kBucket * kBuckets);
  for (const std::size_t part : {kBucket, 5 * kMB, kMB, kMB / 2}) {
    const std::size_t slots = kAtOnce * kBucket / part;
    const std::span<std::byte> memory = shared_memory(slots * part);
    device_.pin(memory).or_throw();
    AtOnce owner;
    staging::Options options;
    options.slots = static_cast<std::uint32_t>(slots);
    options.part_bytes = part;
    staging::Pump pump(device_, one_, other_, options, memory, owner);
    std::uint32_t last = 0;
    const auto staged = [&] {
      owner.released = 0;
      // No more at once than there are slots for: one without would get memory that is not pinned.
      for (std::size_t submitted = 0; owner.released < kBuckets;) {
        for (; submitted < kBuckets && submitted - owner.released < kAtOnce; ++submitted) {
          staging::Job job;
          job.input = job.output = there.subspan(submitted * kBucket, kBucket);
          job.deadline = Clock::now() + std::chrono::seconds(60);
          pump.submit(Clock::now(), staging::OperationId{++last}, job).or_throw();
        }
        pump.run(Clock::now());
        owner.answer(pump);
      }
    };
    const auto plain = [&] {
      std::size_t slot = 0;
      for (std::size_t at = 0; at < there.bytes; at += part, slot = (slot + 1) % slots) {
        const std::span<std::byte> place = memory.subspan(slot * part, part);
        device_.copy_to_host(one_, place, there.subspan(at, part)).or_throw();
        device_.copy_to_device(other_, there.subspan(at, part), place).or_throw();
      }
    };
    const std::string of = ", parts of " + std::to_string(part / 1024) + " KiB";
    compare({{"pinned copies both ways" + of, there.bytes, plain}, {"staging" + of, there.bytes, staged}});
    device_.unpin(memory).or_throw();
    munmap(memory.data(), memory.size());
  }
  device_.release(there).or_throw();
}

}  // namespace

int main() {
  try {
    Bench bench(herring::cuda::Driver::open());
    bench.print_pinning();
    bench.print_copies();
    bench.print_kernels();
    bench.print_staging();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "speed: %s\n", error.what());
    return 1;
  }
}
