#include "cuda/nccl.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "cuda/open.h"
#include "cuda/shared_library.h"

namespace herring::cuda {
namespace {

[[noreturn]] void no_nccl(const std::string& text) { throw Error(Code::kUnavailable, "nccl: " + text); }

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

NcclType nccl_type(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return kNcclFloat32;
    case DataType::kFloat64:
      return kNcclFloat64;
    case DataType::kFloat16:
      return kNcclFloat16;
    case DataType::kBFloat16:
      return kNcclBFloat16;
    case DataType::kInt32:
      return kNcclInt32;
    case DataType::kInt64:
      return kNcclInt64;
    default:
      throw Error(Code::kInternal, "nccl: asked to reduce " + std::string(name(type)));
  }
}

NcclReduce nccl_reduce(ReduceOp reduce) {
  if (reduce == ReduceOp::kSum) return kNcclSum;
  if (reduce == ReduceOp::kAverage) return kNcclAverage;
  throw Error(Code::kInternal, "nccl: asked for a reduction that is neither sum nor average");
}

const void* source_at(DeviceSpan span) { return reinterpret_cast<const void*>(span.address); }
void* target_at(DeviceSpan span) { return reinterpret_cast<void*>(span.address); }
NcclStream nccl_stream(StreamHandle stream) { return reinterpret_cast<NcclStream>(stream.value); }

class Communicator final : public DeviceCollectives {
 public:
  explicit Communicator(std::shared_ptr<Nccl> library) : library_(std::move(library)) {}
  ~Communicator() override { abort(); }

  Status connect(NcclId id, int members, int index, int blocks) {
    NcclConfig config;
    config.max_ctas = blocks;
    // NCCL may write its handle later, from a thread of its own.
    const NcclResult result = library_->api().comm_init(&communicator_, members, id, index, &config);
    return library_->check(result, "ncclCommInitRankConfig", nullptr);
  }

  Status poll() override {
    if (communicator_ == nullptr) return {Code::kCancelled, "nccl: the communicator was aborted"};
    NcclResult state = kNcclSuccess;
    const NcclResult asked = library_->api().comm_get_async_error(communicator_, &state);
    return library_->check(asked == kNcclSuccess ? state : asked, "ncclCommGetAsyncError", communicator_);
  }

  Status all_reduce(StreamHandle stream, DeviceSpan to, DeviceSpan from, DataType type, ReduceOp reduce) override {
    return ask("ncclAllReduce", [&](const NcclApi& api) {
      return api.all_reduce(source_at(from), target_at(to), from.bytes / element_bytes(type), nccl_type(type),
                            nccl_reduce(reduce), communicator_, nccl_stream(stream));
    });
  }

  Status reduce_scatter(StreamHandle stream, DeviceSpan to, DeviceSpan from, DataType type, ReduceOp reduce) override {
    return ask("ncclReduceScatter", [&](const NcclApi& api) {
      return api.reduce_scatter(source_at(from), target_at(to), to.bytes / element_bytes(type), nccl_type(type),
                                nccl_reduce(reduce), communicator_, nccl_stream(stream));
    });
  }

  Status all_gather(StreamHandle stream, DeviceSpan to, DeviceSpan from) override {
    return ask("ncclAllGather", [&](const NcclApi& api) {
      return api.all_gather(source_at(from), target_at(to), from.bytes, kNcclUInt8, communicator_, nccl_stream(stream));
    });
  }

  void abort() override {
    if (communicator_ != nullptr) library_->api().comm_abort(std::exchange(communicator_, nullptr));
  }

  void close(Instant deadline) override {
    if (communicator_ == nullptr) return;
    Status status = library_->check(library_->api().comm_finalize(communicator_), "ncclCommFinalize", communicator_);
    while (status.is_again() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      status = poll();
    }
    if (!status.is_ok()) return abort();
    library_->api().comm_destroy(std::exchange(communicator_, nullptr));
  }

 private:
  template <class Call>
  Status ask(const char* name, Call call) {
    if (communicator_ == nullptr) return {Code::kCancelled, "nccl: the communicator was aborted"};
    return library_->check(call(library_->api()), name, communicator_);
  }

  const std::shared_ptr<Nccl> library_;
  NcclCommunicator communicator_ = nullptr;
};

}  // namespace

std::shared_ptr<Nccl> Nccl::open(const std::string& library) {
  const std::shared_ptr<Nccl> nccl(new Nccl());
  nccl->load(library);
  return nccl;
}

void Nccl::load(const std::string& library) {
  const SharedLibrary opened(library);
  void* const handle = opened.handle;
  if (handle == nullptr) {
    no_nccl("no NCCL on this machine (" + opened.problem +
            "): install it (pip install nvidia-nccl-cu12, or -cu13), or set HERRING_NCCL to its path");
  }
  path_ = opened.path;
  // The version first: of an old library, it is worth more than the name of what it lacks.
  api_.get_version = reinterpret_cast<NcclApi::get_version_type*>(dlsym(handle, "ncclGetVersion"));
  if (api_.get_version == nullptr) no_nccl(path_ + " has no symbol ncclGetVersion, so it is not NCCL");
  if (api_.get_version(&version_) != kNcclSuccess) version_ = 0;
  if (version_ < kOldestVersion) {
    no_nccl(path_ + " is NCCL " + nccl_version_text(version_) + ", older than " + nccl_version_text(kOldestVersion) +
            ": install a newer one");
  }
#define HERRING_NCCL_RESOLVE(member, name, ...)                                      \
  api_.member = reinterpret_cast<NcclApi::member##_type*>(dlsym(handle, #name));     \
  if (api_.member == nullptr) {                                                      \
    no_nccl(path_ + " (NCCL " + nccl_version_text(version_) +                        \
            ") has no symbol " #name ", which Herring needs: install another NCCL"); \
  }
  HERRING_NCCL_FUNCTIONS(HERRING_NCCL_RESOLVE)
#undef HERRING_NCCL_RESOLVE
}

std::string Nccl::description() const { return "NCCL " + nccl_version_text(version_) + " (" + path_ + ")"; }

Status Nccl::check(NcclResult result, const char* call, NcclCommunicator communicator) const {
  if (result == kNcclSuccess) return Status::ok();
  if (result == kNcclInProgress) return Status::again();
  const char* const text = api_.get_error_string(result);
  const char* const last = api_.get_last_error(communicator);
  std::string message = "nccl: " + std::string(call) + " failed with " + (text == nullptr ? "an error" : text) + " (" +
                        std::to_string(result) + ")";
  if (last != nullptr && *last != '\0') message += ": " + std::string(last);
  return {Code::kTransport, std::move(message) + "; NCCL_DEBUG=INFO makes NCCL say more"};
}

Nccl::Id Nccl::make_id() {
  NcclId made{};
  check(api_.get_unique_id(&made), "ncclGetUniqueId", nullptr).or_throw();
  static_assert(sizeof(made) == sizeof(Id));
  Id id;
  std::memcpy(id.data(), made.bytes, id.size());
  return id;
}

std::unique_ptr<DeviceCollectives> Nccl::connect(const Id& id, std::uint32_t members, std::uint32_t index,
                                                 std::uint32_t blocks) {
  NcclId given{};
  std::memcpy(given.bytes, id.data(), id.size());
  auto communicator = std::make_unique<Communicator>(shared_from_this());
  const Status status = communicator->connect(given, static_cast<int>(members), static_cast<int>(index),
                                              static_cast<int>(std::min(blocks, kMostBlocks)));
  if (!status.is_ok() && !status.is_again()) throw Error(Code::kUnavailable, status.message());
  return communicator;
}

std::shared_ptr<DeviceCollectivesLibrary> open_nccl(const std::string& library) {
  static auto* const mutex = new std::mutex();
  static auto* const opened = new std::map<std::string, std::shared_ptr<Nccl>>();  // guarded by mutex
  const std::string path = library.empty() ? Nccl::kLibrary : library;
  const std::scoped_lock lock(*mutex);
  std::shared_ptr<Nccl>& nccl = (*opened)[path];
  if (!nccl) nccl = Nccl::open(path);
  return nccl;
}

}  // namespace herring::cuda
