#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

/// A GPU as host code sees one, without one: what FakeDevice and the fake libcuda.so.1 stand on.
///
/// Memory: each allocation is a memfd mapped twice. The address handed out is the mapping without any right, so that
/// the host's reading it is a fault at once; the work is done through the other. Streams are queues; step() takes one
/// of those that may go on, by the seed, and does a little of its first piece of work: copies move in random pieces, so
/// who reads a slot too early reads half of it. What no correct user does (memory freed or unpinned under a copy) is
/// written down in faults().
namespace herring::testing {

struct FakeGpuOptions {
  std::uint64_t seed = 1;
  std::size_t memory_bytes = 256 << 20;
  std::size_t pin_bytes = 256 << 20;  ///< The system's limit of pinned memory.
  std::size_t largest_piece = 64 << 10;
};

class FakeGpu final {
 public:
  explicit FakeGpu(FakeGpuOptions options = {}) : options_(options), random_(options.seed) {}
  ~FakeGpu() {
    for (const auto& [address, block] : blocks_) unmap(address, block);
  }
  FakeGpu(const FakeGpu&) = delete;
  FakeGpu& operator=(const FakeGpu&) = delete;

  // --- Memory ---

  /// 0 where there is not so much.
  std::uint64_t allocate(std::size_t bytes) {
    const std::size_t size = std::max<std::size_t>((bytes + kPage - 1) / kPage, 1) * kPage;
    if (allocated_ + size > options_.memory_bytes) return 0;
    const int file = create_file(size);
    const std::uint64_t address = map(file, size);
    close(file);
    return address;
  }

  /// Memory that is not mapped yet, by a descriptor of the caller's, who may hand it to another process.
  static int create_file(std::size_t bytes) {
    const int file = memfd_create("herring-fake-gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("fake gpu: no memfd");
    return file;
  }
  /// Maps such memory: at `place`, where it is given and within a mapping of the caller's.
  std::uint64_t map(int file, std::size_t bytes, std::uint64_t place = 0) {
    void* const wanted = reinterpret_cast<void*>(place);
    void* const shown = mmap(wanted, bytes, PROT_NONE, MAP_SHARED | (place != 0 ? MAP_FIXED : 0), file, 0);
    void* const alias = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shown == MAP_FAILED || alias == MAP_FAILED) throw std::runtime_error("fake gpu: no mapping");
    const auto address = reinterpret_cast<std::uint64_t>(shown);
    blocks_[address] = {static_cast<std::byte*>(alias), bytes};
    allocated_ += bytes;
    return address;
  }
  static constexpr std::size_t page() { return kPage; }

  bool release(std::uint64_t address) {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) return false;
    for (const auto& [id, stream] : streams_) {
      for (const Work& work : stream) {
        if (touches(work, address, found->second.bytes)) fault("device memory was freed under a copy");
      }
    }
    allocated_ -= found->second.bytes;
    unmap(address, found->second);
    blocks_.erase(found);
    return true;
  }

  /// Where the fake itself reaches device memory; null where [address, address + bytes) is not within one allocation.
  std::byte* alias(std::uint64_t address, std::size_t bytes) const {
    auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return nullptr;
    const auto& [start, block] = *--after;
    if (address - start > block.bytes || bytes > block.bytes - (address - start)) return nullptr;
    return block.alias + (address - start);
  }
  bool is_device(std::uint64_t address) const { return alias(address, 1) != nullptr; }

  /// False where the system refuses: past its limit, or pinned already.
  bool pin(const std::byte* memory, std::size_t bytes) {
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    if (pinned_bytes_ + bytes > options_.pin_bytes || overlaps_pinned(address, bytes)) return false;
    pinned_[address] = bytes;
    pinned_bytes_ += bytes;
    return true;
  }
  bool unpin(const std::byte* memory) {
    const auto found = pinned_.find(reinterpret_cast<std::uint64_t>(memory));
    if (found == pinned_.end()) return false;
    for (const auto& [id, stream] : streams_) {
      for (const Work& work : stream) {
        if (touches(work, found->first, found->second)) fault("host memory was unpinned under a copy");
      }
    }
    pinned_bytes_ -= found->second;
    pinned_.erase(found);
    return true;
  }
  bool is_pinned(std::uint64_t address, std::size_t bytes) const {
    auto after = pinned_.upper_bound(address);
    if (after == pinned_.begin()) return false;
    const auto& [start, size] = *--after;
    return address - start < size && bytes <= size - (address - start);
  }
  std::size_t pinned_bytes() const { return pinned_bytes_; }
  std::size_t allocated_bytes() const { return allocated_; }
  std::size_t memory_bytes() const { return options_.memory_bytes; }

  // --- Streams and events ---

  std::uint64_t create_stream() {
    streams_[++last_id_];
    return last_id_;
  }
  bool is_idle(std::uint64_t stream) const { return streams_.at(stream).empty(); }
  bool has_stream(std::uint64_t stream) const { return streams_.contains(stream); }
  void destroy_stream(std::uint64_t stream) { streams_.erase(stream); }

  std::uint64_t create_event() {
    events_[++last_id_] = std::make_shared<bool>(true);
    return last_id_;
  }
  bool has_event(std::uint64_t event) const { return events_.contains(event); }
  void destroy_event(std::uint64_t event) { events_.erase(event); }
  void record(std::uint64_t event, std::uint64_t stream) {
    const auto mark = std::make_shared<bool>(false);
    events_.at(event) = mark;
    push(stream, {.run = [mark] { *mark = true; }});
  }
  /// The event as it was recorded last; later records do not matter.
  void wait(std::uint64_t stream, std::uint64_t event) { push(stream, {.until = events_.at(event)}); }
  bool is_done(std::uint64_t event) const { return *events_.at(event); }

  // --- Work ---

  /// Either address may be the host's or the device's. False where device memory is not all there.
  bool copy(std::uint64_t stream, std::uint64_t to, std::uint64_t from, std::size_t bytes, bool to_device,
            bool from_device) {
    if ((to_device && alias(to, bytes) == nullptr) || (from_device && alias(from, bytes) == nullptr)) return false;
    push(stream, {.to = to, .from = from, .bytes = bytes, .to_device = to_device, .from_device = from_device});
    return true;
  }
  void launch(std::uint64_t stream, std::function<void()> kernel) { push(stream, {.run = std::move(kernel)}); }

  /// A kernel that waits for others: it ends when `try_to_end`, which is asked again and again, says so.
  void launch_until(std::uint64_t stream, std::function<bool()> try_to_end) {
    push(stream, {.try_to_end = std::move(try_to_end)});
  }

  /// One small piece of whatever may go on. False where nothing may.
  bool step() {
    if (is_broken_) return false;
    std::vector<std::uint64_t> able;
    for (auto& [id, stream] : streams_) {
      if (!stream.empty() && !stalled_.contains(id) && may_go_on(stream.front())) able.push_back(id);
    }
    if (able.empty()) return false;
    advance(streams_.at(able[random_() % able.size()]));
    return true;
  }
  /// Up to `most` steps, or none: as the world's time goes.
  void run_a_little(std::size_t most) {
    for (std::size_t left = random_() % (most + 1); left > 0 && step(); --left) {
    }
  }
  void run_all() {
    while (step()) {
    }
  }

  /// As after an illegal address: nothing goes on, ever.
  void fail() { is_broken_ = true; }
  bool is_broken() const { return is_broken_; }
  /// A copy that takes for ever, or until the stream goes on.
  void stall(std::uint64_t stream) { stalled_[stream] = true; }
  void unstall(std::uint64_t stream) { stalled_.erase(stream); }
  void capture(std::uint64_t stream) { captured_[stream] = true; }
  bool is_captured(std::uint64_t stream) const { return captured_.contains(stream); }

  const std::vector<std::string>& faults() const { return faults_; }
  std::size_t waiting() const {
    std::size_t total = 0;
    for (const auto& [id, stream] : streams_) total += stream.size();
    return total;
  }

 private:
  static constexpr std::size_t kPage = 4096;

  struct Block {
    std::byte* alias = nullptr;
    std::size_t bytes = 0;
  };
  struct Work {
    std::shared_ptr<bool> until = nullptr;  ///< The stream goes on when it is true.
    std::function<void()> run = nullptr;
    std::function<bool()> try_to_end = nullptr;
    std::uint64_t to = 0;
    std::uint64_t from = 0;
    std::size_t bytes = 0;
    bool to_device = false;
    bool from_device = false;
    std::size_t moved = 0;
  };

  static void unmap(std::uint64_t address, const Block& block) {
    munmap(reinterpret_cast<void*>(address), block.bytes);
    munmap(block.alias, block.bytes);
  }
  static bool meets(std::uint64_t a, std::size_t a_bytes, std::uint64_t b, std::size_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
  }
  static bool touches(const Work& work, std::uint64_t address, std::size_t bytes) {
    return work.bytes > 0 &&
           (meets(work.to, work.bytes, address, bytes) || meets(work.from, work.bytes, address, bytes));
  }
  bool overlaps_pinned(std::uint64_t address, std::size_t bytes) const {
    return std::any_of(pinned_.begin(), pinned_.end(),
                       [&](const auto& each) { return meets(each.first, each.second, address, bytes); });
  }
  void fault(std::string text) { faults_.push_back(std::move(text)); }
  void push(std::uint64_t stream, Work work) { streams_.at(stream).push_back(std::move(work)); }

  static bool may_go_on(Work& work) {
    if (work.until && !*work.until) return false;
    if (work.try_to_end && work.try_to_end()) work.try_to_end = nullptr;
    return !work.try_to_end;
  }

  void advance(std::deque<Work>& stream) {
    Work& work = stream.front();
    if (work.moved < work.bytes) {
      const std::size_t piece = std::min<std::size_t>(work.bytes - work.moved, 1 + random_() % options_.largest_piece);
      std::byte* const to = place(work.to_device, work.to + work.moved, piece);
      const std::byte* const from = place(work.from_device, work.from + work.moved, piece);
      if (to == nullptr || from == nullptr) {
        fault("a copy touches device memory that was freed");
        is_broken_ = true;
        return;
      }
      std::memcpy(to, from, piece);
      work.moved += piece;
      if (work.moved < work.bytes) return;
    }
    const std::function<void()> run = std::move(work.run);
    stream.pop_front();
    if (run) run();
  }
  std::byte* place(bool on_device, std::uint64_t address, std::size_t bytes) const {
    return on_device ? alias(address, bytes) : reinterpret_cast<std::byte*>(address);
  }

  FakeGpuOptions options_;
  std::mt19937_64 random_;
  std::map<std::uint64_t, Block> blocks_;
  std::map<std::uint64_t, std::size_t> pinned_;
  std::map<std::uint64_t, std::deque<Work>> streams_;
  std::map<std::uint64_t, std::shared_ptr<bool>> events_;
  std::map<std::uint64_t, bool> stalled_;
  std::map<std::uint64_t, bool> captured_;
  std::vector<std::string> faults_;
  std::size_t allocated_ = 0;
  std::size_t pinned_bytes_ = 0;
  std::uint64_t last_id_ = 0;
  bool is_broken_ = false;
};

}  // namespace herring::testing
